"""The routes over a real decoder, with pools that the test plays: no Ray, no HTTP server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from safetensors.numpy import load, load_file

from app.errors import FovealError
from app.ingress import IngressReplica, _open_store
from app.pipeline import Pipeline, Timings
from app.pools import Pools
from app.store import FILE, Store
from configs.processor import ProcessorConfig
from configs.settings import Limits, Settings
from deployments.protocol import EncodeItem, EncodeResult, PoolName
from encoder.checkpoint import resolve_checkpoint
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
    calls: list[tuple[PoolName, EncodeItem]] = field(default_factory=list)
    hang: bool = False
    cancelled: int = 0

    async def encode(self, pool: PoolName, item: EncodeItem) -> EncodeResult:
        self.calls.append((pool, item))
        try:
            if self.hang:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.answer(pool, item)

    async def dtype(self) -> str:
        return "float32"

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


def make_ingress(pipeline: Pipeline, settings: Settings) -> tuple[IngressReplica, FastAPI]:
    ingress = IngressReplica.__new__(IngressReplica)
    ingress._args = ingress._settings = settings
    ingress._pools, ingress._pipeline = pipeline._pools, pipeline
    return ingress, ingress.__serve_build_asgi_app__()


def ingress_post(pipeline: Pipeline, settings: Settings) -> Post:
    return poster(make_ingress(pipeline, settings)[1])


def poster(api: FastAPI) -> Post:
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


def test_items_go_to_their_pools_and_come_back_in_order(post: Post, played: PlayedPools) -> None:
    media = [gif(10), gif(20, 4, 64), gif(30, 20, 64), gif(40), gif(50, side=512), gif(60, 6, 64)]
    answer = post(files=[("file", (f"{i}.gif", data)) for i, data in enumerate(media)])
    assert answer.status_code == 200, answer.text
    tensors = load(answer.content)
    assert [round(float(tensors[f"{i}.embeddings"][0, 0]), -1) for i in range(6)] == [10, 20, 30, 40, 50, 60]
    assert [int(tensors[f"{i}.embeddings"][0, 1]) for i in range(6)] == [1, 4, 20, 1, 1, 6]
    assert Counter((pool, item.reason) for pool, item in played.calls) == {
        ("image", None): 2,
        ("video", None): 2,
        ("eager", "t_over_capture"): 1,
        ("eager", "tokens_over_budget"): 1,
    }
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
        ["store", "0.0"],
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
        "store": 0.0,
        "format": 0.0,
        "total": 0.0,
    }
    assert recorded["foveal_fetch_seconds"] == {(): [0.9, 0.4]}
    assert recorded["foveal_decode_seconds"] == {(): [0.1, 0.5, 0.7]}


def test_options_reach_the_replica(post: Post, played: PlayedPools) -> None:
    post(content=gif(10, 3), params={"main_only": 1, "pooling": "mean", "modality": "image"})
    ((pool, item),) = played.calls
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

    async def encode(pool: PoolName, item: EncodeItem) -> EncodeResult:
        if pool == "image":
            await asyncio.sleep(0.05)
            raise FovealError("overloaded", "the image pool is full", None, 1)
        played.hang = True
        return await real(pool, item)

    played.encode = encode  # type: ignore[method-assign]
    answer = post(files=[("file", ("a", gif(10, 4, 64))), ("file", ("b", gif(20)))])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "overloaded"
    assert played.cancelled == 1


def test_the_first_bad_file_is_named_and_nothing_is_encoded(post: Post, played: PlayedPools) -> None:
    answer = post(files=[("file", ("a", gif(10))), ("file", ("b", b"text")), ("file", ("c", b"\x89PNG"))])
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "file[1]")
    assert played.calls == []


def items_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    return json.loads(header["__metadata__"]["items"])


def data_url(data: bytes) -> str:
    return "data:image/gif;base64," + base64.b64encode(data).decode()


class TestStore:
    @pytest.fixture
    def root(self, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(pipeline, "_store", Store(tmp_path, 1 << 30, 60, "the checkpoint"))
        return tmp_path

    def test_a_repeat_is_neither_decoded_nor_encoded(
        self, post: Post, played: PlayedPools, root: Path, recorded: Recorded
    ) -> None:
        request = {"content": gif(10, 5, 64), "params": {"deliver": "store"}}
        first, again = post(**request), post(**request)
        (new,), (hit,) = items_of(first), items_of(again)
        assert hit == {**new, "stored": "hit"}
        assert (new["stored"], new["execution"], new["shape"], new["dtype"]) == ("new", "graph", [1, 2], "float32")
        assert len(played.calls) == len(recorded["foveal_decode_seconds"][()]) == 1
        for answer in (first, again):
            tensors = load(answer.content)
            assert sorted(tensors) == ["0.grid_thw", "0.timestamps"]
            assert tensors["0.timestamps"].tolist() == [0.25, 1.25, 2.0]
        rows = load_file(root / new["hash"] / FILE)["ec_cache"]
        assert (round(float(rows[0, 0]), -1), rows[0, 1]) == (10, 5)
        assert recorded["foveal_store_items"] == {("new",): [1], ("hit",): [1]}
        stages = [dict(part.split(";dur=") for part in a.headers["server-timing"].split(", ")) for a in (first, again)]
        assert [float(stage["store"]) > 0 for stage in stages] == [True, False]
        assert f"{recorded['foveal_store_seconds'][()][0] * 1000:.1f}" == stages[0]["store"]

    def test_options_that_change_the_result_are_other_files(self, post: Post, played: PlayedPools, root: Path) -> None:
        data = gif(10, 4)
        options = [
            {},
            {"pooling": "mean"},
            {"modality": "image"},
            {"modality": "video"},
            {"num_frames": "2"},
            {"fps": "1"},
            {"dtype": "float16"},
            {"min_pixels": "131072"},
            {"max_pixels": "262144"},
        ]
        for repeat in range(2):
            for option in options:
                (item,) = items_of(post(content=data, params={"deliver": "store", **option}))
                assert item["stored"] == ("hit" if repeat else "new"), option
        assert len(played.calls) == len(list(root.glob(f"*/{FILE}"))) == len(options)
        # What `auto` stands for is the same file, and so is another format of the answer.
        for option in ({"dtype": "float32"}, {"format": "json"}):
            assert post(content=data, params={"deliver": "store", **option}).status_code == 200
        assert len(played.calls) == len(options)

    def test_hits_and_misses_of_one_request_keep_their_order(self, post: Post, played: PlayedPools, root: Path) -> None:
        post(content=gif(20), params={"deliver": "store"})
        files = [("file", (f"{red}.gif", gif(red))) for red in (10, 20, 30)]
        answer = post(files=files, params={"deliver": "store", "format": "json"}).json()
        assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
        assert [entry["stored"] for entry in answer["data"]] == ["new", "hit", "new"]
        rows = [load_file(root / entry["hash"] / FILE)["ec_cache"] for entry in answer["data"]]
        assert [round(float(row[0, 0]), -1) for row in rows] == [10, 20, 30]
        assert answer["usage"]["visual_tokens"] == sum(entry["num_tokens"] for entry in answer["data"]) > 0
        assert all("embedding" not in entry and "grid_thw" in entry for entry in answer["data"])

    def test_frames_in_another_order_are_another_video(self, post: Post, played: PlayedPools, root: Path) -> None:
        urls = [data_url(gif(red, side=64)) for red in (10, 20, 30)]

        def stored(*order: int) -> dict[str, Any]:
            part = {"type": "video", "video": [urls[i] for i in order]}
            (item,) = items_of(post(json={"input": [part], "deliver": "store"}))
            return item

        new, other, again = stored(0, 1, 2), stored(2, 1, 0), stored(0, 1, 2)
        assert [item["stored"] for item in (new, other, again)] == ["new", "new", "hit"]
        assert new["hash"] == again["hash"] != other["hash"]

    def test_a_part_that_says_what_it_is_is_the_option(self, post: Post, played: PlayedPools, root: Path) -> None:
        part = {"type": "image_url", "image_url": {"url": data_url(gif(10))}}
        (said,) = items_of(post(json={"input": [part], "deliver": "store"}))
        (option,) = items_of(post(content=gif(10), params={"deliver": "store", "modality": "image"}))
        assert (said["stored"], option["stored"], said["hash"]) == ("new", "hit", option["hash"])

    def test_a_store_too_small_for_one_item_is_refused_at_start(self, tmp_path: Path) -> None:
        folder, width = resolve_checkpoint("tiny"), 4 * 96
        settings = {"store": {"root": str(tmp_path / "store"), "max_bytes": 16384 * width * 4}}
        assert len(_open_store(Settings.model_validate(settings), folder).checkpoint) == 64
        settings["store"]["max_bytes"] = 16384 * width * 4 - 1
        with pytest.raises(ValueError, match=r"store\.max_bytes .* limits\.max_tokens"):
            _open_store(Settings.model_validate(settings), folder)

    def test_refusals(self, post: Post, played: PlayedPools) -> None:
        off = post(content=gif(10), params={"deliver": "store"})
        main_only = post(content=gif(10), params={"deliver": "store", "main_only": "1"})
        for answer in (off, main_only):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (422, "invalid_option", "deliver")
        assert played.calls == []

    def test_no_room(
        self, post: Post, pipeline: Pipeline, played: PlayedPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pipeline, "_store", Store(tmp_path, 600, 60))
        assert post(content=gif(10), params={"deliver": "store"}).status_code == 200
        answer = post(content=gif(20), params={"deliver": "store"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert items_of(post(content=gif(10), params={"deliver": "store"}))[0]["stored"] == "hit"


class TestHandleCalls:
    def call(self, pipeline: Pipeline, media: Any, settings: Settings = SETTINGS, **options: Any) -> Any:
        ingress, _ = make_ingress(pipeline, settings)
        try:
            return asyncio.run(ingress.encode(media, **options))
        finally:
            assert (ingress._in_flight.items, ingress._in_flight.bytes) == (0, 0)

    def refused(self, *arguments: Any, **options: Any) -> tuple[str, str | None]:
        with pytest.raises(RuntimeError) as caught:
            self.call(*arguments, **options)
        assert type(caught.value) is RuntimeError
        error = json.loads(str(caught.value))
        assert set(error) == {"message", "type", "code", "param"}
        assert len(error["message"]) > 5
        return error["code"], error["param"]

    def test_arrays_and_the_same_facts(
        self, post: Post, pipeline: Pipeline, played: PlayedPools, recorded: Recorded
    ) -> None:
        media = [gif(10), gif(20, 5, 64)]
        given = self.call(pipeline, media, pooling="mean")
        assert [item.pooling for _, item in played.calls] == ["mean", "mean"]
        answer = post(files=[("file", ("a", data)) for data in media], params={"pooling": "mean"})
        tensors = load(answer.content)
        arrays = ("grid_thw", "timestamps", "embeddings")
        for i, (item, facts) in enumerate(zip(given, items_of(answer), strict=True)):
            told = {name: value for name, value in item.items() if name not in arrays}
            assert told == {**facts, "dtype": "float32"}
            for name in arrays:
                assert (name in item) == (f"{i}.{name}" in tensors)
                if name in item:
                    assert item[name].dtype == tensors[f"{i}.{name}"].dtype
                    assert np.array_equal(item[name], tensors[f"{i}.{name}"])
        size = sum(map(len, media))
        assert recorded["foveal_bytes_in"][()][0] == size
        assert recorded["foveal_bytes_out"][()][0] == 2 * 8
        assert len(recorded["foveal_total_seconds"][()]) == 2
        assert max(recorded["foveal_bytes_in_flight"][()]) >= size
        assert max(recorded["foveal_items_in_flight"][()]) == 2

    def test_one_medium_is_a_list_of_one(self, pipeline: Pipeline, played: PlayedPools) -> None:
        (item,) = self.call(pipeline, gif(10))
        assert round(float(item["embeddings"][0, 0]), -1) == 10

    def test_into_the_store(
        self, pipeline: Pipeline, played: PlayedPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pipeline, "_store", Store(tmp_path, 1 << 30, 60))
        items = [self.call(pipeline, gif(10), deliver="store")[0] for _ in range(2)]
        assert [item["stored"] for item in items] == ["new", "hit"]
        assert all("embeddings" not in item for item in items)
        assert (tmp_path / items[0]["hash"] / FILE).exists()

    def test_errors_have_code_and_param(self, pipeline: Pipeline, played: PlayedPools, recorded: Recorded) -> None:
        small = Settings(limits=Limits(decode_processes=1, max_items=2, max_body_bytes=2000))
        assert self.refused(pipeline, [gif(10), b"text"]) == ("unsupported_media", "media[1]")
        assert self.refused(pipeline, [gif(10), b""]) == ("empty_body", "media[1]")
        assert self.refused(pipeline, gif(10), fsp=1) == ("invalid_option", "fsp")
        assert self.refused(pipeline, gif(10), main_only="yes") == ("invalid_option", "main_only")
        assert self.refused(pipeline, gif(10), format="json") == ("invalid_option", "format")
        assert self.refused(pipeline, gif(10), deliver="store") == ("invalid_option", "deliver")
        for media in ([], "photo.jpg", [gif(10), 5], None):
            assert self.refused(pipeline, media) == ("malformed_request", "media")
        assert self.refused(pipeline, [gif(10, side=8)] * 3, small) == ("too_many_items", None)
        assert self.refused(pipeline, os.urandom(2001), small) == ("body_too_large", None)
        played.hang = True
        fast = Settings(limits=Limits(decode_processes=1, deadline_s=0.5))
        assert self.refused(pipeline, gif(10), fast) == ("deadline", None)
        assert recorded["foveal_errors"][("invalid_option",)] == [1] * 4
        assert recorded["foveal_errors"][("deadline",)] == [1]

    def test_what_is_in_flight_counts(self, pipeline: Pipeline, played: PlayedPools, recorded: Recorded) -> None:
        """A call that hangs fills the ingress; the next one is refused; cancelling the first lets go."""
        limits = Limits(decode_processes=1, max_items=2, max_items_in_flight=2)
        ingress, _ = make_ingress(pipeline, Settings(limits=limits))
        played.hang = True

        async def run() -> str:
            first = asyncio.create_task(ingress.encode([gif(10), gif(20)]))
            while len(played.calls) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError) as caught:
                await ingress.encode(gif(30))
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            return json.loads(str(caught.value))["code"]

        assert asyncio.run(run()) == "overloaded"
        assert (ingress._in_flight.items, ingress._in_flight.bytes, played.cancelled) == (0, 0, 2)
        assert recorded["foveal_requests_cancelled"] == {(): [1]}


class TestUserConfig:
    @pytest.fixture
    def live(self, pipeline: Pipeline, played: PlayedPools) -> Iterator[tuple[IngressReplica, Post]]:
        ingress, api = make_ingress(pipeline, SETTINGS)
        yield ingress, poster(api)
        pipeline.configure(SETTINGS)

    def test_limits_change_on_a_running_ingress_and_absent_ones_are_the_arguments(
        self, live: tuple[IngressReplica, Post], played: PlayedPools
    ) -> None:
        ingress, post = live
        files = [("file", (f"{i}.gif", gif(10 * i), "image/gif")) for i in range(3)]

        def code(user_config: dict[str, Any]) -> str:
            ingress.reconfigure(user_config)
            answer = post(files=files)
            return "ok" if answer.status_code == 200 else answer.json()["error"]["code"]

        assert code({}) == "ok"
        assert code({"max_items": 2}) == "too_many_items"
        assert code({"max_body_bytes": 1000}) == "body_too_large"
        ingress._in_flight.bytes += 50_000_000
        assert code({"max_bytes_in_flight": 50_000_001, "max_body_bytes": 1_000_000}) == "overloaded"
        ingress._in_flight.bytes -= 50_000_000
        ingress._in_flight.items += 1
        assert code({"max_items_in_flight": 3}) == "overloaded"
        ingress._in_flight.items -= 1
        assert code({"decode_timeout_s": 1e-6}) == "decode_timeout"
        assert code({}) == "ok"
        played.hang = True
        assert code({"deadline_s": 0.3}) == "deadline"
        played.hang = False
        assert code({}) == "ok"

    @pytest.mark.parametrize(
        ("user_config", "named"),
        [
            ({"max_itmes": 3}, "max_itmes"),
            ({"decode_processes": 3}, "decode_processes"),
            ({"deadline_s": 0}, "deadline_s"),
            ({"max_body_bytes": 1 << 40}, "limits.max_bytes_in_flight"),
        ],
    )
    def test_an_impossible_one_is_refused_by_name_and_changes_nothing(
        self, live: tuple[IngressReplica, Post], user_config: dict[str, Any], named: str
    ) -> None:
        ingress, _ = live
        with pytest.raises(ValueError, match=named):
            ingress.reconfigure({"max_items": 2, **user_config})
        assert ingress._settings == SETTINGS
