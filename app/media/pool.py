"""Decoding in processes that can be ended.

Checks between library calls stop most files that take too long, but one call into a codec can run for minutes, and a
codec that crashes takes its process along. So the calls run in a few child processes: one that is over its time is
ended and replaced, an item whose decoder dies gets a second one, and each may use a bounded amount of memory. Bytes and
frames travel through anonymous shared memory, everything else as JSON: a child that a file has taken over can send
nothing but numbers and an error.

    DecodePool ── socket ── parent of decoders (imports everything once) ── fork ──┬─ decoder
        └────────────────────────── one socket each ───────────────────────────────┴─ decoder

Forking makes a replacement cheap and lets the decoders share the memory of what they import.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import CODES, FovealError
from app.media.deadline import timeout_error
from app.media.types import DecodedMedia, MediaOptions
from configs.processor import ProcessorConfig
from configs.settings import Limits

# A decoder's own checks come first and leave it usable, so it gets a little longer before it is ended.
_GRACE_S = 1.0
_START_S = 120.0
# What a decoder may keep of freed memory (glibc): enough for a photo of 12 megapixels and its intermediates.
KEPT_BYTES = 256 << 20
# Codecs lose some bytes on some damaged files; a decoder is replaced before that adds up.
ITEMS_EACH = 20_000
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

    def decode(self, data: bytes | memoryview, options: MediaOptions) -> DecodedMedia:
        """As `app.media.decode.decode`, which runs in a decoder.

        Raises:
            FovealError: also `overloaded` when no decoder came free within `limits.deadline_s`.
        """
        return self._run("decode", [data], options)

    def decode_frames(self, images: Sequence[bytes], options: MediaOptions) -> DecodedMedia:
        """As `app.media.decode.decode_frames`, which runs in a decoder."""
        return self._run("decode_frames", images, options)

    def close(self) -> None:
        """Ends the decoders, the busy ones too."""
        self._closed = True
        self._parent.close()

    def pids(self) -> list[int]:
        """Process ids of the decoders that are idle now."""
        with self._places.mutex:
            return [decoder.pid for decoder in self._places.queue if decoder is not None]

    def _run(self, task: str, buffers: Sequence[bytes | memoryview], options: MediaOptions) -> DecodedMedia:
        if self._closed:
            raise _stopping()
        try:
            decoder = self._places.get(timeout=self._limits.deadline_s)
        except queue.Empty:
            raise FovealError("overloaded", "every decoder is busy", retry_after_s=1) from None
        keep = None
        try:
            # A decoder may also die of what others did, such as running out of memory: one is not yet proof.
            for last_try in (False, True):
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
                    self._parent.end(decoder)
                    decoder = None
                except TimeoutError:
                    raise timeout_error(self._limits.decode_timeout_s) from None
                else:
                    keep = decoder
                    return media
            raise AssertionError("unreachable")
        finally:
            if keep is not None and keep.served >= ITEMS_EACH:
                keep = None
            if decoder is not None and keep is None:
                self._parent.end(decoder)
            self._places.put(keep)


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
            send(self._socket, request, fd)
            return receive(self._socket)[0]
        except (EOFError, OSError) as e:
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
        self.served += 1
        self.socket.settimeout(timeout_s + _GRACE_S)
        try:
            fd = shared_memory(buffers)
            try:
                send(self.socket, {"task": task, "sizes": [len(b) for b in buffers], "options": asdict(options)}, fd)
            finally:
                os.close(fd)
            return _decoded(*receive(self.socket))
        except (EOFError, ConnectionError, ValueError, KeyError) as e:
            raise _Lost from e


def _decoded(answer: dict[str, Any], fd: int | None) -> DecodedMedia:
    if "code" in answer:
        if answer["code"] not in CODES:
            raise KeyError(answer["code"])
        raise FovealError(str(answer["code"]), str(answer["message"]), answer["param"])
    if fd is None:
        raise KeyError("frames")
    try:
        shape = tuple(int(n) for n in answer["shape"])
        frames = np.frombuffer(mmap.mmap(fd, int(np.prod(shape))), dtype=np.uint8).reshape(shape)
    finally:
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


def send(channel: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    """One JSON message, length first, with a file descriptor beside it."""
    payload = json.dumps(message).encode()
    channel.sendmsg(
        [len(payload).to_bytes(4, "big")],
        [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))],
    )
    channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[dict[str, Any], int | None]:
    """The next message and the descriptor that came with it.

    Raises:
        EOFError: the other side is gone.
    """
    head, fds, _, _ = socket.recv_fds(channel, 4, 1)
    head += _exactly(channel, 4 - len(head))
    message = json.loads(_exactly(channel, int.from_bytes(head, "big")))
    return message, fds[0] if fds else None


def _exactly(channel: socket.socket, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        chunk = channel.recv(size - len(body))
        if not chunk:
            raise EOFError
        body += chunk
    return bytes(body)
