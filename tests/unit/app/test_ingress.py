"""The routes over a real decoder, with pools that the test plays: no Ray, no HTTP server."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load

from app.errors import FovealError
from app.ingress import IngressReplica
from app.pipeline import Pipeline, Timings
from app.pools import Pools
from configs.processor import ProcessorConfig
from configs.settings import Limits, Settings
from deployments.protocol import EncodeItem, EncodeResult, PoolName
from tests.unit.conftest import Recorded

Answer = Callable[[PoolName, EncodeItem], EncodeResult]


def red(pool: PoolName, item: EncodeItem) -> EncodeResult:
    """Embeddings that tell which frames were sent: [1, 2], the first frame's mean red and the number of frames."""
    row = np.array([[item.frames[0, 0].mean(), len(item.frames)]], np.float32)
    execution: Literal["graph", "eager"] = "eager" if pool == "eager" else "graph"
    return EncodeResult(row, "float32", pool, execution, item.reason, None, queue_s=0.25, encode_s=0.5)


@dataclass
class PlayedPools:
    answer: Answer = red
    calls: list[tuple[PoolName, list[EncodeItem]]] = field(default_factory=list)
    hang: bool = False
    cancelled: int = 0

    async def encode(self, pool: PoolName, items: list[EncodeItem]) -> list[EncodeResult]:
        self.calls.append((pool, items))
        try:
            if self.hang:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [self.answer(pool, item) for item in items]

    async def largest_budget(self, modality: str) -> int:
        return 128


Post = Callable[..., httpx.Response]
SETTINGS = Settings(limits=Limits(decode_processes=1))


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    """One for all tests, as its decoder takes seconds to start."""
    shared = Pipeline(SETTINGS, ProcessorConfig(), cast(Pools, PlayedPools()))
    yield shared
    shared.close()


