"""Each pool's replica by itself, without Ray, on the tiny model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from configs.settings import EagerSettings, GraphSettings, Limits, Settings, VideoSettings
from deployments.eager import EagerReplica
from deployments.image_graph import ImageReplica
from deployments.pool import PoolReplica, graph_budgets
from deployments.protocol import EncodeCall, EncodeItem, EncodeResult
from deployments.video_graph import VideoReplica
from encoder.budgets import PackLimits

SETTINGS = Settings(
    device="cpu",
    image=GraphSettings(token_budgets=(4, 16), max_batch_size=2),
    video=VideoSettings(token_budgets=(8, 32), max_batch_size=2, t_capture=2),
)


def frames(count: int, height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), np.uint8)


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds replicas whose threads end with the test: one left in torch when Python ends would abort it."""
    made: list[PoolReplica] = []

    def build(kind: type[Any], settings: Settings = SETTINGS) -> PoolReplica:
        made.append(kind(settings))
        return made[-1]

    yield build
    for replica in made:
        replica._batcher.close()
        replica._lanes.close()


def encode(replica: PoolReplica, *items: EncodeItem) -> list[EncodeResult]:
    return asyncio.run(replica.encode(EncodeCall("ingress", list(items)))).results


IMAGES = [EncodeItem("image", frames(1, 64, 64, seed)) for seed in range(5)]
VIDEOS = [EncodeItem("video", frames(3, 64, 64, seed)) for seed in range(5)]


def test_the_image_and_eager_pools_agree(make: Make) -> None:
    image, eager = make(ImageReplica), make(EagerReplica)
    results = encode(image, *IMAGES)
    assert [(r.pool, r.execution, r.reason, r.error) for r in results] == [("image", "graph", None, None)] * 5
    for result, expected in zip(results, encode(eager, *IMAGES), strict=True):
        assert (expected.pool, expected.execution, expected.budget) == ("eager", "eager", None)
        np.testing.assert_allclose(result.embeddings, expected.embeddings, rtol=1e-4, atol=1e-5)
    state = asyncio.run(image.state())
    assert (state.backend, state.dtype, state.token_budgets, state.t_capture) == (
        "cpu-static",
        "float32",
        (4, 16),
        None,
    )
    assert (state.limits.max_items, state.hits, state.misses, state.used_tokens) == (2, 5, 0, 20)
    state = asyncio.run(eager.state())
    assert (state.token_budgets, state.hits, state.misses, state.fault) == ((), 0, 5, None)


def test_the_video_pool_takes_t_capture_segments_a_video(make: Make) -> None:
    replica = make(VideoReplica)
    results = encode(replica, *VIDEOS)
    assert [(r.pool, r.execution, r.reason) for r in results] == [("video", "graph", None)] * 5
    state = asyncio.run(replica.state())
    assert (state.token_budgets, state.t_capture, state.hits, state.misses) == ((8, 32), 2, 5, 0)
    # What the router should have sent elsewhere is still answered, by itself, and told.
    (long,) = encode(replica, EncodeItem("video", frames(6, 64, 64, 9)))
    assert (long.execution, long.reason) == ("eager", "t_over_capture")


def test_a_bad_item_fails_alone_and_the_replica_stays_well(make: Make) -> None:
    replica = make(EagerReplica)
    bad = EncodeItem("image", frames(2, 64, 64, 1))
    assert [r.error for r in encode(replica, IMAGES[0], bad, IMAGES[1])] == [None, "internal", None]
    replica.check_health()


def test_a_failed_batch_makes_the_replica_unhealthy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make(EagerReplica)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(replica._runner, "submit", broken)
    (result,) = encode(replica, IMAGES[0])
    assert result.error == "fault"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        replica.check_health()
    assert "illegal memory access" in (asyncio.run(replica.state()).fault or "")


