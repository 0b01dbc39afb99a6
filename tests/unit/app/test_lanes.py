"""Calls past Serve's handle: both ends of real lanes, with a batcher that the test plays."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from app import arena as arena_module
from app import lanes
from app.arena import Arena
from app.dispatch import Dispatcher
from app.errors import FovealError
from app.lanes import Hub
from deployments import lane as server_side
from deployments.lane import LaneOffer, LaneServer
from deployments.protocol import EncodeCall, EncodeItem, EncodeReply, EncodeResult, ReplicaState
from encoder.budgets import PackLimits

WIDTH = 8
STATE = ReplicaState("cpu-static", "sdpa", "torch", "cpu", "bfloat16", WIDTH, 2, (8,), None, PackLimits(64, 4, 4))


def item(number: int, tokens: int = 1, **options: Any) -> EncodeItem:
    return EncodeItem("image", np.full((1, 3, 32, 32 * tokens), number, np.uint8), **options)


def encoded(one: EncodeItem, width: int = WIDTH) -> EncodeResult:
    """Every value is the item's number."""
    rows = 1 if one.pooling == "mean" else one.size.tokens
    columns = 2 if one.main_only else width
    values = np.full((rows, columns), one.frames.flat[-1], np.uint16)
    return EncodeResult(values, "bfloat16", "image", "graph", budget=8)


@dataclass(eq=False)
class Response:
    """Of one handle call."""

    task: asyncio.Future[Any]

    def cancel(self) -> None:
        self.task.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self.task.__await__()


@dataclass
class Replica:
    """Its items wait until the test answers them; `handle` is Serve's way to it."""

    node: str = "here"
    waiting: list[tuple[EncodeItem, Future[EncodeResult]]] = field(default_factory=list)
    calls: list[list[int]] = field(default_factory=list)
    by_handle: list[list[int]] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    found: list[int] = field(default_factory=list)  # of what is dropped, what waited here
    opened: list[Response] = field(default_factory=list)
    at_once: bool = True
    width: int = WIDTH
    breaks: bool = False
    dead: bool = False

    def __post_init__(self) -> None:
        self.server = LaneServer(self.node, "r", self.put, self.drop)
        self.arrived = threading.Event()

    def put(self, call: EncodeCall) -> Sequence[Future[EncodeResult]]:
        futures: list[Future[EncodeResult]] = [Future() for _ in call.items]
        self.calls.append([int(one.frames.flat[0]) for one in call.items])
        self.waiting += zip(call.items, futures, strict=True)
        if self.breaks:
            raise RuntimeError("the replica breaks")
        if self.at_once:
            self.answer()
        self.arrived.set()
        return futures

    def drop(self, ids: Collection[str]) -> None:
        self.dropped |= set(ids)
        self.found += [int(one.frames.flat[0]) for one, _ in self.waiting if one.id in ids]

    def answer(self) -> None:
        for one, future in self.waiting:
            future.set_result(encoded(one, self.width))
        self.waiting = []

    def options(self, method_name: str) -> Replica:
        assert method_name in ("lane", "encode")
        return self

    def remote(self, sent: Any) -> Response:
        if isinstance(sent, LaneOffer):
            self.opened.append(Response(asyncio.ensure_future(self.server.serve(sent))))
            return self.opened[-1]
        self.by_handle.append([int(one.frames.flat[0]) for one in sent.items])
        future = asyncio.get_running_loop().create_future()
        if self.dead:
            future.set_exception(RayActorError())
        else:
            future.set_result(EncodeReply("r", [encoded(one) for one in sent.items]))
        return Response(future)


class Bench:
    def __init__(self, arena: Arena | None = None, **replica: Any) -> None:
        self.arena = arena or Arena(1 << 22)
        self.hub = Hub("here", self.arena)
        self.replica = Replica(**replica)
        self.dispatcher = Dispatcher("image", cast(DeploymentHandle, self.replica), STATE, self.hub)

    def put(self, *items: EncodeItem) -> list[asyncio.Task[EncodeResult]]:
        return [asyncio.create_task(self.dispatcher.encode(one)) for one in items]

    async def values(self, *items: EncodeItem) -> list[Any]:
        return [cast(np.ndarray, r.embeddings).tolist() for r in await asyncio.gather(*self.put(*items))]

    async def until(self, true: Callable[[], object]) -> None:
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        for response in self.replica.opened:
            response.cancel()
        await asyncio.sleep(0)
        self.hub.close()
        await asyncio.gather(*self.replica.opened, return_exceptions=True)
        self.replica.server.close()