@pytest.fixture
def played(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> PlayedPools:
    pools = PlayedPools()
    monkeypatch.setattr(pipeline, "_pools", pools)
    return pools


def ingress_post(pipeline: Pipeline, settings: Settings) -> Post:
    ingress = IngressReplica.__new__(IngressReplica)
    ingress._settings, ingress._pools, ingress._pipeline = settings, pipeline._pools, pipeline
    api = ingress.__serve_build_asgi_app__()

    def post(**request: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://test") as client:
                return await client.post("/v1/encode", **request)

        return asyncio.run(run())

    return post


@pytest.fixture
def post(pipeline: Pipeline, played: PlayedPools) -> Post:
    return ingress_post(pipeline, SETTINGS)


def gif(red: int, frames: int = 1, side: int = 256) -> bytes:
    file = io.BytesIO()
    # A pixel that moves keeps the writer from merging equal frames.
    pictures = [Image.new("RGB", (side, side), (red, 0, 0)) for _ in range(frames)]
    for i, picture in enumerate(pictures):
        picture.putpixel((i, 0), (red, 0, 255))
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=500)
    return file.getvalue()


def test_items_go_to_their_pools_in_one_call_each_and_come_back_in_order(post: Post, played: PlayedPools) -> None:
    media = [gif(10), gif(20, 4, 64), gif(30, 20, 64), gif(40), gif(50, side=512), gif(60, 6, 64)]
    answer = post(files=[("file", (f"{i}.gif", data)) for i, data in enumerate(media)])
    assert answer.status_code == 200, answer.text
    tensors = load(answer.content)
    assert [round(float(tensors[f"{i}.embeddings"][0, 0]), -1) for i in range(6)] == [10, 20, 30, 40, 50, 60]
    assert [int(tensors[f"{i}.embeddings"][0, 1]) for i in range(6)] == [1, 4, 20, 1, 1, 6]
    assert {pool: [item.reason for item in items] for pool, items in played.calls} == {
        "image": [None, None],
        "video": [None, None],
        "eager": ["t_over_capture", "tokens_over_budget"],
    }
    assert len(played.calls) == 3
    assert answer.headers["server-timing"].split(", ")[2:4] == ["queue;dur=250.0", "encode;dur=500.0"]


def test_server_timing_and_metrics_are_the_same_measurements(post: Post, recorded: Recorded) -> None:
    data = gif(10)
    answer = post(content=data)
    stages = [part.split(";dur=") for part in answer.headers["server-timing"].split(", ")]
    measured = {name: recorded[f"foveal_{name}_seconds"] for name in ("decode", "format", "total")}
    assert all(list(series) == [()] and len(series[()]) == 1 for series in measured.values())
    assert stages == [
        ["fetch", "0.0"],
        ["decode", f"{measured['decode'][()][0] * 1000:.1f}"],
        ["queue", "250.0"],
        ["encode", "500.0"],
        ["format", f"{measured['format'][()][0] * 1000:.1f}"],
        ["total", f"{measured['total'][()][0] * 1000:.1f}"],
    ]
    assert "foveal_fetch_seconds" not in recorded
    assert (recorded["foveal_bytes_in"], recorded["foveal_bytes_out"]) == (
        {(): [len(data)]},
        {(): [len(answer.content)]},
    )


def test_each_item_is_measured_and_an_error_is_counted_by_its_code(post: Post, recorded: Recorded) -> None:
    url = "data:image/gif;base64," + base64.b64encode(gif(10)).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    assert post(json={"input": [part, part]}).status_code == 200
    assert [len(recorded[f"foveal_{name}_seconds"][()]) for name in ("fetch", "decode", "format", "total")] == [
        2,
        2,
        1,
        1,
    ]
    assert post(content=b"text").status_code == 415
    assert post(content=gif(10), params={"fsp": 1}).status_code == 422
    assert recorded["foveal_errors"] == {("unsupported_media",): [1], ("invalid_option",): [1]}
    assert len(recorded["foveal_total_seconds"][()]) == 1


def test_the_stages_kept_are_of_one_item(recorded: Recorded) -> None:
    timings = Timings()
    for fetch, decode in ((0.9, 0.1), (0.0, 0.5), (0.4, 0.7)):
        timings.note(fetch=fetch, decode=decode)
    timings.note(queue=0.2, encode=0.1)
    timings.note(queue=0.0, encode=0.25)
    assert timings.seconds == {
        "fetch": 0.4,
        "decode": 0.7,
        "queue": 0.2,
        "encode": 0.1,
        "format": 0.0,
        "total": 0.0,
    }
    assert recorded["foveal_fetch_seconds"] == {(): [0.9, 0.4]}
    assert recorded["foveal_decode_seconds"] == {(): [0.1, 0.5, 0.7]}


def test_options_reach_the_replica(post: Post, played: PlayedPools) -> None:
    post(content=gif(10, 3), params={"main_only": 1, "pooling": "mean", "modality": "image"})
    ((pool, (item,)),) = played.calls
    assert (pool, item.modality, item.main_only, item.pooling) == ("image", "image", True, "mean")
    assert item.frames.shape == (1, 3, 256, 256)
    assert item.deadline is not None


def test_the_deadline(post: Post, pipeline: Pipeline, played: PlayedPools) -> None:
    assert post(content=gif(10)).status_code == 200
    played.hang = True
    answer = ingress_post(pipeline, Settings(limits=Limits(deadline_s=1)))(content=gif(10))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    assert played.cancelled == 1


def test_one_failing_pool_cancels_the_others(post: Post, played: PlayedPools) -> None:
    real = played.encode

    async def encode(pool: PoolName, items: list[EncodeItem]) -> list[EncodeResult]:
        if pool == "image":
            await asyncio.sleep(0.05)
            raise FovealError("overloaded", "the image pool is full", None, 1)
        played.hang = True
        return await real(pool, items)

    played.encode = encode  # type: ignore[method-assign]
    answer = post(files=[("file", ("a", gif(10, 4, 64))), ("file", ("b", gif(20)))])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "overloaded"
    assert played.cancelled == 1


def test_the_first_bad_file_is_named_and_nothing_is_encoded(post: Post, played: PlayedPools) -> None:
    answer = post(files=[("file", ("a", gif(10))), ("file", ("b", b"text")), ("file", ("c", b"\x89PNG"))])
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "file[1]")
    assert played.calls == []
