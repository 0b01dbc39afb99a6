"""Decoding in processes that can be ended.

Checks between library calls stop most files that take too long, but one call into a codec can run for minutes, and a
codec that crashes takes its process along. So the calls run in a few child processes: one that is over its time is
ended and replaced, an item whose decoder dies gets a second one, and each may use a bounded amount of memory. What is
small travels in the messages themselves, larger bytes and frames through anonymous shared memory, everything else as
JSON: a child that a file has taken over can send nothing but pixels, numbers and an error.

    DecodePool ── socket ── parent of decoders (imports everything once) ── fork ──┬─ decoder
        └────────────────────────── one socket each ───────────────────────────────┴─ decoder

Forking makes a replacement cheap and lets the decoders share the memory of what they import.
"""

from __future__ import annotations

import array
import asyncio
import json
import mmap
import os
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import CODES, FovealError
from app.media.deadline import timeout_error
from app.media.types import DecodedMedia, MediaOptions
from app.threads import in_thread
from configs.processor import ProcessorConfig
from configs.settings import Limits

# A decoder's own checks come first and leave it usable, so it gets a little longer before it is ended.
_GRACE_S = 1.0
_START_S = 120.0
# What a decoder may keep of freed memory (glibc): enough for a photo of 12 megapixels and its intermediates.
KEPT_BYTES = 256 << 20
# Codecs lose some bytes on some damaged files; a decoder is replaced before that adds up.
ITEMS_EACH = 20_000
# Of a file or of frames: what is smaller costs less inside the message than in shared memory.
INLINE_BYTES = 192 << 10
_HEAD = struct.Struct(">II")  # bytes of the JSON, bytes behind it
_MAX_JSON_BYTES = 1 << 24
CRASHED = "the decoder crashed on the content"


class DecodePool:
    """`limits.decode_processes` decoders and `spare` more; safe to call from many threads at once.

    They start with the first calls; what they share starts to load at once, in the background.
    """

    def __init__(self, processor: ProcessorConfig, limits: Limits, spare: int = 0) -> None:
        self._limits = limits
        self._parent = _Parent({"processor": asdict(processor), "limits": limits.model_dump(mode="json")})
        # A place without a decoder is filled by the call that gets it.
        self._places: queue.LifoQueue[_Decoder | None] = queue.LifoQueue()
        for _ in range(limits.decode_processes + spare):
            self._places.put(None)
        self._closed = False
        self._finishing: set[asyncio.Task[None]] = set()

    def configure(self, limits: Limits) -> None:
        """Takes over the time-outs of `limits`, for what is decoded from now on."""
        self._limits = limits

    def decode(self, data: bytes | memoryview, options: MediaOptions) -> DecodedMedia:
        """As `app.media.decode.decode`, which runs in a decoder.

        Raises:
            FovealError: also `overloaded` when no decoder came free within `limits.deadline_s`.
        """
        return self._run("decode", [data], options)

    def decode_frames(self, images: Sequence[bytes], options: MediaOptions) -> DecodedMedia:
        """As `app.media.decode.decode_frames`, which runs in a decoder."""
        return self._run("decode_frames", images, options)

    async def decode_soon(self, data: bytes, options: MediaOptions) -> DecodedMedia | None:
        """As `decode` without a thread that waits; None if `data` is large or no decoder is idle.

        A decoder whose caller is cancelled first finishes what it has begun.
        """
        if self._closed or len(data) > INLINE_BYTES:
            return None
        try:
            decoder = self._places.get_nowait()
        except queue.Empty:
            return None
        if decoder is None:
            self._places.put(None)
            return None
        try:
            answer = decoder.ask("decode", data, options, self._limits.decode_timeout_s)
        except _Lost:
            self._free_aside(decoder)
            return await self._try_again(data, options)
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            task = asyncio.create_task(self._free_when_done(decoder, answer))
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)
            raise
        self._free_answered(decoder, answer)
        try:
            return answer.result()
        except _Lost:
            return await self._try_again(data, options)
        except TimeoutError:
            raise timeout_error(self._limits.decode_timeout_s) from None

    async def _try_again(self, data: bytes, options: MediaOptions) -> DecodedMedia:
        return await in_thread(partial(self._run, "decode", [data], options, again=True))

    def close(self) -> None:
        """Ends the decoders, the busy ones too."""
        self._closed = True
        self._parent.close()

    def pids(self) -> list[int]:
        """Process ids of the decoders that are idle now."""
        with self._places.mutex:
            return [decoder.pid for decoder in self._places.queue if decoder is not None]

    def _run(
        self, task: str, buffers: Sequence[bytes | memoryview], options: MediaOptions, again: bool = False
    ) -> DecodedMedia:
        """again: one decoder has died of the item, or with it."""
        if self._closed:
            raise _stopping()
        try:
            decoder = self._places.get(timeout=self._limits.deadline_s)
        except queue.Empty:
            raise FovealError("overloaded", "every decoder is busy", retry_after_s=1) from None
        keep = None
        try:
            # A decoder may also die of what others did, such as running out of memory: one is not yet proof. The second
            # is a new one, since what ended the first may have ended the idle ones too.
            for last_try in (True,) if again else (False, True):
                if last_try and decoder is not None:
                    self._parent.end(decoder)
                    decoder = None
                decoder = decoder or self._parent.fork()
                try:
                    media = decoder.run(task, buffers, options, self._limits.decode_timeout_s)
                except FovealError:
                    keep = decoder
                    raise
                except _Lost as e:
                    if self._closed:
                        raise _stopping() from e
                    if last_try:
                        raise FovealError("undecodable_media", CRASHED) from e
                except TimeoutError:
                    raise timeout_error(self._limits.decode_timeout_s) from None
                else:
                    keep = decoder
                    return media
            raise AssertionError("unreachable")
        finally:
            self._free(decoder, keep is not None)

    def _free(self, decoder: _Decoder | None, keep: bool) -> None:
        if decoder is not None and (not keep or decoder.served >= ITEMS_EACH):
            self._parent.end(decoder)
            decoder = None
        self._places.put(decoder)

    def _free_aside(self, decoder: _Decoder) -> None:
        """Ends it, which may have to wait for another that starts."""
        asyncio.get_running_loop().run_in_executor(None, self._free, decoder, False)

    def _free_answered(self, decoder: _Decoder, answer: asyncio.Future[DecodedMedia]) -> None:
        usable = answer.exception() is None or isinstance(answer.exception(), FovealError)
        if usable and decoder.served < ITEMS_EACH:
            self._places.put(decoder)
        else:
            self._free_aside(decoder)

    async def _free_when_done(self, decoder: _Decoder, answer: asyncio.Future[DecodedMedia]) -> None:
        try:
            await asyncio.wait([answer])
        finally:
            if answer.done():
                self._free_answered(decoder, answer)
            else:
                answer.cancel()
                # After the loop has let go of its socket.
                asyncio.get_running_loop().call_soon(self._free_aside, decoder)


