"""The ingress replica's end of the lanes; `deployments/lane.py` tells what they are."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, cast
from uuid import uuid4

import numpy as np
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from app.arena import Arena
from app.threads import in_thread
from deployments.lane import MAX_MESSAGE, LaneCall, LaneDrop, LaneItem, LaneOffer, LaneReply, Room
from deployments.protocol import EncodeCall, EncodeReply, ReplicaState

logger = logging.getLogger("foveal")

OPEN_S = 1.0  # a pool that gives no lane for so long, because it has no replica, is called through Serve
COPY_ASIDE_BYTES = 1 << 20  # an event loop that copies more is late for others
RETRY_S = 5.0  # until a lane is tried again where there was none to be had
# Serve chooses a replica for each new lane, so that new replicas get their share and old ones are let go.
RENEW_S = 4.0
IDLE_S = 2.0
_PEER = struct.Struct("3i")  # pid, uid, gid


class LaneLost(Exception):
    """The replica at the other end is gone."""


class Hub:
    """Where the encoder replicas of this node connect: what all lanes of an ingress replica share.

    Belongs to the event loop that it is made in.
    """

    def __init__(self, node: str, arena: Arena) -> None:
        self.arena, self._node = arena, node
        self._address = f"foveal-{uuid4().hex}"
        self._expected: dict[str, asyncio.Future[socket.socket]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self._address}")
        self._socket.listen(128)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def offer(self) -> tuple[LaneOffer, asyncio.Future[socket.socket]]:
        """An offer, and the socket once a replica has taken it. Cancel the future to withdraw the offer."""
        key = uuid4().hex
        taken = self._expected[key] = self._loop.create_future()
        taken.add_done_callback(lambda _: self._expected.pop(key, None))
        return LaneOffer(self._node, self._address, key, self.arena.name), taken

    async def place(self, frames: np.ndarray) -> np.ndarray:
        """uint8 frames, in the arena if there is room."""
        room = self.arena.take(frames.nbytes)
        if room is None:
            return frames
        placed = room.reshape(frames.shape)
        if frames.nbytes > COPY_ASIDE_BYTES:
            await in_thread(partial(np.copyto, placed, frames))
        else:
            np.copyto(placed, frames)
        return placed

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            channel, _ = self._socket.accept()
            channel.setblocking(False)
            # An address of this kind has no permissions of its own.
            _, uid, _ = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid == os.getuid():
                self._loop.add_reader(channel.fileno(), self._greet, channel)
            else:
                channel.close()

    def _greet(self, channel: socket.socket) -> None:
        self._loop.remove_reader(channel.fileno())
        try:
            taken = self._expected.get(channel.recv(64).decode("ascii", "replace"))
            if taken is None or taken.done():
                channel.close()
                return
            socket.send_fds(channel, [b"\0"], [self.arena.fd])
            taken.set_result(channel)
        except OSError:
            channel.close()


class Lane:
    """One lane, idle or with one call under way."""

    def __init__(self, channel: socket.socket, arena: Arena, state: ReplicaState) -> None:
        self.opened = self.used = time.monotonic()
        self.alive = True
        self._channel, self._arena, self._state = channel, arena, state
        self._reply: asyncio.Future[EncodeReply] | None = None
        self._held: list[tuple[np.ndarray, np.ndarray]] = []  # pixels and room of the call under way
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel.fileno(), self._read)

    def call(self, call: EncodeCall) -> asyncio.Future[EncodeReply] | None:
        """The reply, its embeddings in the arena; None if the call cannot go this way.

        The future fails with `LaneLost` when the replica is gone.
        """
        items, held = [], []
        for item in call.items:
            size = self._state.result_bytes(item)
            start, room = self._arena.start_of(item.frames), self._arena.take(size)
            if start is None or room is None:
                return None
            held.append((item.frames, room))
            at = self._arena.start_of(room)
            assert at is not None
            items.append(LaneItem.of(item, Room(start, item.frames.nbytes), Room(at, size)))
        message = pickle.dumps(LaneCall(call.ingress, items, call.tokens_behind))
        if len(message) > MAX_MESSAGE:
            return None
        try:
            self._channel.send(message)
        except OSError:
            return None
        self._held, self._reply = held, self._loop.create_future()
        return self._reply

    def drop(self, ids: Collection[str]) -> None:
        """Tells that nobody waits for these items any more."""
        with suppress(OSError):
            self._channel.send(pickle.dumps(LaneDrop(frozenset(ids))))

    def close(self) -> None:
        """Ends the lane, at once if it is idle: what is under way holds its memory until the replica lets go."""
        if self._reply is not None:
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
        elif self.alive:
            self.alive = False
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()

    def _read(self) -> None:
        message = b""
        try:
            message = self._channel.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            pass
        held, future = self._held, self._reply
        self._held, self._reply, self.used = [], None, time.monotonic()
        reply: EncodeReply | None = None
        if message:
            try:
                reply = _unpack(pickle.loads(message), [room for _, room in held])
            except Exception:
                # Such as one cut short, or of another version: the replica has written all that it will for this call.
                logger.exception("a lane brought no reply that can be read")
        if reply is None:
            self.close()
        if future is None or future.done():
            return
        if reply is None:
            future.set_exception(LaneLost())
        else:
            future.set_result(reply)


def _unpack(reply: LaneReply, rooms: list[np.ndarray]) -> EncodeReply:
    results = []
    for result, array, room in zip(reply.results, reply.arrays, rooms, strict=True):
        if array is not None:
            shape, dtype = array
            result = replace(result, embeddings=room.view(dtype).reshape(shape))
        results.append(result)
    return EncodeReply(reply.replica, results)


class Lanes:
    """The lanes to one pool.

    Args:
        state: of one replica of the pool; the others are alike.
        changed: called when a lane has come or is not to be had.
    """

    def __init__(self, handle: DeploymentHandle, hub: Hub, state: ReplicaState, changed: Callable[[], None]) -> None:
        self._handle, self._hub, self._state, self._changed = handle, hub, state, changed
        self._idle: list[Lane] = []
        self._opening: asyncio.Task[None] | None = None
        self._hopeless, self._retry_at = False, 0.0  # the last attempt failed, and when the next one is due
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep_due = False

    async def place(self, frames: np.ndarray) -> np.ndarray:
        """As `Hub.place`, while calls go by lanes as far as is known."""
        return frames if self._hopeless else await self._hub.place(frames)

    def take(self) -> Lane | None:
        """An idle lane, which the caller gives back."""
        # The youngest: an old one is there only until it has a successor.
        self._idle = sorted((lane for lane in self._idle if lane.alive), key=lambda lane: lane.opened)
        return self._idle.pop() if self._idle else None

    def give_back(self, lane: Lane) -> None:
        """After the call. One that is lost, or whose replica is broken and which has been closed, is forgotten."""
        if not lane.alive:
            return
        self._idle.append(lane)
        if lane.opened < time.monotonic() - RENEW_S:
            self.open()
        self._sweep_later()

    def open(self) -> bool:
        """Has one more lane opened; False if there is no point in waiting for it."""
        if self._opening is None and not (self._hopeless and time.monotonic() < self._retry_at):
            self._opening = self._spawn(self._open())
            self._opening.add_done_callback(self._opened)
        return not self._hopeless

    def _opened(self, _: asyncio.Task[None]) -> None:
        self._opening = None
        self._changed()

    async def _open(self) -> None:
        offer, taken = self._hub.offer()
        try:
            response = cast(DeploymentResponse[bool], self._handle.options(method_name="lane").remote(offer))
            either: list[asyncio.Future[Any]] = [taken, self._spawn(_until_answered(response))]
            await asyncio.wait(either, timeout=OPEN_S, return_when=asyncio.FIRST_COMPLETED)
            if not taken.done():
                response.cancel()
        finally:
            self._hopeless, self._retry_at = not taken.done(), time.monotonic() + RETRY_S
            taken.cancel()
        if self._hopeless:
            return
        old = time.monotonic() - RENEW_S
        for lane in self._idle:
            if lane.opened < old:
                lane.close()
        self._idle.append(Lane(taken.result(), self._hub.arena, self._state))
        self._sweep_later()

    def _sweep(self) -> None:
        self._sweep_due = False
        unused = time.monotonic() - IDLE_S
        for lane in self._idle:
            if lane.used <= unused:
                lane.close()
        self._idle = [lane for lane in self._idle if lane.alive]
        arena = self._hub.arena
        arena.trim()
        if self._idle or arena.grown:
            self._sweep_later()

    def _sweep_later(self) -> None:
        if not self._sweep_due:
            self._sweep_due = True
            asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # In a context of its own: Serve cancels the calls that a request makes together with it.
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _until_answered(response: DeploymentResponse[bool]) -> None:
    """A lane's handle call tells nothing that its socket does not."""
    with suppress(Exception, asyncio.CancelledError):
        await response
