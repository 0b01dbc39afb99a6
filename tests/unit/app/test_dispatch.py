"""How items are grouped into calls, and what becomes of them, with replicas that the test holds and lets go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from app.dispatch import FULL_CALLS, PARTIAL_CALLS, Dispatcher, calls_allowed
from app.errors import FovealError
from deployments.protocol import EncodeCall, EncodeItem, EncodeReply, EncodeResult, ReplicaState
from encoder.budgets import PackLimits

LIMITS = PackLimits(max_tokens=8, max_items=4, max_seqs=4)
STATE = ReplicaState("cpu-static", "sdpa", "torch", "cpu", "float32", 1, 1, (8,), None, LIMITS)
GOOD = EncodeResult(np.zeros((1, 1), np.float32), "float32", "image", "graph")


def item(number: int, tokens: int = 1) -> EncodeItem:
    return EncodeItem("image", np.full((1, 3, 32, 32 * tokens), number, np.uint8))


def number(one: EncodeItem) -> int:
    return int(one.frames.flat[0])


@dataclass(eq=False)
class Call:
    """One handle call, which the test answers."""

    sent: EncodeCall
    future: asyncio.Future[Any]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Generator[Any, None, Any]:
        return self.future.__await__()

    def answer(self, replica: str = "r", **changes: Any) -> None:
        """Each item's own number as its embeddings."""
        results = [
            replace(GOOD, embeddings=np.full((1, 1), number(one), np.float32), **changes) for one in self.sent.items
        ]
        self.future.set_result(EncodeReply(replica, results))

    def numbers(self) -> list[int]:
        return [number(one) for one in self.sent.items]


@dataclass
class Handle:
    calls: list[Call] = field(default_factory=list)
    dropped: list[frozenset[str]] = field(default_factory=list)
    broadcast_gate: asyncio.Event = field(default_factory=asyncio.Event)

    def options(self, method_name: str) -> Handle:
        assert method_name == "encode"
        return self

    def remote(self, sent: EncodeCall) -> Call:
        self.calls.append(Call(sent, asyncio.get_running_loop().create_future()))
        return self.calls[-1]

    def broadcast(self, method_name: str, ids: frozenset[str]) -> Handle:
        assert method_name == "drop"
        self.dropped.append(ids)
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[None]:
        await asyncio.wait_for(self.broadcast_gate.wait(), timeout_s)
        return [None]


class Bench:
    """A dispatcher with its handle, inside a running loop."""

    def __init__(self, limits: PackLimits = LIMITS) -> None:
        self.handle = Handle()
        self.dispatcher = Dispatcher("image", cast(DeploymentHandle, self.handle), replace(STATE, limits=limits))
        self.tasks: list[asyncio.Task[EncodeResult]] = []

    def put(self, *items: EncodeItem) -> None:
        self.tasks += [asyncio.create_task(self.dispatcher.encode(one)) for one in items]

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def calls(self) -> list[list[int]]:
        return [call.numbers() for call in self.handle.calls]

    async def values(self) -> list[int]:
        results = await asyncio.gather(*self.tasks)
        return [int(result.embeddings[0, 0]) for result in results if result.embeddings is not None]

    async def code(self, index: int = 0) -> FovealError:
        with pytest.raises(FovealError) as caught:
            await self.tasks[index]
        return caught.value