def _stopping() -> FovealError:
    return FovealError("unavailable", "the service is stopping", retry_after_s=1)


class _Lost(Exception):
    """The process at the other end is gone, or broke the protocol, before it answered."""


class _Parent:
    """The process that decoders are forked from. It never touches a file, and is started anew should it die."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self._hello = hello
        self._lock = threading.Lock()
        self._start()

    def fork(self) -> _Decoder:
        """Raises:
        FovealError: `unavailable`, it cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock, theirs:
            if self._process.poll() is not None:
                self._socket.close()
                self._start()
            try:
                return _Decoder(self._ask({"do": "fork"}, theirs.fileno())["pid"], ours)
            except _Lost as e:
                raise FovealError("unavailable", "the decoders do not start", retry_after_s=1) from e

    def end(self, decoder: _Decoder) -> None:
        decoder.socket.close()
        with self._lock:
            # Without its parent a decoder is dead already.
            with suppress(_Lost):
                self._ask({"do": "end", "pid": decoder.pid})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _ask(self, request: dict[str, Any], fd: int | None = None) -> dict[str, Any]:
        try:
            send(self._socket, request, fd=fd)
            return receive(self._socket)[0]
        except (EOFError, OSError, ValueError) as e:
            # An answer that comes late would be taken for that to the next request.
            self._process.kill()
            self._process.wait()
            raise _Lost from e

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_START_S)
        root = str(Path(__file__).resolve().parents[2])
        # Decoding runs in parallel over processes; a pool of threads in each would only fight over the cores.
        # Pictures come and go by the ten megabytes: memory that is kept for the next one is not faulted in again.
        env = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        env |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES), "CUDA_VISIBLE_DEVICES": ""}
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app.media.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env, "PYTHONPATH": path},
            )
        send(self._socket, self._hello)


