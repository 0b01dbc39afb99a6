"""Groups the items bound for one pool into calls: a call has a cost of its own, whatever it carries.

    encode() -> waiting, oldest first -> a call, at most one batch of the pool -> a replica -> each item's future

A call goes by a lane to a replica of this node (`deployments/lane.py`), or else through Serve. No timer: on an idle
pool an item leaves at once. What arrives while enough calls are under way to keep the replicas supplied waits here,
where it can still be joined, and leaves as one call when one of them returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, cast
from uuid import uuid4

from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from app.errors import CODES, FovealError
from app.lanes import Hub, Lane, LaneLost, Lanes
from deployments.batcher import count_that_fit
from deployments.protocol import EncodeCall, EncodeItem, EncodeReply, EncodeResult, PoolName, ReplicaState, Size

logger = logging.getLogger("foveal")

# Calls to one replica under way from here. One runs and one waits for it to end; more only help if they are full.
PARTIAL_CALLS = 2
FULL_CALLS = 4
# A replica that has not answered for so long may be gone.
REPLICA_SEEN_S = 30.0
DROP_TIMEOUT_S = 2.0
UNCALLABLE = (BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError)
TWO_DIED = "two replicas of the {} pool died"
_REFUSED = {"overloaded": 1, "deadline": None, "internal": None}  # what a replica says of an item: Retry-After


def calls_allowed(full: bool, replicas: int) -> int:
    """Calls that may be under way so that another one, full or not, may leave."""
    return (FULL_CALLS if full else PARTIAL_CALLS) * max(replicas, 1)


def uncallable(pool: PoolName, error: Exception) -> FovealError:
    """What a client is told of one of `UNCALLABLE`, with which Serve refuses a call to the pool."""
    if isinstance(error, BackPressureError):
        return FovealError("overloaded", f"the {pool} pool is full", None, 1)
    return FovealError("unavailable", f"the {pool} pool has no healthy replica", None, 5)


@dataclass(eq=False)
class _Ticket:
    item: EncodeItem
    size: Size
    future: asyncio.Future[EncodeResult]
    arrived: float = field(default_factory=time.perf_counter)
    call: _Call | None = None
    retried: bool = False


@dataclass(eq=False)
class _Call:
    """lane: that it went by; None: through Serve."""

    wanted: set[_Ticket]
    lane: Lane | None
    cancel: Callable[[], object]


class Dispatcher:
    """The way to one pool. Belongs to one event loop.

    Args:
        state: of one replica of the pool; the others are alike. What one batch takes is what one call may carry.
        hub: where replicas of this node connect, so that calls to them need not go through Serve; None: all go there.
    """

    def __init__(self, pool: PoolName, handle: DeploymentHandle, state: ReplicaState, hub: Hub | None = None) -> None:
        self._pool, self._handle, self._limits = pool, handle, state.limits
        self._lanes = None if hub is None else Lanes(handle, hub, state, self._pump_soon)
        self._id = uuid4().hex
        self._waiting: deque[_Ticket] = deque()
        self._under_way = 0
        self._seen: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump_due = False
        self._unwanted: list[str] = []

    async def encode(self, item: EncodeItem) -> EncodeResult:
        """The item's embeddings. Cancelling drops the item wherever it waits; a replica that dies or is broken costs
        it one more call.

        Raises:
            FovealError: `overloaded`, `unavailable`, `deadline` or `internal`.
        """
        if self._lanes is not None:
            item = replace(item, frames=await self._lanes.place(item.frames))
        ticket = _Ticket(item, item.size, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self._pump_soon()
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._forget(ticket)
            raise

    def _pump_soon(self) -> None:
        # At the end of this round of the loop: all that becomes ready in it can share a call. In a context of its own:
        # Serve cancels the calls that a request makes together with it, and these belong to several.
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump, context=Context())

    def _pump(self) -> None:
        self._pump_due = False
        while self._waiting:
            count = count_that_fit((ticket.size for ticket in self._waiting), self._limits)
            full = count < len(self._waiting) or count == self._limits.max_items
            if self._under_way >= calls_allowed(full, self._replicas()):
                return
            lane = None
            # What has met a dead replica goes by Serve, who may know better which ones live.
            if self._lanes is not None and not any(ticket.retried for ticket in islice(self._waiting, count)):
                lane = self._lanes.take()
                if lane is None and self._lanes.open():
                    return
            tickets = [self._waiting.popleft() for _ in range(count)]
            self._under_way += 1
            self._spawn(self._answer(tickets, *self._send(tickets, lane)))

    def _send(self, tickets: Sequence[_Ticket], lane: Lane | None) -> tuple[Awaitable[EncodeReply], Lane | None]:
        """What becomes the reply, and the lane that it comes by."""
        now = time.perf_counter()
        behind = sum(ticket.size.tokens for ticket in self._waiting) // max(self._replicas(), 1)
        items = [replace(ticket.item, waited_s=now - ticket.arrived) for ticket in tickets]
        sent = EncodeCall(self._id, items, behind)
        reply: Awaitable[EncodeReply] | None = None
        if lane is not None:
            assert self._lanes is not None
            reply = lane.call(sent)
            if reply is None:
                self._lanes.give_back(lane)
                lane = None
        if lane is None or reply is None:
            response = self._handle.options(method_name="encode").remote(sent)
            reply = cast(DeploymentResponse[EncodeReply], response)
            call = _Call(set(tickets), None, response.cancel)
        else:
            call = _Call(set(tickets), lane, partial(lane.drop, [item.id for item in items]))
        for ticket in tickets:
            ticket.call = call
        return reply, lane

    async def _answer(self, tickets: Sequence[_Ticket], coming: Awaitable[EncodeReply], lane: Lane | None) -> None:
        try:
            reply = await coming
        except (LaneLost, RayActorError, TaskCancelledError, RequestCancelledError, asyncio.CancelledError):
            # Whoever left has been taken out of the call, so nobody whom this concerns has cancelled it.
            self._retry(tickets, TWO_DIED.format(self._pool))
        except UNCALLABLE as error:
            self._fail(tickets, uncallable(self._pool, error))
        except Exception as error:
            logger.error("a call to the %s pool failed", self._pool, exc_info=error)
            self._fail(tickets, FovealError("internal", CODES["internal"][1]))
        else:
            self._seen[reply.replica] = time.monotonic()
            for ticket, result in zip(tickets, reply.results, strict=True):
                self._settle(ticket, result)
            if lane is not None and any(result.error == "fault" for result in reply.results):
                lane.close()
        finally:
            for ticket in tickets:
                if ticket.call is not None:
                    ticket.call.wanted.clear()  # or pixels and embeddings stay until a cycle of references is found
            self._under_way -= 1
            if lane is not None and self._lanes is not None:
                self._lanes.give_back(lane)
            self._pump_soon()

    def _settle(self, ticket: _Ticket, result: EncodeResult) -> None:
        if result.error in ("fault", "cancelled"):  # the latter is news only if the item is still wanted
            self._retry([ticket], "the replica is broken and is being replaced")
        elif result.error is None:
            if not ticket.future.done():
                ticket.future.set_result(result)
        elif result.error in _REFUSED:
            message = "the item could not be encoded" if result.error == "internal" else result.message
            self._fail([ticket], FovealError(result.error, message, None, _REFUSED[result.error]))

    def _retry(self, tickets: Sequence[_Ticket], message: str) -> None:
        """Back to the front, once."""
        again = [ticket for ticket in tickets if not ticket.retried and not ticket.future.done()]
        self._fail([t for t in tickets if t.retried], FovealError("unavailable", message, None, 5))
        for ticket in reversed(again):
            # A new id: what is said of the first call must not reach the second.
            ticket.item = replace(ticket.item, id=uuid4().hex)
            ticket.retried, ticket.call = True, None
            self._waiting.appendleft(ticket)

    def _fail(self, tickets: Sequence[_Ticket], error: FovealError) -> None:
        for ticket in tickets:
            if not ticket.future.done():
                ticket.future.set_exception(error)

    def _forget(self, ticket: _Ticket) -> None:
        if not ticket.future.cancelled():
            return  # its answer came at the same moment
        if ticket.call is None:
            self._waiting.remove(ticket)
            return
        ticket.call.wanted.discard(ticket)
        if not ticket.call.wanted:
            ticket.call.cancel()
            return
        if ticket.call.lane is not None:
            ticket.call.lane.drop([ticket.item.id])
            return
        self._unwanted.append(ticket.item.id)
        if len(self._unwanted) == 1:
            self._spawn(self._drop())

    async def _drop(self) -> None:
        """Tells the replicas what nobody waits for, while its neighbours in a call are still wanted."""
        while self._unwanted:
            # What is added meanwhile goes with the next round.
            ids = frozenset(self._unwanted)
            try:
                response = self._handle.broadcast("drop", ids)
                await response.results_async(timeout_s=DROP_TIMEOUT_S, return_exceptions=True)
            except (DeploymentUnavailableError, TimeoutError):
                pass
            except Exception:
                logger.exception("the %s pool could not be told what nobody waits for", self._pool)
            finally:
                self._unwanted = [one for one in self._unwanted if one not in ids]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _replicas(self) -> int:
        """Those that have answered lately."""
        oldest = time.monotonic() - REPLICA_SEEN_S
        self._seen = {replica: seen for replica, seen in self._seen.items() if seen > oldest}
        return len(self._seen)