def bench_test(**options: Any) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], Callable[[], None]]:
    def decorate(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def run() -> None:
            async def inside() -> None:
                bench = Bench(**options)
                try:
                    await asyncio.wait_for(test(bench), 20)
                finally:
                    await bench.close()

            asyncio.run(inside())

        run.__name__ = test.__name__
        return run

    return decorate


@bench_test()
async def test_values_come_back_in_shared_memory(bench: Bench) -> None:
    tasks = bench.put(item(1, 3), item(2, main_only=True), item(3, 2, pooling="mean"))
    results = await asyncio.gather(*tasks)
    arrays = [cast(np.ndarray, result.embeddings) for result in results]
    assert [array.tolist() for array in arrays] == [[[1] * 8] * 3, [[2] * 2], [[3] * 8]]
    assert [array.dtype for array in arrays] == [np.uint16] * 3
    assert all(bench.arena.start_of(array) is not None for array in arrays)
    assert (results[0].budget, results[0].execution) == (8, "graph")
    assert bench.replica.calls == [[1, 2, 3]]
    assert bench.replica.by_handle == []
    del tasks, results, arrays
    await asyncio.sleep(0)
    assert bench.arena.in_use == 0


@bench_test()
async def test_one_lane_serves_one_call_after_another(bench: Bench) -> None:
    for number in range(20):
        assert await bench.values(item(number)) == [[[number] * 8]]
    assert len(bench.replica.opened) == 1
    assert not bench.replica.opened[0].task.done()


@bench_test(at_once=False)
async def test_more_lanes_while_more_calls_are_allowed(bench: Bench) -> None:
    tasks = []
    for number in range(4):
        tasks += bench.put(item(number))
        await asyncio.sleep(0.05)
    assert bench.replica.calls == [[0], [1]]
    assert len(bench.replica.opened) == 2
    bench.replica.at_once = True
    bench.replica.answer()
    results = await asyncio.gather(*tasks)
    assert [int(cast(np.ndarray, r.embeddings)[0, 0]) for r in results] == [0, 1, 2, 3]
    assert bench.replica.calls[2:] == [[2, 3]]


@bench_test(at_once=False)
async def test_memory_of_who_left_is_held_until_the_replica_is_done(bench: Bench) -> None:
    gone, stays = bench.put(item(1), item(2))
    await bench.until(bench.replica.arrived.is_set)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    ids = {one.id for one, _ in bench.replica.waiting}
    await bench.until(lambda: bench.replica.dropped)
    assert len(bench.replica.dropped & ids) == 1
    stays.cancel()
    await asyncio.gather(stays, return_exceptions=True)
    await bench.until(lambda: bench.replica.dropped == ids)
    del gone, stays
    assert bench.arena.in_use == 4 * 4096  # pixels and room of both
    bench.replica.answer()
    await bench.until(lambda: bench.arena.in_use == 0)
    bench.replica.at_once = True
    assert await bench.values(item(3)) == [[[3] * 8]]
    assert len(bench.replica.opened) == 1


@bench_test(at_once=False)
async def test_a_cancelled_lane_still_answers_what_it_has(bench: Bench) -> None:
    (task,) = bench.put(item(5))
    await bench.until(bench.replica.arrived.is_set)
    bench.replica.opened[0].cancel()
    await bench.until(lambda: bench.replica.dropped)
    assert not task.done()
    bench.replica.answer()
    assert cast(np.ndarray, (await task).embeddings).tolist() == [[5] * 8]
    await asyncio.sleep(0.1)
    bench.replica.at_once = True
    assert await bench.values(item(6)) == [[[6] * 8]]
    assert bench.replica.by_handle == []
    assert len(bench.replica.opened) == 2


@bench_test(breaks=True)
async def test_what_a_lost_lane_carried_goes_by_serve(bench: Bench) -> None:
    assert await bench.values(item(5), item(6)) == [[[5] * 8], [[6] * 8]]
    assert (bench.replica.calls, bench.replica.by_handle) == ([[5, 6]], [[5, 6]])
    gc.collect()  # an error refers to where it came from, in a circle
    assert bench.arena.in_use == 0


@bench_test(breaks=True, dead=True)
async def test_two_that_die_are_told(bench: Bench) -> None:
    (task,) = bench.put(item(5))
    with pytest.raises(FovealError) as caught:
        await task
    assert caught.value.code == "unavailable"


@bench_test(at_once=False)
async def test_a_drop_right_behind_its_call_finds_the_item(bench: Bench) -> None:
    (first,) = bench.put(item(1))
    await bench.until(lambda: bench.replica.waiting)
    bench.replica.answer()
    await first
    # Both messages are there when the replica next looks.
    bench.replica.server._loop.call_soon_threadsafe(time.sleep, 0.2)
    (task,) = bench.put(item(2))
    await asyncio.sleep(0.05)
    task.cancel()
    await bench.until(lambda: bench.replica.dropped)
    assert bench.replica.found == [2]
    bench.replica.answer()


def test_a_reply_that_cannot_be_read_ends_its_lane(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise EOFError("cut short")

    @bench_test()
    async def run(bench: Bench) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "_unpack", broken)
            assert await bench.values(item(7)) == [[[7] * 8]]
        assert (bench.replica.calls, bench.replica.by_handle) == ([[7]], [[7]])
        assert await bench.values(item(8)) == [[[8] * 8]]
        assert bench.replica.calls == [[7], [8]]  # by a lane again
        assert "a lane brought no reply that can be read" in caplog.text

    run()


def test_a_reply_that_cannot_be_sent_ends_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    @bench_test()
    async def run(bench: Bench) -> None:
        with monkeypatch.context() as patch:
            # Larger than the socket takes.
            patch.setattr(server_side, "LaneReply", lambda *_: b"x" * (1 << 22))
            assert await bench.values(item(7)) == [[[7] * 8]]
        assert (bench.replica.calls, bench.replica.by_handle) == ([[7]], [[7]])

    run()


@bench_test(node="elsewhere")
async def test_a_replica_of_another_node_is_called_through_serve(bench: Bench) -> None:
    for number in range(3):
        assert await bench.values(item(number)) == [[[number] * 8]]
    assert bench.replica.by_handle == [[0], [1], [2]]
    assert bench.replica.calls == []
    assert len(bench.replica.opened) == 1  # not asked again at once


@bench_test(width=WIDTH - 1)
async def test_embeddings_that_do_not_fit_their_room_are_not_written(bench: Bench) -> None:
    assert await bench.values(item(4)) == [[[4] * 8]]
    assert (bench.replica.calls, bench.replica.by_handle) == ([[4]], [[4]])


def test_a_full_arena_is_no_obstacle() -> None:
    @bench_test(arena=Arena(4096))
    async def run(bench: Bench) -> None:
        assert await bench.values(item(1)) == [[[1] * 8]]
        assert (bench.replica.calls, bench.replica.by_handle) == ([], [[1]])

    run()


def test_large_embeddings_are_copied_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "COPY_ASIDE_BYTES", 0)
    monkeypatch.setattr(lanes, "COPY_ASIDE_BYTES", 0)

    @bench_test()
    async def run(bench: Bench) -> None:
        assert await bench.values(item(1), item(2)) == [[[1] * 8], [[2] * 8]]

    run()