def bench_test(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def inside() -> None:
            await test(Bench())

        asyncio.run(asyncio.wait_for(inside(), 10))

    run.__name__ = test.__name__
    return run


@bench_test
async def test_an_idle_pool_gets_an_item_at_once(bench: Bench) -> None:
    bench.put(item(1))
    await bench.settle()
    assert bench.calls() == [[1]]
    bench.handle.calls[0].answer()
    assert await bench.values() == [1]


@bench_test
async def test_what_is_ready_together_shares_calls_of_one_batch_each(bench: Bench) -> None:
    bench.put(*[item(i) for i in range(10)])
    await bench.settle()
    # Two full calls; the partial one finds two under way.
    assert bench.calls() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    bench.handle.calls[1].answer()
    await bench.settle()
    assert bench.calls()[2:] == [[8, 9]]
    for call in (bench.handle.calls[0], bench.handle.calls[2]):
        call.answer()
    assert await bench.values() == list(range(10))


@bench_test
async def test_what_arrives_meanwhile_leaves_together(bench: Bench) -> None:
    for i in range(6):
        bench.put(item(i))
        await bench.settle()
    # Two calls of one; the four that came later fill a third.
    assert bench.calls() == [[0], [1], [2, 3, 4, 5]]
    bench.put(item(6), item(7))
    await bench.settle()
    bench.handle.calls[0].answer()
    await bench.settle()
    assert len(bench.calls()) == 3  # still two under way
    bench.handle.calls[1].answer()
    await bench.settle()
    assert bench.calls()[3:] == [[6, 7]]


@bench_test
async def test_tokens_bound_a_call_too_and_keep_the_order(bench: Bench) -> None:
    bench.put(item(0, 5), item(1, 4), item(2, 9), item(3, 1))
    await bench.settle()
    assert bench.calls() == [[0], [1], [2]]  # 5 + 4 tokens are over 8; 9 alone are over, and go alone
    assert bench.handle.calls[0].sent.tokens_behind == 14
    bench.handle.calls[0].answer()
    bench.handle.calls[1].answer()
    await bench.settle()
    assert bench.calls()[3:] == [[3]]
    assert bench.handle.calls[3].sent.tokens_behind == 0


def test_more_calls_for_more_replicas() -> None:
    assert (calls_allowed(False, 0), calls_allowed(True, 0)) == (PARTIAL_CALLS, FULL_CALLS)
    assert (calls_allowed(False, 3), calls_allowed(True, 3)) == (3 * PARTIAL_CALLS, 3 * FULL_CALLS)
    assert PARTIAL_CALLS < FULL_CALLS


@bench_test
async def test_replicas_are_learned_from_their_answers(bench: Bench) -> None:
    bench.put(item(0), item(1, 8))
    await bench.settle()
    for name, call in zip("ab", bench.handle.calls, strict=True):
        call.answer(name)
    await bench.settle()
    for i in range(6):
        bench.put(item(i))
        await bench.settle()
    assert bench.calls()[2:] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("fault", ["dead", "fault", "cancelled"])
def test_a_dead_or_broken_replica_costs_one_more_call_at_the_front(fault: str) -> None:
    async def run() -> None:
        bench = Bench()
        for i in range(3):
            bench.put(item(i))
            await bench.settle()
        assert bench.calls() == [[0], [1]]
        if fault == "dead":
            bench.handle.calls[0].future.set_exception(RayActorError())
        else:
            bench.handle.calls[0].answer(error=fault, message="CUDA error")
        await bench.settle()
        assert bench.calls()[2:] == [[0, 2]]
        ids = [one.id for call in bench.handle.calls for one in call.sent.items]
        assert len(set(ids)) == len(ids)
        for call in bench.handle.calls[1:]:
            call.answer()
        assert await bench.values() == [0, 1, 2]

    asyncio.run(asyncio.wait_for(run(), 10))


@bench_test
async def test_the_second_death_is_told_to_those_who_had_both(bench: Bench) -> None:
    bench.put(item(0))
    await bench.settle()
    bench.handle.calls[0].future.set_exception(RayActorError())
    bench.put(item(1))
    await bench.settle()
    assert bench.calls() == [[0], [0, 1]]
    bench.handle.calls[1].future.set_exception(RayActorError())
    await bench.settle()
    assert (await bench.code(0)).code == "unavailable"
    assert bench.calls()[2:] == [[1]]
    bench.handle.calls[2].answer()
    assert (await bench.tasks[1]).execution == "graph"


@pytest.mark.parametrize(
    ("error", "code", "retry_after"),
    [
        (BackPressureError(num_queued_requests=9, max_queued_requests=8), "overloaded", True),
        (DeploymentUnavailableError(DeploymentID("ImageGraph")), "unavailable", True),
        (ValueError("secret"), "internal", False),
    ],
)
def test_a_call_that_fails(error: Exception, code: str, retry_after: bool) -> None:
    async def run() -> None:
        bench = Bench()
        bench.put(item(0), item(1))
        await bench.settle()
        bench.handle.calls[0].future.set_exception(error)
        for i in range(2):
            told = await bench.code(i)
            assert (told.code, told.retry_after_s is not None) == (code, retry_after)
            assert "secret" not in told.message

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize(("error", "retry_after"), [("overloaded", True), ("deadline", False), ("internal", False)])
def test_an_item_that_is_refused_fails_alone(error: Any, retry_after: bool) -> None:
    async def run() -> None:
        bench = Bench()
        bench.put(item(0), item(1))
        await bench.settle()
        bad = EncodeResult(None, "float32", "image", error=error, message="secret" if error == "internal" else "why")
        bench.handle.calls[0].future.set_result(EncodeReply("r", [bad, GOOD]))
        told = await bench.code(0)
        assert (told.code, told.retry_after_s is not None) == (error, retry_after)
        assert "secret" not in told.message
        assert await bench.tasks[1] is GOOD

    asyncio.run(asyncio.wait_for(run(), 10))


@bench_test
async def test_cancelling_removes_what_waits_here(bench: Bench) -> None:
    for i in range(4):
        bench.put(item(i))
        await bench.settle()
    bench.tasks[2].cancel()
    await bench.settle()
    bench.handle.calls[0].answer()
    await bench.settle()
    assert bench.calls() == [[0], [1], [3]]
    assert not bench.handle.dropped


@bench_test
async def test_a_call_is_cancelled_once_nobody_wants_any_of_it(bench: Bench) -> None:
    bench.handle.broadcast_gate.set()
    bench.put(item(0), item(1))
    await bench.settle()
    call = bench.handle.calls[0]
    bench.tasks[0].cancel()
    await bench.settle()
    assert not call.cancelled
    assert bench.handle.dropped == [{call.sent.items[0].id}]
    bench.tasks[1].cancel()
    await bench.settle()
    assert call.cancelled
    assert len(bench.handle.dropped) == 1


REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


@bench_test
async def test_calls_and_notes_belong_to_no_request(bench: Bench) -> None:
    seen: list[str] = []
    remote, broadcast = bench.handle.remote, bench.handle.broadcast
    bench.handle.remote = lambda sent: (seen.append(REQUEST.get()), remote(sent))[1]  # type: ignore[method-assign]
    bench.handle.broadcast = lambda *args: (seen.append(REQUEST.get()), broadcast(*args))[1]  # type: ignore[method-assign]
    bench.handle.broadcast_gate.set()
    REQUEST.set("one")
    bench.put(item(0), item(1))
    await bench.settle()
    bench.put(item(2))
    await bench.settle()
    bench.tasks[0].cancel()
    await bench.settle()
    bench.handle.calls[1].future.set_exception(RayActorError())
    await bench.settle()
    assert len(bench.handle.calls) == 3
    assert seen == ["none"] * 4


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RequestCancelledError("id")])
def test_a_call_that_somebody_else_cancels_is_made_again(error: BaseException) -> None:
    async def run() -> None:
        bench = Bench()
        bench.put(item(0), item(1))
        await bench.settle()
        bench.handle.calls[0].future.set_exception(error)
        await bench.settle()
        assert bench.calls() == [[0, 1], [0, 1]]
        bench.handle.calls[1].answer()
        assert await bench.values() == [0, 1]

    asyncio.run(asyncio.wait_for(run(), 10))


@bench_test
async def test_what_is_unwanted_while_replicas_are_told_is_told_next(bench: Bench) -> None:
    bench.put(*[item(i) for i in range(4)])
    await bench.settle()
    ids = [one.id for one in bench.handle.calls[0].sent.items]
    for task in bench.tasks[:3]:
        task.cancel()
        await bench.settle()
    assert bench.handle.dropped == [{ids[0]}]
    bench.handle.broadcast_gate.set()
    await bench.settle()
    assert bench.handle.dropped == [{ids[0]}, {ids[1], ids[2]}]
    bench.handle.calls[0].answer()
    assert (await bench.tasks[3]).execution == "graph"


@bench_test
async def test_waiting_here_is_told_to_the_replica(bench: Bench) -> None:
    for i in range(3):
        bench.put(item(i))
        await bench.settle()
    await asyncio.sleep(0.05)
    bench.handle.calls[0].answer()
    await bench.settle()
    assert bench.handle.calls[0].sent.items[0].waited_s < 0.05 <= bench.handle.calls[2].sent.items[0].waited_s
