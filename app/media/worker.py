"""The processes behind `DecodePool`: `python -m app.media.worker FD` forks decoders as the socket FD asks.

It ends, and its decoders with it, when the other side of the socket does.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import signal
import socket
import sys
import warnings
from typing import Any

import torch
from PIL import Image

from app.errors import FovealError
from app.media.decode import decode, decode_frames
from app.media.pool import receive, send
from app.media.types import DecodedMedia, MediaOptions
from configs.processor import PixelRange, ProcessorConfig
from configs.settings import Limits

# Measured on the worst legal pictures (alpha, 16 bit): about 16 bytes a pixel; the rest is for codecs and frames.
_BYTES_PER_PIXEL = 24
_BYTES_BESIDES = 1 << 30
_PR_SET_PDEATHSIG = 1


def main(control: socket.socket) -> None:
    torch.set_num_threads(1)
    Image.init()
    _silence_libraries()
    hello, _, _ = receive(control)
    limits = Limits(**hello["limits"])
    processor = _processor(hello["processor"])
    decoders: set[int] = set()
    while True:
        try:
            request, fd, _ = receive(control)
        except EOFError:
            return
        pid = request.get("pid", 0)
        if request["do"] == "end":
            # One that an earlier parent forked has ended with it, and its number may be another process's now.
            if pid in decoders:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                decoders.remove(pid)
        elif fd is not None:
            pid = os.fork()
            if pid == 0:
                control.close()
                _decode_until_closed(socket.socket(fileno=fd), processor, limits)
                os._exit(0)
            decoders.add(pid)
            os.close(fd)
        send(control, {"pid": pid})


def _decode_until_closed(channel: socket.socket, processor: ProcessorConfig, limits: Limits) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _bound_memory(_BYTES_PER_PIXEL * limits.max_pixels + _BYTES_BESIDES)
    while True:
        try:
            request, fd, data = receive(channel)
        except (EOFError, ConnectionError):
            return
        _answer(channel, request, fd, data, processor, limits)


def _answer(
    channel: socket.socket,
    request: dict[str, Any],
    fd: int | None,
    data: memoryview,
    processor: ProcessorConfig,
    limits: Limits,
) -> None:
    """One item's frames or error; nothing of it is held afterwards."""
    try:
        media = _run(request, _bytes(request["sizes"], fd, data), processor, limits)
    except FovealError as e:
        send(channel, {"code": e.code, "message": e.message, "param": e.param})
    except MemoryError:
        message = "decoding needs more memory than a decoder may use"
        send(channel, {"code": "too_many_pixels", "message": message, "param": None})
    else:
        stamps = None if media.timestamps is None else media.timestamps.tolist()
        answer = {"modality": media.modality, "shape": media.frames.shape, "timestamps": stamps}
        send(channel, answer, [media.frames.data.cast("B")])


def _bytes(sizes: list[int], fd: int | None, data: memoryview) -> bytes:
    """What came behind the request, or in the shared memory beside it."""
    if fd is None:
        return bytes(data)
    try:
        with mmap.mmap(fd, sum(sizes), access=mmap.ACCESS_READ) as memory:
            return memory[:]
    finally:
        os.close(fd)


def _run(request: dict[str, Any], data: bytes, processor: ProcessorConfig, limits: Limits) -> DecodedMedia:
    options = MediaOptions(**request["options"])
    limits = limits.model_copy(update={"decode_timeout_s": request["timeout_s"]})
    sizes: list[int] = request["sizes"]
    if request["task"] == "decode":
        return decode(data, options, processor, limits)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    images = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return decode_frames(images, options, processor, limits)


def _processor(values: dict[str, Any]) -> ProcessorConfig:
    ranges = {name: PixelRange(**values[name]) for name in ("image", "video")}
    means = {name: tuple(values[name]) for name in ("image_mean", "image_std")}
    return ProcessorConfig(**{**values, **ranges, **means})


def _silence_libraries() -> None:
    """Keeps what libraries print about damaged files off the log; a traceback of ours still gets there."""
    warnings.simplefilter("ignore")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _bound_memory(room: int) -> None:
    """Lets the address space grow by `room` bytes and no more, so that a decoder fails instead of the machine."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, hard))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
