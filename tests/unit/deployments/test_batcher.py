"""The decision what to batch, and the threads around it, with a runner that the test holds and lets go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.batcher import Batcher, count_that_fit
from deployments.metrics import ReplicaMetrics
from deployments.protocol import EncodeItem, EncodeResult, Size
from encoder.budgets import PackLimits
from encoder.defs import EncodeOutput, EncodeRequest, Stopped
from tests.unit.conftest import Recorded

SIZES = st.lists(
    st.builds(Size, st.sampled_from(["image", "video"]), st.integers(1, 40), st.integers(1, 12)), max_size=40
)
LIMITS = st.builds(PackLimits, st.integers(1, 100), st.integers(1, 8), st.integers(1, 30))


@given(SIZES, LIMITS)
def test_a_batch_keeps_every_limit_and_is_as_long_as_it_can_be(waiting: list[Size], limits: PackLimits) -> None:
    count = count_that_fit(waiting, limits)
    batch = waiting[:count]
    assert count >= bool(waiting)
    assert len({size.modality for size in batch}) <= 1
    if count > 1:
        assert within(batch, limits)
    if count < len(waiting):
        longer = waiting[: count + 1]
        assert len({size.modality for size in longer}) > 1 or not within(longer, limits)


@given(SIZES, LIMITS)
def test_batches_take_everything_once_and_in_order(waiting: list[Size], limits: PackLimits) -> None:
    rest, taken = list(waiting), []
    while rest:
        count = count_that_fit(rest, limits)
        taken += rest[:count]
        rest = rest[count:]
    assert taken == waiting


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        (PackLimits(100, 10, 100), 4),
        (PackLimits(35, 10, 100), 3),
        (PackLimits(100, 2, 100), 2),
        (PackLimits(100, 10, 11), 2),
        (PackLimits(5, 10, 100), 1),
    ],
)
def test_each_limit_alone(limits: PackLimits, count: int) -> None:
    assert count_that_fit([Size("video", 10, 4), Size("video", 20, 5), *[Size("video", 5, 3)] * 2], limits) == count


def within(batch: Sequence[Size], limits: PackLimits) -> bool:
    return (
        len(batch) <= limits.max_items
        and sum(size.tokens for size in batch) <= limits.max_tokens
        and sum(size.segments for size in batch) <= limits.max_seqs
    )


@dataclass
class HeldRunner:
    """Answers each item with its own first pixel, once the test opens the gate."""

    dtype: str = "float32"
    max_in_flight: int = 1
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    batches: list[list[int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    failure: Exception | None = None

    def submit(
        self, modality: str, requests: Sequence[EncodeRequest], stop: Any = None, *, eager: bool = False
    ) -> HeldBatch:
        self.threads.add(threading.get_ident())
        self.batches.append([value(request.frames) for request in requests])
        return HeldBatch(self, requests)


@dataclass
class HeldBatch:
    runner: HeldRunner
    requests: Sequence[EncodeRequest]

    busy_seconds: float = 0.25

    def result(self) -> list[EncodeOutput | Exception]:
        assert self.runner.gate.acquire(timeout=10)
        if self.runner.failure is not None:
            raise self.runner.failure
        return [
            ValueError("bad item")
            if value(request.frames) == 255
            else EncodeOutput(np.full((1, 1), value(request.frames), np.float32), "graph", None, 64)
            for request in self.requests
        ]


def value(frames: np.ndarray) -> int:
    return int(frames.flat[0])


def item(number: int, tokens: int = 1, deadline: float | None = None, reason: str | None = None) -> EncodeItem:
    return EncodeItem("image", np.full((1, 3, 32, 32 * tokens), number, np.uint8), deadline=deadline, reason=reason)


BYTES = item(0).frames.nbytes


@pytest.fixture
def runner() -> HeldRunner:
    return HeldRunner()


Make = Callable[..., Batcher]


@pytest.fixture
def make(runner: HeldRunner) -> Iterator[Make]:
    made: list[Batcher] = []

    def batcher(max_queued_items: int = 100, max_queued_bytes: int = 1 << 30) -> Batcher:
        made.append(
            Batcher(
                "image",
                runner,
                PackLimits(max_tokens=4, max_items=3, max_seqs=100),
                ReplicaMetrics("image", (64,), lambda: {"budget_tokens": 0, "used_tokens": 0}),
                max_queued_items=max_queued_items,
                max_queued_bytes=max_queued_bytes,
            )
        )
        return made[-1]

    yield batcher
    runner.gate.release(1000)
    for one in made:
        one.close()


def put(batcher: Batcher, number: int, tokens: int = 1, deadline: float | None = None) -> Future[EncodeResult]:
    return batcher.put([item(number, tokens, deadline)])[0]


def drop(batcher: Batcher, *futures: Future[EncodeResult]) -> None:
    tickets = [*batcher._queue, *batcher._started]
    batcher.drop({ticket.item.id for ticket in tickets if ticket.future in futures})


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def occupy(batcher: Batcher, runner: HeldRunner) -> Future[EncodeResult]:
    """Fills the device, so that what follows waits."""
    future = put(batcher, 200)
    wait_for(lambda: len(runner.batches) == 1)
    return future


def test_batches_form_while_the_device_is_busy(make: Make, runner: HeldRunner) -> None:
    batcher = make()
    futures = [occupy(batcher, runner)]
    futures += [put(batcher, i, tokens) for i, tokens in enumerate([1, 1, 3, 1, 1, 1, 9, 1])]
    runner.gate.release(100)
    results = [future.result(10) for future in futures]
    assert runner.batches == [[200], [0, 1], [2, 3], [4, 5], [6], [7]]
    for number, result in zip([200, *range(8)], results, strict=True):
        assert result.embeddings is not None
        assert value(result.embeddings) == number
        assert (result.pool, result.execution, result.budget, result.error) == ("image", "graph", 64, None)
        assert result.queue_s >= 0
        assert result.encode_s > 0
    assert len(runner.threads) == 1
    assert runner.threads != {threading.get_ident()}


def test_how_long_the_oldest_batch_has_been_running(make: Make, runner: HeldRunner) -> None:
    runner.max_in_flight = 2
    batcher = make()
    assert batcher.running_s() == 0
    began = time.perf_counter()
    first = occupy(batcher, runner)
    time.sleep(0.05)
    second = put(batcher, 1)
    wait_for(lambda: len(runner.batches) == 2)
    assert 0.05 <= batcher.running_s() <= time.perf_counter() - began
    between = time.perf_counter()
    runner.gate.release()
    first.result(10)
    wait_for(lambda: batcher.running_s() <= time.perf_counter() - began - 0.05)
    now = time.perf_counter()
    assert batcher.running_s() >= now - between
    runner.gate.release()
    second.result(10)
    wait_for(lambda: batcher.running_s() == 0)


def test_a_collector_that_fails_is_a_fault_and_leaves_nobody_waiting(
    make: Make, runner: HeldRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = make()

    def broken(*_: Any) -> None:
        raise OSError("no such metric")

    monkeypatch.setattr(batcher._metrics, "batch", broken)
    first = occupy(batcher, runner)
    waits = put(batcher, 1)
    runner.gate.release()
    assert first.result(10).error is None
    assert waits.result(10).error == "fault"
    assert batcher.fault == "OSError: no such metric"
    assert put(batcher, 2).result(10).error == "fault"


def test_two_batches_may_be_in_flight(make: Make, runner: HeldRunner) -> None:
    runner.max_in_flight = 2
    batcher = make()
    occupy(batcher, runner)
    put(batcher, 1)
    wait_for(lambda: len(runner.batches) == 2)
    put(batcher, 2)
    assert batcher.state().items == 1


def test_cancelled_items_never_reach_the_device(make: Make, runner: HeldRunner) -> None:
    batcher = make()
    occupy(batcher, runner)
    futures = [put(batcher, i) for i in range(4)]
    drop(batcher, futures[0], futures[2])
    assert [futures[i].result(0).error for i in (0, 2)] == ["cancelled", "cancelled"]
    runner.gate.release(100)
    assert value(futures[3].result(10).embeddings) == 3
    assert runner.batches == [[200], [1, 3]]
    assert (batcher.state().cancelled, batcher.state().items) == (2, 0)


def test_expired_items_are_answered_and_never_run(make: Make, runner: HeldRunner) -> None:
    batcher = make()
    occupy(batcher, runner)
    late, fine = put(batcher, 1, deadline=time.time() - 1), put(batcher, 2, deadline=time.time() + 60)
    runner.gate.release(100)
    assert late.result(10).error == "deadline"
    assert fine.result(10).error is None
    assert runner.batches == [[200], [2]]
    assert batcher.state().expired == 1


def test_the_queue_is_bounded_in_items(make: Make, runner: HeldRunner) -> None:
    batcher = make(max_queued_items=2)
    occupy(batcher, runner)
    kept = [put(batcher, i) for i in range(2)]
    refused = put(batcher, 2).result(0)
    assert (refused.error, refused.embeddings) == ("overloaded", None)
    drop(batcher, kept[0])
    again = put(batcher, 3)
    runner.gate.release(100)
    assert value(again.result(10).embeddings) == 3
    assert batcher.state().rejected == 1


def test_the_queue_is_bounded_in_bytes(make: Make, runner: HeldRunner) -> None:
    batcher = make(max_queued_bytes=2 * BYTES)
    occupy(batcher, runner)
    kept = [put(batcher, i) for i in range(2)]
    state = batcher.state()
    assert (state.items, state.tokens, state.bytes) == (2, 2, 2 * BYTES)
    assert put(batcher, 2).result(0).error == "overloaded"
    runner.gate.release(100)
    assert [value(future.result(10).embeddings) for future in kept] == [0, 1]


def test_one_bad_item_fails_alone(make: Make, runner: HeldRunner) -> None:
    batcher = make()
    occupy(batcher, runner)
    futures = [put(batcher, i) for i in (1, 255, 3)]
    runner.gate.release(100)
    results = [future.result(10) for future in futures]
    assert [result.error for result in results] == [None, "internal", None]
    assert runner.batches == [[200], [1, 255, 3]]
    assert batcher.fault is None


@pytest.mark.parametrize("stage", ["submit", "result"])
def test_a_failed_batch_latches_a_fault(
    make: Make, runner: HeldRunner, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = make()
    running = occupy(batcher, runner)
    waiting = put(batcher, 1)
    if stage == "result":
        runner.failure = RuntimeError("CUDA error")
        runner.gate.release(100)
        assert running.result(10).error == "fault"
    else:

        def broken(*_: Any, **__: Any) -> HeldBatch:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(runner, "submit", broken)
        runner.gate.release(100)
        assert running.result(10).error is None
    assert waiting.result(10).error == "fault"
    assert batcher.fault == "RuntimeError: CUDA error"
    assert put(batcher, 2).result(0).error == "fault"


def test_metrics_tell_what_was_encoded_what_was_dropped_and_what_waits(
    make: Make, runner: HeldRunner, recorded: Recorded
) -> None:
    batcher = make(max_queued_items=4)
    first = occupy(batcher, runner)
    gone, late = put(batcher, 1, tokens=2), put(batcher, 2, deadline=time.time() + 3600)
    bad, good = put(batcher, 255), put(batcher, 3)
    assert put(batcher, 4).result(0).error == "overloaded"
    drop(batcher, gone)
    batcher._queue[0].item = item(2, deadline=time.time() - 1)
    runner.gate.release(2)
    results = [future.result(10) for future in (first, late, bad, good)]
    assert [result.error for result in results] == [None, "deadline", "internal", None]
    wait_for(lambda: len(recorded["foveal_encode_seconds"]["image",]) == 2)
    assert recorded["foveal_items_dropped"] == {
        ("image", cause): [1] for cause in ("overloaded", "cancelled", "deadline", "internal")
    }
    assert recorded["foveal_items"] == {("image", "graph", "none"): [1, 1]}
    assert recorded["foveal_graph_hits"] == {("image", "64"): [1, 1]}
    assert recorded["foveal_queue_seconds"] == {("image",): [results[0].queue_s, results[3].queue_s]}
    assert recorded["foveal_encode_seconds"] == {("image",): [results[0].encode_s, results[3].encode_s]}
    assert recorded["foveal_queue_items"]["image",] == [1, 0, 1, 2, 3, 4, 3, 2, 0]
    assert recorded["foveal_queue_tokens"]["image",] == [1, 0, 2, 3, 4, 5, 3, 2, 0]
    runner.failure = RuntimeError("CUDA error")
    runner.gate.release(1)
    assert put(batcher, 5).result(10).error == "fault"
    assert recorded["foveal_items_dropped"]["image", "fault"] == [1]


def test_the_routers_reason_is_told(make: Make, runner: HeldRunner) -> None:
    runner.gate.release(100)
    future = make().put([replace(item(1), reason="t_over_capture", waited_s=7.0)])[0]
    assert future.result(10).reason == "t_over_capture"
    assert 7.0 <= future.result(0).queue_s < 17.0


def test_what_is_put_together_shares_a_batch(make: Make, runner: HeldRunner) -> None:
    batcher = make()
    futures = batcher.put([item(i) for i in range(5)])
    runner.gate.release(100)
    assert [value(future.result(10).embeddings) for future in futures] == [0, 1, 2, 3, 4]
    assert runner.batches == [[0, 1, 2], [3, 4]]
    wait_for(lambda: batcher.batches == 2)
    assert batcher.busy_s == 0.5


@pytest.mark.parametrize("unwanted", [(0, 1), (0,)], ids=["all", "one"])
def test_a_running_batch_stops_once_nobody_wants_any_of_it(
    make: Make, runner: HeldRunner, unwanted: tuple[int, ...]
) -> None:
    batcher, stopped = make(), threading.Event()

    def submit(modality: str, requests: Sequence[EncodeRequest], stop: Callable[[], bool], *, eager: bool) -> HeldBatch:
        limit = time.monotonic() + (10 if len(unwanted) == 2 else 0.2)
        while time.monotonic() < limit:
            if stop():
                stopped.set()
                raise Stopped
            time.sleep(0.001)
        return HeldBatch(runner, requests)

    runner.submit = submit  # type: ignore[method-assign]
    runner.gate.release(100)
    futures = batcher.put([item(1), item(2)])
    wait_for(lambda: len(batcher._started) == 2)
    drop(batcher, *(futures[i] for i in unwanted))
    errors = [future.result(10).error for future in futures]
    assert errors == (["cancelled", "cancelled"] if len(unwanted) == 2 else [None, None])
    assert stopped.is_set() == (len(unwanted) == 2)
    assert batcher.state().cancelled == (2 if len(unwanted) == 2 else 0)
    assert batcher.fault is None


def nan_runner(runner: HeldRunner, nan_eagerly: bool) -> list[tuple[list[int], bool]]:
    """Gives NaN for the item 7: from graphs, and eagerly too if asked to. What ran, and whether eagerly."""
    ran: list[tuple[list[int], bool]] = []

    class Batch(HeldBatch):
        def result(self) -> list[EncodeOutput | Exception]:
            eager = self.eager  # type: ignore[attr-defined]
            return [
                replace(output, has_nan=value(output.embeddings) == 7 and (nan_eagerly or not eager))
                for output in super().result()
                if isinstance(output, EncodeOutput)
            ]

    def submit(modality: str, requests: Sequence[EncodeRequest], stop: Any, *, eager: bool) -> HeldBatch:
        ran.append(([value(request.frames) for request in requests], eager))
        batch = Batch(runner, requests)
        batch.eager = eager  # type: ignore[attr-defined]
        return batch

    runner.submit = submit  # type: ignore[method-assign]
    return ran


def test_an_item_of_nan_fails_alone_after_a_second_run(make: Make, runner: HeldRunner) -> None:
    ran, batcher = nan_runner(runner, nan_eagerly=True), make()
    runner.gate.release(100)
    results = [future.result(10) for future in batcher.put([item(1), item(7), item(2), item(3)])]
    assert [result.error for result in results] == [None, "internal", None, None]
    assert ran[0] == ([1, 7, 2], False)
    assert ([7], True) in ran[1:]
    assert batcher.fault is None


def test_a_nan_that_a_second_run_does_not_have_latches_a_fault(make: Make, runner: HeldRunner) -> None:
    ran, batcher = nan_runner(runner, nan_eagerly=False), make()
    runner.gate.release(100)
    results = [future.result(10) for future in batcher.put([item(1), item(7), item(2)])]
    assert [result.error for result in results] == [None, None, None]
    assert [value(result.embeddings) for result in results] == [1, 7, 2]
    assert ran == [([1, 7, 2], False), ([7], True)]
    wait_for(lambda: batcher.fault is not None)
    assert "NaN" in str(batcher.fault)
    assert put(batcher, 3).result(0).error == "fault"


def test_close_refuses_what_waits_and_finishes_what_runs(make: Make, runner: HeldRunner) -> None:
    batcher = make()
    running, waiting = occupy(batcher, runner), put(batcher, 1)
    runner.gate.release(100)
    closer = threading.Thread(target=batcher.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    assert running.result(0).error is None
    assert waiting.result(0).error in (None, "fault")
    assert put(batcher, 2).result(0).error == "fault"
