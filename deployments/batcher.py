"""Pull-when-free batching: a batch is chosen when the encoder can start it, never before.

    put() -> queue (bounded in items and bytes) -> worker thread: take what fits, submit -> collector thread: results

Items that wait can still be cancelled, expire, or be joined by younger ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal, Protocol

from deployments.metrics import ReplicaMetrics
from deployments.protocol import EncodeItem, EncodeResult, PoolName, QueueState, Refusal, Size
from encoder.budgets import PackLimits
from encoder.runner import EncodeOutput, EncodeRequest

logger = logging.getLogger("foveal")


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

    def submit(self, modality: Literal["image", "video"], requests: Sequence[EncodeRequest]) -> Pending: ...


@dataclass
class _Ticket:
    item: EncodeItem
    size: Size
    future: Future[EncodeResult] = field(default_factory=Future)
    queued_at: float = field(default_factory=time.perf_counter)
    dropped: bool = False

    @property
    def expired(self) -> bool:
        return self.item.deadline is not None and time.time() > self.item.deadline


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
        self._cancelled = self._expired = self._rejected = 0
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

    def put(self, item: EncodeItem) -> Future[EncodeResult]:
        """Queues one item. Cancelling the future while it waits removes it before it costs device time."""
        ticket = _Ticket(item, item.size)
        with self._changed:
            if not self._has_room(item):
                self._sweep()
            if self.fault is not None or self._closed:
                self._refuse(ticket, "fault", self.fault or "the replica is shutting down")
            elif not self._has_room(item):
                self._rejected += 1
                self._refuse(ticket, "overloaded", "the queue of the replica is full")
            else:
                self._queue.append(ticket)
                self._count(ticket, 1)
                self._tell_waiting()
                self._changed.notify()
        return ticket.future

    def _has_room(self, item: EncodeItem) -> bool:
        return len(self._queue) < self._max_items and self._bytes + item.frames.nbytes <= self._max_bytes

    def _count(self, ticket: _Ticket, sign: Literal[1, -1]) -> None:
        self._tokens += sign * ticket.size.tokens
        self._bytes += sign * ticket.item.frames.nbytes

    def drop(self, ids: Collection[str]) -> None:
        """Forgets those of the items that wait here; their result is the error `cancelled`."""
        with self._changed:
            for ticket in self._queue:
                if ticket.item.id in ids:
                    ticket.dropped = True
            self._sweep()

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
        while True:
            self._slots.acquire()
            batch = self._next_batch()
            if batch is None:
                self._running.put(None)
                return
            started = time.perf_counter()
            try:
                pending = self._runner.submit(
                    batch[0].size.modality,
                    [EncodeRequest(t.item.frames, t.item.main_only, t.item.pooling) for t in batch],
                )
            except Exception as error:
                self._break(batch, error)
                self._slots.release()
            else:
                self._running.put((batch, pending, started))

    def _collect(self) -> None:
        while (entry := self._running.get()) is not None:
            batch, pending, started = entry
            try:
                outputs = pending.result()
            except Exception as error:
                self._break(batch, error)
            else:
                encode_s = time.perf_counter() - started
                results = [
                    self._answer(ticket, output, ticket.item.waited_s + started - ticket.queued_at, encode_s)
                    for ticket, output in zip(batch, outputs, strict=True)
                ]
                for ticket, result in zip(batch, results, strict=True):
                    ticket.future.set_result(result)
                self.busy_s += pending.busy_seconds
                self._metrics.batch([ticket.size.tokens for ticket in batch], results, encode_s, pending.busy_seconds)
            finally:
                self._slots.release()

    def _next_batch(self) -> list[_Ticket] | None:
        """Waits for work; None once closed."""
        with self._changed:
            while True:
                self._sweep()
                batch = [
                    self._queue.popleft() for _ in range(count_that_fit((t.size for t in self._queue), self._limits))
                ]
                for ticket in batch:
                    self._count(ticket, -1)
                batch = [t for t in batch if self._claim(t)]
                if batch:
                    self._tell_waiting()
                    return batch
                if self._closed:
                    return None
                if not self._queue:
                    self._changed.wait()

    def _claim(self, ticket: _Ticket) -> bool:
        if ticket.future.set_running_or_notify_cancel():
            return True
        self._count_cancelled()
        return False

    def _sweep(self) -> None:
        """Drops what nobody waits for any more. Called with the lock held."""
        alive: list[_Ticket] = []
        for ticket in self._queue:
            if ticket.future.cancelled():
                self._count_cancelled()
            elif ticket.dropped:
                self._cancelled += 1
                self._refuse(ticket, "cancelled", "nobody waits for the item")
            elif ticket.expired:
                self._expired += 1
                self._refuse(ticket, "deadline", "the deadline passed while the item was queued")
            else:
                alive.append(ticket)
                continue
            self._count(ticket, -1)
        if len(alive) < len(self._queue):
            self._queue = deque(alive)
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        self._metrics.waiting(len(self._queue), self._tokens)

    def _count_cancelled(self) -> None:
        self._cancelled += 1
        self._metrics.dropped("cancelled")

    def _break(self, batch: list[_Ticket], error: Exception) -> None:
        """A whole batch failed: the replica cannot be trusted any more. Latches the fault."""
        logger.error("%s replica is broken", self._pool, exc_info=error)
        fault = f"{type(error).__name__}: {error}"
        with self._changed:
            self.fault = self.fault or fault
            self._drain(self.fault)
        for ticket in batch:
            ticket.future.set_result(self._error("fault", fault))

    def _drain(self, message: str) -> None:
        for ticket in self._queue:
            self._refuse(ticket, "fault", message)
        self._queue.clear()
        self._tokens = self._bytes = 0
        self._tell_waiting()

    def _refuse(self, ticket: _Ticket, error: Refusal, message: str) -> None:
        if ticket.future.set_running_or_notify_cancel():
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
