"""Lanes: calls from an ingress replica to an encoder replica of the same node, past Serve's handle.

A handle call costs milliseconds of two interpreters, whatever it carries; a message on a Unix socket costs
microseconds. A lane is one handle call that lasts: Serve routes it, counts it against its limits and waits for its end
when it stops a replica, while any number of calls, one at a time, go over the socket that it sets up. Pixels and
embeddings never go through a socket: both sides map the ingress replica's shared memory.

    ingress (app/lanes.py)                                      encoder replica (here)
      handle call `lane(LaneOffer)`               ──Serve──▶    connects to the offer's socket
      descriptor of its shared memory             ─────────▶    maps it
      LaneCall: sizes, places of pixels, room     ─────────▶    the batcher's queue, pixels read in place
      LaneReply: shapes and facts                 ◀─────────    embeddings written into the room
      closes the socket                           ─────────▶    drops what waits; the handle call returns

The memory of a call is the ingress's again once it has the reply, or once the replica has closed the socket: until then
the replica may still write.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import pickle
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import numpy as np
import ray

from deployments.batcher import all_done
from deployments.protocol import EncodeCall, EncodeItem, EncodeResult

logger = logging.getLogger("foveal")

MAX_MESSAGE = 128 * 1024  # bytes; what a socket of Linux takes by default is 208 KiB
CONNECT_S = 5.0
# Results over so many bytes are copied by a thread of their own, so that the next batch is not waited for.
COPY_ASIDE_BYTES = 4 << 20
COPY_THREADS = 2

Array = tuple[tuple[int, ...], str]  # shape and numpy dtype


@dataclass(frozen=True)
class LaneOffer:
    """node: Ray's id of the node. address: of an abstract Unix socket. key: the first message on it.
    memory: names the shared memory."""

    node: str
    address: str
    key: str
    memory: str


@dataclass(frozen=True)
class Room:
    """Bytes of the shared memory."""

    start: int
    size: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class LaneItem:
    """An `EncodeItem` whose frames lie in shared memory, and where its embeddings go."""

    modality: Literal["image", "video"]
    shape: tuple[int, ...]
    frames: Room
    room: Room
    main_only: bool
    pooling: Literal["none", "mean"]
    reason: str | None
    deadline: float | None
    waited_s: float
    id: str

    @classmethod
    def of(cls, item: EncodeItem, frames: Room, room: Room) -> Self:
        return cls(
            item.modality,
            item.frames.shape,
            frames,
            room,
            item.main_only,
            item.pooling,
            item.reason,
            item.deadline,
            item.waited_s,
            item.id,
        )

    def item(self, memory: np.ndarray) -> EncodeItem:
        """memory: uint8 [bytes]."""
        frames = memory[self.frames.slice].reshape(self.shape)
        frames.flags.writeable = False
        return EncodeItem(
            self.modality,
            frames,
            self.main_only,
            self.pooling,
            self.reason,
            self.deadline,
            self.waited_s,
            self.id,
        )


@dataclass(frozen=True)
class LaneCall:
    """As `EncodeCall`."""

    ingress: str
    items: list[LaneItem]
    tokens_behind: int


@dataclass(frozen=True)
class LaneDrop:
    """Nobody waits for these items any more."""

    ids: frozenset[str]


@dataclass(frozen=True)
class LaneReply:
    """As `EncodeReply`, with the embeddings in the room given, where `arrays` tells what they are."""

    replica: str
    results: list[EncodeResult]
    arrays: list[Array | None]


class LaneServer:
    """The replica's end of its lanes, on a thread of its own: a busy event loop of Serve delays no call.

    Args:
        put: queues a call's items and gives the futures of their results.
        drop: forgets items by id, while they wait.
    """

    def __init__(
        self,
        node: str,
        replica: str,
        put: Callable[[EncodeCall], Sequence[Future[EncodeResult]]],
        drop: Callable[[Collection[str]], None],
    ) -> None:
        self._node, self._replica, self._put, self._drop = node, replica, put, drop
        self._memories: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()
        self.calls = 0
        self._open: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._copiers = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="lane-copy")
        self._thread = threading.Thread(target=self._loop.run_forever, name="lanes", daemon=True)
        self._thread.start()

    async def serve(self, offer: LaneOffer) -> bool:
        """Until the ingress ends the lane; cancelling ends it too. False if the ingress is on another node.

        Raises:
            OSError: it cannot be reached.
        """
        if offer.node != self._node:
            return False
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._serve(offer), self._loop))
        return True

    def close(self) -> None:
        """Ends the lanes and their thread, once what they have under way is done."""
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._copiers.shutdown()

    async def _end_all(self) -> None:
        for lane in self._open:
            lane.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, offer: LaneOffer) -> None:
        lane = asyncio.current_task()
        assert lane is not None
        self._open.add(lane)
        lane.add_done_callback(self._open.discard)
        calls: dict[asyncio.Task[None], LaneCall] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_S):
                    await self._loop.sock_connect(channel, f"\0{offer.address}")
                    channel.send(offer.key.encode())
                    memory = await self._memory(channel, offer.memory)
                while message := await self._loop.sock_recv(channel, MAX_MESSAGE):
                    request: LaneCall | LaneDrop = pickle.loads(message)
                    if isinstance(request, LaneDrop):
                        self._drop(request.ids)
                    else:
                        # Queued here and now, so that a drop that comes right behind finds the items.
                        futures = self._begin(request, memory)
                        task = self._loop.create_task(self._answer(request, futures, memory, channel))
                        calls[task] = request
                        task.add_done_callback(calls.pop)
                        task.add_done_callback(partial(_end_if_failed, lane))
            except ConnectionError:
                pass  # the ingress is gone, as at the end of its messages
            finally:
                self._drop(frozenset(item.id for call in calls.values() for item in call.items))
                # Only then: a closed socket tells that nothing is written any more.
                await asyncio.gather(*calls)

    async def _memory(self, channel: socket.socket, name: str) -> np.ndarray:
        """The shared memory whose descriptor comes next, uint8 [bytes]; lanes of one ingress map it once."""
        readable = self._loop.create_future()
        self._loop.add_reader(channel, readable.set_result, None)
        try:
            await readable
        finally:
            self._loop.remove_reader(channel)
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if not fds:
            raise ConnectionAbortedError("the offer was withdrawn")
        (fd,) = fds
        try:
            memory = self._memories.get(name)
            if memory is None:
                memory = self._memories[name] = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
            return memory
        finally:
            os.close(fd)

    def _begin(self, call: LaneCall, memory: np.ndarray) -> Sequence[Future[EncodeResult]]:
        self.calls += 1
        return self._put(EncodeCall(call.ingress, [item.item(memory) for item in call.items], call.tokens_behind))

    async def _answer(
        self, call: LaneCall, futures: Sequence[Future[EncodeResult]], memory: np.ndarray, channel: socket.socket
    ) -> None:
        await all_done(futures)
        results = [future.result() for future in futures]
        write = partial(_write_all, results, call.items, memory)
        if sum(item.room.size for item in call.items) > COPY_ASIDE_BYTES:
            reply = await self._loop.run_in_executor(self._copiers, write)
        else:
            reply = write()
        with suppress(ConnectionError):  # the ingress is gone
            channel.send(pickle.dumps(LaneReply(self._replica, *reply)))


def node_id() -> str:
    """Ray's id of this node; "" outside of Ray."""
    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def _end_if_failed(lane: asyncio.Task[None], call: asyncio.Task[None]) -> None:
    # Nobody may wait for an answer that does not come.
    if not call.cancelled() and call.exception() is not None:
        logger.error("a call by a lane failed", exc_info=call.exception())
        lane.cancel()


def _write_all(
    results: Sequence[EncodeResult], items: Sequence[LaneItem], memory: np.ndarray
) -> tuple[list[EncodeResult], list[Array | None]]:
    """Embeddings into their rooms, and what is told of them."""
    told: list[EncodeResult] = []
    arrays: list[Array | None] = []
    for result, item in zip(results, items, strict=True):
        embeddings, array = result.embeddings, None
        if embeddings is not None and embeddings.nbytes != item.room.size:
            message = f"the embeddings have {embeddings.nbytes} bytes, the ingress expected {item.room.size}"
            result = replace(result, error="fault", message=message)
        elif embeddings is not None:
            room = memory[item.room.slice].view(embeddings.dtype).reshape(embeddings.shape)
            np.copyto(room, embeddings)
            array = (embeddings.shape, embeddings.dtype.str)
        told.append(replace(result, embeddings=None))
        arrays.append(array)
    return told, arrays
