"""The two other ways out of the service: files in a shared folder, and arrays through a Serve handle."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file

from benchmarks.service import Service
from tests.integration.media import mp4, png
from tests.integration.test_encode import items_of

pytestmark = pytest.mark.integration
Counters = Callable[[], dict[str, tuple[int, int]]]

# A caller that has none of our code.
CALLER = """
import json, sys
from pathlib import Path

for name in ("app", "configs", "deployments", "encoder"):
    sys.modules[name] = None

import numpy as np
import ray
from ray import serve
from ray.exceptions import RayTaskError

address, folder = sys.argv[1], Path(sys.argv[2])
ray.init(address, log_to_driver=False)
handle = serve.get_app_handle("foveal")
media = [(folder / name).read_bytes() for name in ("a.png", "b.mp4")]
items = handle.encode.remote(media).result(timeout_s=120)
arrays = {}
for i, item in enumerate(items):
    for name in [name for name, value in item.items() if isinstance(value, np.ndarray)]:
        arrays[f"{i}.{name}"] = item.pop(name)
np.savez(folder / "arrays.npz", **arrays)
(pooled,) = handle.encode.remote(media[0], pooling="mean", dtype="bfloat16", main_only=True).result(timeout_s=120)
(stored,) = handle.encode.remote(media[0], deliver="store", min_pixels=50176).result(timeout_s=120)
errors = []
for wrong, options in (([media[0], b"text"], {}), (media[0], {"fsp": 1}), (bytes(65 << 20), {}), ([media[0]] * 65, {})):
    try:
        handle.encode.remote(wrong, **options).result(timeout_s=120)
    except RayTaskError as error:
        assert type(error.cause) is RuntimeError
        errors.append(json.loads(str(error.cause)))
print(json.dumps({
    "items": items,
    "errors": errors,
    "pooled": [list(pooled["embeddings"].shape), str(pooled["embeddings"].dtype), pooled["dtype"]],
    "stored": {k: v for k, v in stored.items() if k != "grid_thw"},
}))
"""


def test_a_stored_file_is_the_inline_answer_and_repeats_are_hits(
    client: httpx.Client, counters: Counters, store_root: Path
) -> None:
    samples = [png(320, 256, 31), mp4(160, 128, 16, 32), mp4(96, 96, 17, 33)]
    files = [("file", (f"{i}.bin", sample.data)) for i, sample in enumerate(samples)]
    inline = client.post("/v1/encode", files=files)
    new = client.post("/v1/encode", files=files, params={"deliver": "store"})
    before = counters()
    hit = client.post("/v1/encode", files=files, params={"deliver": "store"})
    assert counters() == before
    expected, written = load(inline.content), load(new.content)
    assert hit.status_code == 200
    assert set(expected) - set(written) == {f"{i}.embeddings" for i in range(3)}
    assert all(torch.equal(load(hit.content)[name], tensor) for name, tensor in written.items())
    for i, (told, first, again) in enumerate(zip(*map(items_of, (inline, new, hit)), strict=True)):
        # As vLLM's connector loads it, by the hash that it is given as the part's uuid.
        tensor = load_file(str(store_root / first["hash"] / "encoder_cache.safetensors"), device="cpu")["ec_cache"]
        assert torch.equal(tensor, expected[f"{i}.embeddings"])
        more = {"hash": first["hash"], "shape": list(tensor.shape), "dtype": "float32"}
        assert first == {**told, **more, "stored": "new"}
        assert again == {**told, **more, "stored": "hit"}
        assert torch.equal(written[f"{i}.grid_thw"], expected[f"{i}.grid_thw"])
        assert (f"{i}.timestamps" in written) == (told["modality"] == "video")
    as_json = client.post("/v1/encode", content=samples[0].data, params={"deliver": "store", "format": "json"}).json()
    assert as_json["data"][0]["hash"] == items_of(new)[0]["hash"]
    assert "embedding" not in as_json["data"][0]


def test_requests_for_one_item_at_once_are_all_right(client: httpx.Client, store_root: Path) -> None:
    sample = png(352, 288, 34)
    inline = load(client.post("/v1/encode", content=sample.data).content)["0.embeddings"]

    def post(_: int) -> httpx.Response:
        return client.post("/v1/encode", content=sample.data, params={"deliver": "store"})

    with ThreadPoolExecutor(6) as pool:
        items = [items_of(answer)[0] for answer in pool.map(post, range(12))]
    assert len({item["hash"] for item in items}) == 1
    stored = Counter(item["stored"] for item in items)
    assert stored["new"] >= 1
    assert stored["hit"] >= 6  # those that came after one of the first six was answered
    tensor = load_file(store_root / items[0]["hash"] / "encoder_cache.safetensors")["ec_cache"]
    # A batch of other items may round differently.
    torch.testing.assert_close(tensor, inline, rtol=1e-4, atol=1e-5)
    assert list(store_root.glob(".tmp-*")) == []
    files = store_root.glob("*/encoder_cache.safetensors")
    assert int((store_root / ".lock").read_text()) == sum(file.stat().st_size for file in files)


def test_a_caller_in_the_cluster_gets_arrays(
    service: Service, client: httpx.Client, ray_auth: dict[str, str], tmp_path: Path, store_root: Path
) -> None:
    image, clip = png(256, 320, 35), mp4(96, 64, 7, 36)
    (tmp_path / "a.png").write_bytes(image.data)
    (tmp_path / "b.mp4").write_bytes(clip.data)
    pid = service.processes("--gcs-address=")[0]
    address = re.findall(r"--gcs-address=([\d.:]+)", Path(f"/proc/{pid}/cmdline").read_text())[0]
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", CALLER, address, str(tmp_path)],
        cwd=tmp_path,
        env=environment | ray_auth | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    answer = client.post("/v1/encode", files=[("file", ("a", image.data)), ("file", ("b", clip.data))])
    expected = load(answer.content)
    assert told["items"] == [{**item, "dtype": "float32"} for item in items_of(answer)]
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert set(arrays) == set(expected)
        for name, tensor in expected.items():
            assert np.array_equal(arrays[name], tensor.numpy()), name
    assert told["pooled"] == [[1, 96], "uint16", "bfloat16"]
    assert told["stored"]["stored"] == "new"
    assert (store_root / told["stored"]["hash"] / "encoder_cache.safetensors").exists()
    assert [(error["code"], error["param"]) for error in told["errors"]] == [
        ("unsupported_media", "media[1]"),
        ("invalid_option", "fsp"),
        ("body_too_large", None),
        ("too_many_items", None),
    ]


def test_main_only_cannot_be_stored(client: httpx.Client) -> None:
    answer = client.post("/v1/encode", content=png(256, 256, 37).data, params={"deliver": "store", "main_only": "1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "deliver")