class _Decoder:
    """One decoding process, used by one call at a time."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.socket = pid, channel
        self.served = 0

    def run(
        self, task: str, buffers: Sequence[bytes | memoryview], options: MediaOptions, timeout_s: float
    ) -> DecodedMedia:
        """Raises:
        FovealError: the decoder's answer.
        TimeoutError: it is over its time.
        _Lost: it is gone.
        """
        try:
            self._send(task, buffers, options, timeout_s)
            return _decoded(*receive(self.socket))
        except (EOFError, ConnectionError, ValueError, KeyError) as e:
            raise _Lost from e

    def ask(self, task: str, data: bytes, options: MediaOptions, timeout_s: float) -> asyncio.Future[DecodedMedia]:
        """As `run` for one small buffer: a future of the running loop that ends as `run` does."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[DecodedMedia] = loop.create_future()
        message = _Message()

        def read() -> None:
            if answer.done():
                return
            try:
                while not message.read(self.socket):
                    pass
                answer.set_result(_decoded(*message.parts()))
            except FovealError as error:
                answer.set_exception(error)
            except BlockingIOError:
                pass
            except (EOFError, OSError, ValueError, KeyError) as error:
                lost = _Lost()
                lost.__cause__ = error
                answer.set_exception(lost)

        def late() -> None:
            if not answer.done():
                answer.set_exception(TimeoutError())

        def done(_: object) -> None:
            timer.cancel()
            loop.remove_reader(fd)

        try:
            self._send(task, [data], options, timeout_s)
        except OSError as e:
            raise _Lost from e
        self.socket.setblocking(False)
        fd = self.socket.fileno()
        timer = loop.call_later(timeout_s + _GRACE_S, late)
        loop.add_reader(fd, read)
        answer.add_done_callback(done)
        return answer

    def _send(self, task: str, buffers: Sequence[bytes | memoryview], options: MediaOptions, timeout_s: float) -> None:
        self.served += 1
        self.socket.settimeout(timeout_s + _GRACE_S)
        sizes = [len(b) for b in buffers]
        message = {"task": task, "sizes": sizes, "options": asdict(options), "timeout_s": timeout_s}
        send(self.socket, message, buffers)


def _decoded(answer: dict[str, Any], fd: int | None, data: memoryview) -> DecodedMedia:
    try:
        if "code" in answer:
            if answer["code"] not in CODES:
                raise KeyError(answer["code"])
            raise FovealError(str(answer["code"]), str(answer["message"]), answer["param"])
        shape = tuple(int(n) for n in answer["shape"])
        memory = data if fd is None else mmap.mmap(fd, int(np.prod(shape)))
        frames = np.frombuffer(memory, dtype=np.uint8).reshape(shape)
    finally:
        if fd is not None:
            os.close(fd)
    stamps = answer["timestamps"]
    return DecodedMedia(answer["modality"], frames, None if stamps is None else np.array(stamps, dtype=np.float32))


def shared_memory(buffers: Iterable[bytes | memoryview]) -> int:
    """A file descriptor of anonymous memory that holds `buffers` one after the other."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("foveal")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while view:
            view = view[os.write(fd, view) :]
    return fd


def send(
    channel: socket.socket,
    message: dict[str, Any],
    buffers: Sequence[bytes | memoryview] = (),
    fd: int | None = None,
) -> None:
    """One JSON message, with `fd`, or with `buffers`: behind it or, if they are large, in shared memory."""
    payload, size, ours = json.dumps(message).encode(), sum(len(b) for b in buffers), None
    if size > INLINE_BYTES:
        fd = ours = shared_memory(buffers)
        buffers, size = (), 0
    try:
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        parts = b"".join((_HEAD.pack(len(payload), size), payload, *buffers))
        sent = channel.sendmsg([parts], rights)
        if sent < len(parts):
            channel.sendall(memoryview(parts)[sent:])
    finally:
        if ours is not None:
            os.close(ours)


def receive(channel: socket.socket) -> tuple[dict[str, Any], int | None, memoryview]:
    """The next message, the descriptor that came with it, and the bytes behind it.

    Raises:
        EOFError: the other side is gone.
        ValueError: it does not keep to the protocol.
    """
    message = _Message()
    while not message.read(channel):
        pass
    return message.parts()


class _Message:
    """One message as it comes in."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fd: int | None = None

    def read(self, channel: socket.socket) -> bool:
        """Takes what has come; True once the message is complete."""
        if self._data:
            chunk = channel.recv(self._missing())
        else:
            chunk, fds, _, _ = socket.recv_fds(channel, _HEAD.size, 1)
            self._fd = fds[0] if fds else None
        if not chunk:
            raise EOFError
        self._data += chunk
        return self._missing() == 0

    def parts(self) -> tuple[dict[str, Any], int | None, memoryview]:
        """The JSON, the descriptor, which is the caller's from then on, and the bytes behind the JSON."""
        end = _HEAD.size + _HEAD.unpack_from(self._data)[0]
        fd, self._fd = self._fd, None
        return json.loads(self._data[_HEAD.size : end]), fd, memoryview(self._data)[end:]

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _missing(self) -> int:
        if len(self._data) < _HEAD.size:
            return _HEAD.size - len(self._data)
        json_bytes, rest = _HEAD.unpack_from(self._data)
        if json_bytes > _MAX_JSON_BYTES or rest > INLINE_BYTES:
            raise ValueError("a message that is too large")
        return _HEAD.size + json_bytes + rest - len(self._data)
