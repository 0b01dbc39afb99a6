"""Clips through FFmpeg: bytes -> sampled RGB frames at their target size.

A clip is counted by decoding it, never by what its header claims. Demuxing first, which is cheap, predicts the frames
that will be shown; while they are decoded the chosen ones are converted. If decoding shows other frames than the
packets promised, the choice is made again from what was seen and the clip is decoded once more. Memory holds the
sampled frames at target size, the time stamps, and the decoder's own few pictures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av
import numpy as np

from app.media.deadline import Deadline, WatchedBytes
from app.media.detect import Detected, unsupported
from app.media.image import check_pixels
from app.media.library import library_call, undecodable
from app.media.resize import resize_into
from app.media.sampling import Clock, choose, make_clock

CODECS = {"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libaom-av1", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg"}
CODECS |= {"prores"}

# Given a clock, how many frames to take; raises when they are too many or too long.
Counter = Callable[[Clock], int]
# Given (frames taken, height, width) of the shown picture, the target (height, width).
Sizer = Callable[[int, int, int], tuple[int, int]]


@dataclass
class Sampled:
    """The frames taken by one pass: `stamps` of every frame shown, `frames` [n, 3, H, W] of the chosen."""

    stamps: list[int | None] = field(default_factory=list)
    frames: np.ndarray | None = None
    filled: int = 0


def decode_clip(
    data: bytes | memoryview, detected: Detected, max_pixels: int, count: Counter, size: Sizer, deadline: Deadline
) -> tuple[np.ndarray, Clock, list[int]]:
    """uint8 frames [n, 3, H, W], the clip's clock, and the indices of the frames taken.

    Raises:
        FovealError: `undecodable_media`, `unsupported_media`, `too_many_pixels`, `decode_timeout`, and what `count`
            and `size` raise.
    """
    refuse_cut_file(data, detected)
    clip = _Clip(data, detected, max_pixels, deadline)
    promised = clip.demux()
    clock = clip.clock(promised)
    indices = choose(clock, count(clock))
    seen = clip.decode(indices, size)
    if not seen.stamps:
        raise undecodable(detected.name, "no frame can be decoded")
    if seen.stamps != promised:
        clock = clip.clock(seen.stamps)
        indices = choose(clock, count(clock))
        total = len(seen.stamps)
        seen = clip.decode(indices, size)
        if len(seen.stamps) != total:
            raise undecodable(detected.name, "its frames decode differently each time")
    assert seen.frames is not None
    return seen.frames, clock, indices


class _Clip:
    def __init__(self, data: bytes | memoryview, detected: Detected, max_pixels: int, deadline: Deadline) -> None:
        self._data, self._detected, self._max_pixels, self._deadline = data, detected, max_pixels, deadline
        # One converter for all frames, on this thread: setting up a thread pool a frame costs more than converting.
        self._converter = av.video.reformatter.VideoReformatter()
        self._time_base = Fraction(1)
        self._header_rate: Fraction | None = None

    def clock(self, stamps: Sequence[int | None]) -> Clock:
        return make_clock(stamps, self._time_base, self._header_rate)

    def demux(self) -> list[int | None]:
        """The time stamps that the packets promise, in shown order. Reads the stream's properties on the way."""
        with self._open() as (container, stream):
            self._time_base = Fraction(stream.time_base)
            self._header_rate = stream.average_rate
            stamps = [packet.pts for packet in self._packets(container, stream) if not packet.is_discard]
        known = sorted(stamp for stamp in stamps if stamp is not None)
        return [*known] if len(known) == len(stamps) else list(stamps)

    def decode(self, indices: Sequence[int], size: Sizer) -> Sampled:
        """One pass over the whole clip that converts the frames at `indices` (ascending, repeats allowed)."""
        sampled = Sampled()
        with self._open() as (container, stream):
            for frame in self._frames(container, stream):
                self._deadline.check()
                check_pixels(frame.width, frame.height, self._max_pixels)
                index = len(sampled.stamps)
                sampled.stamps.append(frame.pts)
                repeats = 0
                while sampled.filled + repeats < len(indices) and indices[sampled.filled + repeats] == index:
                    repeats += 1
                if repeats:
                    self._take(frame, sampled, repeats, len(indices), size)
        return sampled

    def _take(self, frame: Any, sampled: Sampled, repeats: int, total: int, size: Sizer) -> None:
        with library_call(self._detected.name):
            rgb = self._converter.reformat(frame, format="rgb24", threads=1)
            picture = upright(rgb.to_ndarray(), _display_matrix(frame))
        if sampled.frames is None:
            height, width = size(total, *picture.shape[:2])
            sampled.frames = np.empty((total, 3, height, width), dtype=np.uint8)
        at = sampled.filled
        resize_into(picture, sampled.frames[at])
        sampled.frames[at + 1 : at + repeats] = sampled.frames[at]
        sampled.filled += repeats

    def _open(self) -> _Opened:
        return _Opened(self._data, self._detected, self._max_pixels, self._deadline)

    def _packets(self, container: Any, stream: Any) -> Iterator[Any]:
        """Packets with data, to the end or to the first that the demuxer cannot read."""
        packets = container.demux(stream)
        while True:
            self._deadline.check()
            try:
                packet = next(packets, None)
            except (av.error.FFmpegError, IndexError):
                # PyAV raises IndexError at the end of a transport stream that grew a stream after it was opened.
                return
            if packet is None:
                return
            if packet.size:
                yield packet

    def _frames(self, container: Any, stream: Any) -> Iterator[Any]:
        """Frames in shown order. A packet that does not decode is skipped: the frames around it still count."""
        for packet in self._packets(container, stream):
            try:
                yield from packet.decode()
            except av.error.FFmpegError:
                continue
        try:
            yield from stream.codec_context.decode(None)
        except av.error.FFmpegError:
            return


