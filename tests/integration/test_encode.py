"""Real HTTP on a real Ray instance: the right pool, the right numbers, the caller's own answer."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load

from benchmarks.service import Service
from tests.integration.media import Sample, jpeg, mp4, png, webp_animation

pytestmark = pytest.mark.integration
Reference = Callable[[Sample], np.ndarray]
Counters = Callable[[], dict[str, tuple[int, int]]]

IMAGE = {"pool": "image", "execution": "graph", "reason": None}
VIDEO = {"pool": "video", "execution": "graph", "reason": None}
LONG = {"pool": "eager", "execution": "eager", "reason": "t_over_capture", "budget": None}
LARGE = {"pool": "eager", "execution": "eager", "reason": "tokens_over_budget", "budget": None}


def items_of(answer: httpx.Response) -> list[dict[str, Any]]:
    header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    assert header["__metadata__"]["model"] == "tiny"
    return json.loads(header["__metadata__"]["items"])


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < tolerance


@pytest.mark.parametrize(
    ("sample", "expected", "budget"),
    [
        (png(320, 256, 1), IMAGE, 128),
        (jpeg(500, 333, 2), IMAGE, 256),
        (webp_animation(96, 64, 6, 3), VIDEO, 64),
        (mp4(160, 128, 16, 4), VIDEO, 256),
        (mp4(96, 96, 17, 5), LONG, None),
        (png(1100, 1060, 6), LARGE, None),
        (webp_animation(576, 512, 8, 7), LARGE, None),
    ],
    ids=lambda value: value.name if isinstance(value, Sample) else "",
)
def test_pool_and_values(
    client: httpx.Client,
    reference: Reference,
    counters: Counters,
    sample: Sample,
    expected: dict[str, Any],
    budget: int | None,
) -> None:
    answer = client.post("/v1/encode", content=sample.data)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/vnd.safetensors"
    (item,) = items_of(answer)
    tensors = load(answer.content)
    t, h, w = tensors["0.grid_thw"].tolist()
    assert item == {
        "index": 0,
        "modality": sample.modality,
        **expected,
        "budget": budget,
        "num_tokens": t * h * w // 4,
        "num_frames": len(sample.frames),
        "width": w * 16,
        "height": h * 16,
    }
    assert_close(tensors["0.embeddings"].numpy(), reference(sample))
    if sample.modality == "video":
        seconds = np.arange(len(sample.frames) + len(sample.frames) % 2).clip(max=len(sample.frames) - 1) / 2
        np.testing.assert_allclose(tensors["0.timestamps"], seconds.reshape(-1, 2).mean(1))
    else:
        assert "0.timestamps" not in tensors
    hit, miss = (1, 0) if expected["execution"] == "graph" else (0, 1)
    assert counters() == {"image": (0, 0), "video": (0, 0), "eager": (0, 0), expected["pool"]: (hit, miss)}


@pytest.mark.parametrize(
    ("sample", "pool"), [(png(64, 64, 1), "image"), (mp4(64, 64, 8, 2), "video"), (mp4(64, 64, 17, 3), "eager")]
)
def test_on_one_node_calls_go_past_the_handle(client: httpx.Client, sample: Sample, pool: str) -> None:
    def calls() -> tuple[int, int]:
        found = next(view for view in client.get("/v1/pools").json()["pools"] if view["name"] == pool)
        return found["calls"], found["lane_calls"]

    before = calls()
    for _ in range(3):
        assert client.post("/v1/encode", content=sample.data).status_code == 200
    assert [after - once for after, once in zip(calls(), before, strict=True)] == [3, 3]


def test_several_files_keep_their_order(client: httpx.Client, reference: Reference, counters: Counters) -> None:
    samples = [mp4(96, 96, 20, 1), png(256, 256, 2), webp_animation(64, 64, 4, 3), jpeg(320, 320, 4), png(288, 256, 5)]
    files = [("file", (f"{i}.bin", sample.data, "application/octet-stream")) for i, sample in enumerate(samples)]
    answer = client.post("/v1/encode", files=files)
    assert answer.status_code == 200, answer.text
    items, tensors = items_of(answer), load(answer.content)
    assert [item["index"] for item in items] == [0, 1, 2, 3, 4]
    assert [item["pool"] for item in items] == ["eager", "image", "video", "image", "image"]
    for i, sample in enumerate(samples):
        assert_close(tensors[f"{i}.embeddings"].numpy(), reference(sample))
    assert counters() == {"image": (3, 0), "video": (1, 0), "eager": (0, 1)}


def test_json_parts_and_json_answer(client: httpx.Client, reference: Reference) -> None:
    samples = [jpeg(256, 288, 1), mp4(64, 64, 8, 2)]
    parts = []
    for sample, kind in zip(samples, ["image_url", "video_url"], strict=True):
        url = "data:application/octet-stream;base64," + base64.b64encode(sample.data).decode()
        parts.append({"type": kind, kind: {"url": url}})
    answer = client.post("/v1/encode", json={"input": parts, "format": "json"}).json()
    assert answer["object"] == "list"
    assert answer["model"] == "tiny"
    assert answer["usage"] == {"visual_tokens": sum(entry["num_tokens"] for entry in answer["data"])}
    for i, (entry, sample) in enumerate(zip(answer["data"], samples, strict=True)):
        assert (entry["object"], entry["index"], entry["dtype"]) == ("visual_embedding", i, "float32")
        rows = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").reshape(entry["shape"])
        assert_close(rows, reference(sample))
        t, h, w = entry["grid_thw"]
        assert (w * 16, h * 16, t * h * w // 4) == (entry["width"], entry["height"], entry["num_tokens"])


def test_a_list_of_frames_is_one_video(client: httpx.Client, reference: Reference) -> None:
    stills = [png(96, 64, seed) for seed in range(5)]
    urls = ["data:image/png;base64," + base64.b64encode(still.data).decode() for still in stills]
    body = {"input": [{"type": "video", "video": urls}], "fps": 1}
    answer = client.post("/v1/encode", json=body)
    assert answer.status_code == 200, answer.text
    tensors = load(answer.content)
    frames = np.concatenate([still.frames for still in stills])
    assert_close(tensors["0.embeddings"].numpy(), reference(Sample("frames", "video", b"", frames)))
    assert tensors["0.timestamps"].tolist() == [0.5, 2.5, 4.0]
    assert items_of(answer)[0]["num_frames"] == 5
    body["input"][0]["video"][3] = urls[0][:60]
    refused = client.post("/v1/encode", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0]")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_pool_and_main_only(client: httpx.Client, reference: Reference, dtype: str) -> None:
    sample = png(256, 320, 9)
    full = reference(sample)
    options = {"dtype": dtype, "pooling": "mean", "main_only": "true"}
    whole = load(client.post("/v1/encode", content=sample.data).content)["0.embeddings"]
    cast = load(client.post("/v1/encode", content=sample.data, params={"dtype": dtype}).content)["0.embeddings"]
    assert torch.equal(cast, whole.to(getattr(torch, dtype)))
    pooled = load(client.post("/v1/encode", content=sample.data, params=options).content)["0.embeddings"]
    assert pooled.dtype == getattr(torch, dtype)
    assert_close(pooled.float().numpy(), full[:, : full.shape[1] // 4].mean(0, keepdims=True), 1e-2)


def test_curl_as_in_the_readme(service: Service, tmp_path: Path, reference: Reference) -> None:
    sample = jpeg(300, 200, 11)
    (tmp_path / "photo.jpg").write_bytes(sample.data)
    command = ["curl", "-sS", "--data-binary", "@photo.jpg", f"{service.url}/v1/encode", "-o", "out.safetensors"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    tensors = load((tmp_path / "out.safetensors").read_bytes())
    assert_close(tensors["0.embeddings"].numpy(), reference(sample))


def test_concurrent_clients_get_their_own_answers(service: Service, reference: Reference, counters: Counters) -> None:
    rng = random.Random(0)
    plans: list[list[Sample]] = []
    for i in range(16):
        kinds = [
            png(256 + 32 * (i % 4), 256, 100 + i),
            jpeg(320, 256 + 32 * (i % 3), 200 + i),
            webp_animation(64, 96, 3 + i % 4, 300 + i),
            mp4(96, 64, 18 + i % 3, 400 + i),
        ]
        rng.shuffle(kinds)
        plans.append(kinds)

    async def one_client(plan: list[Sample]) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=service.url, timeout=150) as session:
            return [await session.post("/v1/encode", content=sample.data) for sample in plan]

    async def all_clients() -> list[list[httpx.Response]]:
        return await asyncio.gather(*map(one_client, plans))

    answers = asyncio.run(all_clients())
    pools: Counter[str] = Counter()
    for plan, responses in zip(plans, answers, strict=True):
        for sample, answer in zip(plan, responses, strict=True):
            assert answer.status_code == 200, answer.text
            assert_close(load(answer.content)["0.embeddings"].numpy(), reference(sample))
            pools[items_of(answer)[0]["pool"]] += 1
    assert pools == {"image": 32, "video": 16, "eager": 16}
    assert counters() == {"image": (32, 0), "video": (16, 0), "eager": (0, 16)}


def test_a_client_cannot_override_serves_own_rules(client: httpx.Client) -> None:
    headers = {"x-request-timeout-seconds": "0.001", "x-request-disconnect-disabled": "?1"}
    assert client.post("/v1/encode", content=png(256, 256, 13).data, headers=headers).status_code == 200


def test_headers_and_log_line(service: Service, client: httpx.Client) -> None:
    sample = png(256, 256, 12)
    answer = client.post("/v1/encode", content=sample.data, headers={"x-request-id": "the-callers-own"})
    assert answer.headers.get_list("x-request-id") == ["the-callers-own"]
    stages = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(stages) == ["fetch", "decode", "queue", "encode", "store", "format", "total"]
    assert float(stages["decode"]) > 0
    assert float(stages["encode"]) > 0
    own = httpx.post(f"{service.url}/v1/encode", content=sample.data, timeout=60)
    assert len(own.headers.get_list("x-request-id")) == 1
    (record,) = service.log_records("the-callers-own")
    assert record.pop("ms") > 0
    assert record == {
        "id": "the-callers-own",
        "method": "POST",
        "path": "/v1/encode",
        "code": 200,
        "bytes_out": len(answer.content),
        "items": 1,
        "pools": ["image"],
    }
