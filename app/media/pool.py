"""Decoding in processes that can be ended.

Checks between library calls stop most files that take too long, but one call into a codec can run for minutes, and a
codec that crashes takes its process along. So the calls run in a few child processes: one that is over its time is
killed and replaced, one that crashes costs its own item only, and each may use a bounded amount of memory. Bytes and
frames travel through anonymous shared memory, everything else as JSON: a child that a file has taken over can send
nothing but numbers and an error.
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import CODES, FovealError
from app.media.deadline import timeout_error
from app.media.types import DecodedMedia, MediaOptions
from configs.processor import ProcessorConfig
from configs.settings import Limits

# A child's own checks come first and leave it usable, so it gets a little longer before it is killed.
_GRACE_S = 1.0
_START_S = 120.0
CRASHED = "the decoder crashed on the content"


class DecodePool:
    """`limits.decode_processes` children that decode; safe to call from many threads at once."""

    def __init__(self, processor: ProcessorConfig, limits: Limits) -> None:
        self._limits = limits
        self._hello = {"processor": asdict(processor), "limits": limits.model_dump(mode="json")}
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for _ in range(limits.decode_processes):
            self._idle.put(_Child(self._hello))
        self._closed = False

    def decode(self, data: bytes | memoryview, options: MediaOptions) -> DecodedMedia:
        """As `app.media.decode.decode`, which runs in the child.

        Raises:
            FovealError: also `overloaded` when no child came free within `limits.deadline_s`.
        """
        return self._run("decode", [data], options)

    def decode_frames(self, images: Sequence[bytes], options: MediaOptions) -> DecodedMedia:
        """As `app.media.decode.decode_frames`, which runs in the child."""
        return self._run("decode_frames", images, options)

    def close(self) -> None:
        """Ends the children; calls under way are let finish first."""
        self._closed = True
        for _ in range(self._limits.decode_processes):
            self._idle.get().kill()

    def pids(self) -> list[int]:
        """Process ids of the children that are idle now."""
        with self._idle.mutex:
            return [child.pid for child in self._idle.queue]

    def _run(self, task: str, buffers: Sequence[bytes | memoryview], options: MediaOptions) -> DecodedMedia:
        if self._closed:
            raise FovealError("unavailable", "the service is stopping", retry_after_s=1)
        try:
            child = self._idle.get(timeout=self._limits.deadline_s)
        except queue.Empty:
            raise FovealError("overloaded", "every decoder is busy", retry_after_s=1) from None
        try:
            return child.run(task, buffers, options, self._limits.decode_timeout_s)
        except _ChildLost:
            child.kill()
            child = _Child(self._hello)
            raise FovealError("undecodable_media", CRASHED) from None
        except TimeoutError:
            child.kill()
            child = _Child(self._hello)
            raise timeout_error(self._limits.decode_timeout_s) from None
        finally:
            self._idle.put(child)


class _ChildLost(Exception):
    """The child ended, or broke the protocol, before it answered."""


class _Child:
    """One decoding process, used by one call at a time."""

    def __init__(self, hello: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        root = str(Path(__file__).resolve().parents[2])
        # Decoding runs in parallel over children; a pool of threads in each would only fight over the cores.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "app.media.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
            )
        self.pid = self._process.pid
        self._socket = ours
        self._ready = False
        send(ours, hello)

    def run(
        self, task: str, buffers: Sequence[bytes | memoryview], options: MediaOptions, timeout_s: float
    ) -> DecodedMedia:
        """Raises:
        FovealError: the child's answer.
        TimeoutError: the child is over its time.
        _ChildLost: it is gone.
        """
        try:
            if not self._ready:
                self._socket.settimeout(_START_S)
                receive(self._socket)
                self._ready = True
            self._socket.settimeout(timeout_s + _GRACE_S)
            fd = shared_memory(buffers)
            try:
                send(self._socket, {"task": task, "sizes": [len(b) for b in buffers], "options": asdict(options)}, fd)
            finally:
                os.close(fd)
            return _decoded(*receive(self._socket))
        except (EOFError, ConnectionError, ValueError, KeyError) as e:
            raise _ChildLost from e

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


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