class _Opened:
    """An open container and its video stream, closed on exit."""

    def __init__(self, data: bytes | memoryview, detected: Detected, max_pixels: int, deadline: Deadline) -> None:
        name = detected.name
        with library_call(name):
            self._container: Any = av.open(
                WatchedBytes(data, deadline), format=detected.formats[0], options={"max_pixels": str(max_pixels)}
            )
        self._stream = _pick_stream(self._container, name)
        context = self._stream.codec_context
        check_pixels(context.width, context.height, max_pixels)
        if context.width == 0 or context.height == 0:
            raise undecodable(name, "its video stream has no size")
        context.options = {"max_pixels": str(max_pixels)}
        context.thread_type = "AUTO"
        context.thread_count = min(4, os.cpu_count() or 1)

    def __enter__(self) -> tuple[Any, Any]:
        return self._container, self._stream

    def __exit__(self, *exc: object) -> None:
        self._container.close()


def _pick_stream(container: Any, name: str) -> Any:
    """The first video stream marked default, else the first; cover art and thumbnails are none.

    Raises:
        FovealError: `unsupported_media` when there is none, or its codec is not read.
    """
    hidden = av.stream.Disposition.attached_pic | av.stream.Disposition.timed_thumbnails
    streams = [s for s in container.streams.video if not s.disposition & hidden]
    if not streams:
        raise unsupported(f"{name} without a video stream" + (" (audio only)" if container.streams.audio else ""))
    stream = next((s for s in streams if s.disposition & av.stream.Disposition.default), streams[0])
    codec = stream.codec_context.name if stream.codec_context is not None else "unknown"
    if codec not in CODECS:
        raise unsupported(f"{name} with {codec} video")
    return stream


def _display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """The signs of a, b, c, d of the frame's display matrix, x' = ax + cy, y' = bx + dy; (1, 0, 0, 1) without one."""
    try:
        matrix = np.frombuffer(bytes(frame.side_data["DISPLAYMATRIX"]), dtype=np.int32)
    except KeyError:
        return 1, 0, 0, 1
    a, b, c, d = (int(v) for v in np.sign(matrix[[0, 1, 3, 4]]))
    return a, b, c, d


def upright(picture: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """`picture` [H, W, 3] turned and mirrored as it is meant to be seen. Only right angles occur in practice; any
    other matrix leaves it as it is coded."""
    a, b, c, d = matrix
    if a == d == 0 and b and c:
        picture = picture.transpose(1, 0, 2)
        flip_x, flip_y = c < 0, b < 0
    elif b == c == 0 and a and d:
        flip_x, flip_y = a < 0, d < 0
    else:
        return picture
    return picture[:: -1 if flip_y else 1, :: -1 if flip_x else 1]


def refuse_cut_file(data: bytes | memoryview, detected: Detected) -> None:
    """Refuses a file whose own structure says that bytes are missing at its end.

    Raises:
        FovealError: `undecodable_media`.
    """
    end = {"mov": _mov_end, "matroska": _matroska_end, "avi": _avi_end}.get(detected.formats[0])
    claimed = end(data) if end else 0
    if claimed > len(data):
        raise undecodable(detected.name, f"it says it has {claimed} bytes, {len(data)} came")


def _mov_end(data: bytes | memoryview) -> int:
    """Where the last top-level box ends (ISO/IEC 14496-12, 4.2)."""
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1 and at + 16 <= len(data):
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8:  # 0 means to the end of the file; 2..7 cannot be.
            return len(data)
        at += size
    return at


def _avi_end(data: bytes | memoryview) -> int:
    """Where the first RIFF chunk ends; writers that stream leave 0 or all ones."""
    size = int.from_bytes(data[4:8], "little")
    return 0 if size in (0, 0xFFFFFFFF) else 8 + size


def _matroska_end(data: bytes | memoryview) -> int:
    """Where the segment ends (RFC 9559); live streams leave its size unknown."""
    at = 0
    while at < len(data):
        element, at = _ebml_number(data, at, keep_marker=True)
        size, at = _ebml_number(data, at, keep_marker=False)
        if element is None or size is None:
            return 0
        if element == 0x18538067:
            return at + size
        at += size
    return 0


def _ebml_number(data: bytes | memoryview, at: int, keep_marker: bool) -> tuple[int | None, int]:
    """A variable-length number at `at` and where it ends; None if unknown, cut or invalid (RFC 8794, 4)."""
    if at >= len(data) or data[at] == 0:
        return None, at
    length = 9 - data[at].bit_length()
    if at + length > len(data):
        return None, at
    value = int.from_bytes(data[at : at + length], "big")
    bits = (1 << 7 * length) - 1
    if not keep_marker:
        value &= bits
        if value == bits:
            return None, at + length
    return value, at + length