def test_a_batch_that_does_not_end_makes_the_replica_unhealthy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make(EagerReplica, Settings(device="cpu", limits=Limits(deadline_s=1.0)))
    monkeypatch.setattr("deployments.pool.HUNG_DEADLINES", 0.05)
    hangs, submit = threading.Event(), replica._runner.submit

    def hung(*args: Any, **options: Any) -> Any:
        hangs.wait()
        return submit(*args, **options)

    monkeypatch.setattr(replica._runner, "submit", hung)

    async def run() -> list[EncodeResult]:
        replica.check_health()
        task = asyncio.create_task(replica.encode(EncodeCall("ingress", IMAGES[:1])))
        while replica._batcher.running_s() < 0.1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="a batch has been running for 0 s"):
            replica.check_health()
        hangs.set()
        return (await task).results

    (result,) = asyncio.run(run())
    assert result.error is None
    # Items have their results a moment before the batch counts as ended.
    limit = time.monotonic() + 10
    while replica._batcher.running_s() and time.monotonic() < limit:
        time.sleep(0.001)
    replica.check_health()


def test_cancelling_a_call_drops_what_waits(make: Make) -> None:
    replica = make(EagerReplica, Settings(device="cpu", eager=EagerSettings(max_batch_size=1)))

    items = [EncodeItem("image", frames(1, 512, 512, i)) for i in range(40)]

    async def run() -> None:
        task = asyncio.create_task(replica.encode(EncodeCall("ingress", items)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        state = await replica.state()
        assert state.queue.items == 0
        assert state.queue.cancelled > 30

    asyncio.run(run())


def test_dropped_items_leave_their_call_and_cost_nothing(make: Make) -> None:
    replica = make(EagerReplica, Settings(device="cpu", eager=EagerSettings(max_batch_size=1)))
    items = [EncodeItem("image", frames(1, 512, 512, i)) for i in range(12)]

    async def run() -> list[EncodeResult]:
        task = asyncio.create_task(replica.encode(EncodeCall("ingress", items)))
        await asyncio.sleep(0)
        await replica.drop({item.id for item in items[4:]} | {"of another pool"})
        return (await task).results

    results = asyncio.run(run())
    assert [r.error for r in results] == [None] * 4 + ["cancelled"] * 8
    state = asyncio.run(replica.state())
    assert (state.misses, state.queue.cancelled, state.queue.items, state.queue.tokens, state.queue.bytes) == (
        4, 8, 0, 0, 0
    )  # fmt: skip
    assert state.busy_s > 0


def test_user_config_changes_batching_and_queue_without_a_restart(make: Make) -> None:
    replica = make(ImageReplica)
    replica.reconfigure({"max_batch_size": 1, "max_queued_items": 1})
    results = encode(replica, *IMAGES)
    assert {r.error for r in results} == {None, "overloaded"}
    state = asyncio.run(replica.state())
    assert state.limits == PackLimits(max_tokens=16, max_items=1, max_seqs=1)
    assert state.queue.rejected == sum(r.error == "overloaded" for r in results) > 0
    replica.reconfigure({})
    assert asyncio.run(replica.state()).limits == PackLimits(max_tokens=16, max_items=2, max_seqs=2)
    assert [r.error for r in encode(replica, *IMAGES)] == [None] * 5


@pytest.mark.parametrize(
    ("kind", "user_config", "named"),
    [
        (ImageReplica, {"max_batch_size": 3}, "max_batch_size"),
        (ImageReplica, {"max_batch_tokens": 300}, "max_batch_tokens"),
        (ImageReplica, {"token_budgets": [4]}, "token_budgets"),
        (VideoReplica, {"max_queued_bytes": 1000}, "max_queued_bytes"),
        (EagerReplica, {"max_batch_tokens": 300}, "max_batch_tokens"),
        (EagerReplica, {"max_queued_items": 0}, "max_queued_items"),
    ],
)
def test_an_impossible_user_config_is_refused_by_name_and_changes_nothing(
    make: Make, kind: type[Any], user_config: dict[str, Any], named: str
) -> None:
    replica = make(kind)
    before = asyncio.run(replica.state()).limits
    with pytest.raises(ValueError, match=named):
        replica.reconfigure(user_config)
    assert asyncio.run(replica.state()).limits == before


def test_generated_budgets_depend_on_the_device() -> None:
    own = GraphSettings()
    assert graph_budgets(Settings(device="cpu"), own) == [64, 128, 256, 512, 1024]
    assert graph_budgets(Settings(device="cuda"), own)[-1] == 16384
    assert graph_budgets(Settings(device="cpu"), GraphSettings(max_tokens=96)) == [64, 96]
    assert graph_budgets(Settings(device="cpu"), GraphSettings(token_budgets=(16, 80))) == [16, 80]
