"""Pull-when-free batching: a batch is chosen when the encoder can start it, never before.

    put() -> queue (bounded in items and bytes) -> worker thread: take what fits, submit -> collector thread: results

Items that wait can still be cancelled, expire, or be joined by younger ones.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal, Protocol

from deployments.metrics import ReplicaMetrics
from deployments.protocol import EncodeItem, EncodeResult, PoolName, QueueState, Refusal, Size
from encoder.budgets import PackLimits
from encoder.defs import EncodeOutput, EncodeRequest, Stopped

logger = logging.getLogger("foveal")

# Threads that wait for the interpreter's lock get it this soon. Python's own 5 ms are longer than a small batch takes,
# and the thread that feeds the device asks for the lock after each of its many short calls.
SWITCH_INTERVAL_S = 0.0002


def count_that_fit(waiting: Iterable[Size], limits: PackLimits) -> int:
    """How many of the oldest items make the next batch.

    The longest run from the front that shares the first one's modality and keeps all limits. The first item is always
    taken, so that nothing waits for ever; the one that ends the run is first in the next batch.
    """
    count = tokens = segments = 0
    modality: str | None = None
    for size in waiting:
        tokens, segments = tokens + size.tokens, segments + size.segments
        fits = limits.admit(tokens, count + 1, segments)
        if modality is not None and (size.modality != modality or not fits):
            break
        modality = size.modality
        count += 1
    return count


async def all_done(futures: Sequence[Future[EncodeResult]]) -> None:
    """Waits for all of them, and wakes the loop once."""
    loop = asyncio.get_running_loop()
    done, lock, left = loop.create_future(), threading.Lock(), len(futures)

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def count(_: Future[EncodeResult]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            loop.call_soon_threadsafe(finish)

    for future in futures:
        future.add_done_callback(count)
    if futures:
        await done


class Pending(Protocol):
    """busy_seconds: seconds that the device worked on the batch; read after `result`."""

    def result(self) -> Sequence[EncodeOutput | Exception]: ...

    @property
    def busy_seconds(self) -> float: ...


class Runner(Protocol):
    """The part of `EncoderRunner` that the batcher needs. `submit` is called from one thread only.

    max_in_flight: batches that may be past the queue: more than one where the device works on its own.
    """

    dtype: str
    max_in_flight: int

    def submit(
        self,
        modality: Literal["image", "video"],
        requests: Sequence[EncodeRequest],
        stop: Callable[[], bool] | None = None,
        *,
        eager: bool = False,
    ) -> Pending: ...


@dataclass
class _Ticket:
    item: EncodeItem
    size: Size
    future: Future[EncodeResult] = field(default_factory=Future)
    queued_at: float = field(default_factory=time.perf_counter)
    dropped: bool = False
    rerun: bool = False  # its embeddings had a NaN: it runs once more, alone and without graphs

    @property
    def unwanted(self) -> bool:
        return self.dropped or self.expired

    @property
    def expired(self) -> bool:
        return self.item.deadline is not None and time.time() > self.item.deadline


def _all_unwanted(batch: Sequence[_Ticket]) -> bool:
    return all(ticket.unwanted for ticket in batch)


class Batcher:
    """Queue, worker and collector of one replica. `put` may be called from any thread."""

    def __init__(
        self,
        pool: PoolName,
        runner: Runner,
        limits: PackLimits,
        metrics: ReplicaMetrics,
        *,
        max_queued_items: int,
        max_queued_bytes: int,
    ) -> None:
        self._pool, self._runner, self._metrics = pool, runner, metrics
        self._queue: deque[_Ticket] = deque()
        self._changed = threading.Condition()
        self.configure(limits, max_queued_items, max_queued_bytes)
        self._slots = threading.BoundedSemaphore(runner.max_in_flight)
        self._running: SimpleQueue[tuple[list[_Ticket], Pending, float] | None] = SimpleQueue()
        self._closed = False
        self._tokens = self._bytes = 0  # of what waits
        self._started: list[_Ticket] = []  # the batch that is being submitted
        self._begun: deque[float] = deque()  # when each batch past the queue was submitted, the oldest first
        self._cancelled = self._expired = self._rejected = 0
        self.batches = 0
        self.fault: str | None = None
        self.busy_s = 0.0
        self._threads = [
            threading.Thread(target=target, name=f"{pool}-{target.__name__.strip('_')}", daemon=True)
            for target in (self._work, self._collect)
        ]
        for thread in self._threads:
            thread.start()

    def configure(self, limits: PackLimits, max_queued_items: int, max_queued_bytes: int) -> None:
        """Takes effect with the next batch and the next item; what waits stays."""
        with self._changed:
            self._limits, self._max_items, self._max_bytes = limits, max_queued_items, max_queued_bytes

    def put(self, items: Sequence[EncodeItem]) -> list[Future[EncodeResult]]:
        """Queues items, together, so that they can share a batch."""
        tickets = [_Ticket(item, item.size) for item in items]
        with self._changed:
            for ticket in tickets:
                if not self._has_room(ticket.item):
                    self._sweep()
                if self.fault is not None or self._closed:
                    self._refuse(ticket, "fault", self.fault or "the replica is shutting down")
                elif not self._has_room(ticket.item):
                    self._rejected += 1
                    self._refuse(ticket, "overloaded", "the queue of the replica is full")
                else:
                    self._queue.append(ticket)
                    self._count(ticket, 1)
            if any(not ticket.future.done() for ticket in tickets):
                self._tell_waiting()
                self._changed.notify()
        return [ticket.future for ticket in tickets]

    def _has_room(self, item: EncodeItem) -> bool:
        return len(self._queue) < self._max_items and self._bytes + item.frames.nbytes <= self._max_bytes

    def _count(self, ticket: _Ticket, sign: Literal[1, -1]) -> None:
        self._tokens += sign * ticket.size.tokens
        self._bytes += sign * ticket.item.frames.nbytes

    def drop(self, ids: Collection[str]) -> None:
        """Forgets those of the items that wait here; their result is the error `cancelled`.

        A batch that runs stops, if it can, once all of its items are forgotten or late.
        """
        with self._changed:
            for ticket in (*self._queue, *self._started):
                if ticket.item.id in ids:
                    ticket.dropped = True
            self._sweep()

    def running_s(self) -> float:
        """Seconds since the oldest batch that has not ended was submitted; 0 if there is none."""
        begun = next(iter(self._begun.copy()), None)
        return 0.0 if begun is None else time.perf_counter() - begun

    def state(self) -> QueueState:
        with self._changed:
            self._sweep()
            return QueueState(
                items=len(self._queue),
                tokens=self._tokens,
                bytes=self._bytes,
                cancelled=self._cancelled,
                expired=self._expired,
                rejected=self._rejected,
            )

    def close(self) -> None:
        """Refuses what waits, finishes what runs, ends the threads."""
        with self._changed:
            self._closed = True
            self._drain("the replica is shutting down")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        # One batch a call: what a finished one held must not stay in a local until the next one comes.
        while self._start_next():
            pass
        self._running.put(None)

    def _start_next(self) -> bool:
        """False once closed."""
        self._slots.acquire()
        batch = self._next_batch()
        if batch is None:
            return False
        started = time.perf_counter()
        self._begun.append(started)
        try:
            pending = self._runner.submit(
                batch[0].size.modality,
                [EncodeRequest(t.item.frames, t.item.main_only, t.item.pooling) for t in batch],
                partial(_all_unwanted, batch),
                eager=batch[0].rerun,
            )
        except Stopped:
            for ticket in batch:
                self._give_up(ticket)
            self._end(started)
        except Exception as error:
            self._break(batch, error)
            self._end(started)
        else:
            self._running.put((batch, pending, started))
        finally:
            self._started = []
        return True

    def _collect(self) -> None:
        while (entry := self._running.get()) is not None:
            try:
                self._finish(*entry)
            except Exception as error:
                # Without this thread no batch would be answered any more.
                self._break(entry[0], error)
            finally:
                self._end(entry[2])
            del entry

    def _end(self, started: float) -> None:
        self._begun.remove(started)
        self._slots.release()

    def _finish(self, batch: list[_Ticket], pending: Pending, started: float) -> None:
        outputs = pending.result()
        encode_s = time.perf_counter() - started
        answered = [
            (ticket, self._answer(ticket, output, ticket.item.waited_s + started - ticket.queued_at, encode_s))
            for ticket, output in zip(batch, outputs, strict=True)
            if not self._to_rerun(ticket, output)
        ]
        for ticket, result in answered:
            ticket.future.set_result(result)
        self.batches += 1
        self.busy_s += pending.busy_seconds
        self._metrics.batch(
            [ticket.size.tokens for ticket, _ in answered],
            [result for _, result in answered],
            encode_s,
            pending.busy_seconds,
        )

    def _next_batch(self) -> list[_Ticket] | None:
        """Waits for work; None once closed."""
        with self._changed:
            while True:
                self._sweep()
                rerun = bool(self._queue) and self._queue[0].rerun
                count = 1 if rerun else count_that_fit((t.size for t in self._queue), self._limits)
                batch = [self._queue.popleft() for _ in range(count)]
                for ticket in batch:
                    self._count(ticket, -1)
                if batch:
                    self._started = batch
                    self._tell_waiting()
                    return batch
                if self._closed:
                    return None
                if not self._queue:
                    self._changed.wait()

    def _sweep(self) -> None:
        """Drops what nobody waits for any more. Called with the lock held."""
        alive: list[_Ticket] = []
        for ticket in self._queue:
            if ticket.unwanted:
                self._give_up(ticket)
                self._count(ticket, -1)
            else:
                alive.append(ticket)
        if len(alive) < len(self._queue):
            self._queue = deque(alive)
            self._tell_waiting()

    def _give_up(self, ticket: _Ticket) -> None:
        if ticket.dropped:
            self._cancelled += 1
            self._refuse(ticket, "cancelled", "nobody waits for the item")
        else:
            self._expired += 1
            self._refuse(ticket, "deadline", "the deadline passed before the item was encoded")

    def _to_rerun(self, ticket: _Ticket, output: EncodeOutput | Exception) -> bool:
        """Whether the item runs again: frames are finite, so a NaN is either the item's own doing or a broken device's.

        The rerun tells: it is finite on a device whose first answer was wrong, which is then not to be trusted.
        """
        if isinstance(output, Exception) or output.has_nan == ticket.rerun:
            return False
        if ticket.rerun:
            self._latch("a NaN in embeddings that are finite when they are computed again")
            return False
        ticket.rerun = True
        with self._changed:
            if self.fault is not None or self._closed:
                self._refuse(ticket, "fault", self.fault or "the replica is shutting down")
            else:
                self._queue.appendleft(ticket)
                self._count(ticket, 1)
                self._changed.notify()
        return True

    def _tell_waiting(self) -> None:
        self._metrics.waiting(len(self._queue), self._tokens)

    def _break(self, batch: list[_Ticket], error: Exception) -> None:
        """A whole batch failed: the replica cannot be trusted any more. Latches the fault."""
        logger.error("%s replica is broken", self._pool, exc_info=error)
        fault = f"{type(error).__name__}: {error}"
        self._latch(fault)
        for ticket in batch:
            if not ticket.future.done():
                ticket.future.set_result(self._error("fault", fault))

    def _latch(self, fault: str) -> None:
        logger.error("%s replica is not to be trusted any more: %s", self._pool, fault)
        with self._changed:
            self.fault = self.fault or fault
            self._drain(self.fault)

    def _drain(self, message: str) -> None:
        for ticket in self._queue:
            self._refuse(ticket, "fault", message)
        self._queue.clear()
        self._tokens = self._bytes = 0
        self._tell_waiting()

    def _refuse(self, ticket: _Ticket, error: Refusal, message: str) -> None:
        ticket.future.set_result(self._error(error, message))

    def _error(self, error: Refusal, message: str) -> EncodeResult:
        self._metrics.dropped(error)
        return EncodeResult(None, self._runner.dtype, self._pool, error=error, message=message)

    def _answer(
        self, ticket: _Ticket, output: EncodeOutput | Exception, queue_s: float, encode_s: float
    ) -> EncodeResult:
        if isinstance(output, Exception):
            logger.error("an item cannot be encoded", exc_info=output)
            return self._error("internal", f"{type(output).__name__}: {output}")
        if output.has_nan:
            logger.error("an item has NaN embeddings, twice")
            return self._error("internal", "the embeddings are not finite")
        return EncodeResult(
            embeddings=output.embeddings,
            dtype=self._runner.dtype,
            pool=self._pool,
            execution=output.execution,
            reason=ticket.item.reason or output.reason,
            budget=output.budget,
            queue_s=queue_s,
            encode_s=encode_s,
        )