def test_an_old_lane_is_renewed_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "RENEW_S", 0.05)

    @bench_test()
    async def run(bench: Bench) -> None:
        await bench.values(item(1))
        await asyncio.sleep(0.1)
        await bench.values(item(2))
        first = bench.replica.opened[0].task
        assert await first is True
        assert await bench.values(item(3)) == [[[3] * 8]]
        assert len(bench.replica.opened) == 2
        assert bench.replica.by_handle == []

    run()


def test_an_idle_lane_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.05)

    @bench_test()
    async def run(bench: Bench) -> None:
        await bench.values(item(1))
        assert await bench.replica.opened[0].task is True
        assert await bench.values(item(2)) == [[[2] * 8]]
        assert len(bench.replica.opened) == 2

    run()


def test_shared_memory_that_slow_clients_held_goes_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.05)
    monkeypatch.setattr(arena_module, "KEPT_BYTES", 8192)

    @bench_test()
    async def run(bench: Bench) -> None:
        results = await asyncio.gather(*bench.put(*(item(i, 4) for i in range(4))))
        assert await bench.replica.opened[0].task is True  # no lane is left
        await asyncio.sleep(0.2)
        assert bench.arena.grown
        del results
        await bench.until(lambda: not bench.arena.grown)
        assert bench.arena.in_use == 0

    run()


def test_a_pool_without_replicas_is_called_through_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "OPEN_S", 0.05)

    @bench_test()
    async def run(bench: Bench) -> None:
        never = asyncio.Event()

        async def wait(_: LaneOffer) -> bool:
            await never.wait()
            return True

        bench.replica.server.serve = wait  # type: ignore
        assert await bench.values(item(1)) == [[[1] * 8]]
        assert bench.replica.by_handle == [[1]]
        await bench.until(lambda: bench.replica.opened[0].task.cancelled())

    run()


@bench_test()
async def test_strangers_are_given_nothing(bench: Bench) -> None:
    offer, taken = bench.hub.offer()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.setblocking(False)
        stranger.connect(f"\0{offer.address}")
        stranger.send(b"guess")
        assert await loop.sock_recv(stranger, 10) == b""
    assert not taken.done()
    taken.cancel()
    await asyncio.sleep(0)
    assert await bench.replica.server.serve(offer) is True
    assert not bench.replica.server._memories
