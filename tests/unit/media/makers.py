"""Small files of every kind, made on the spot: pictures, animations and clips, and ways to damage them."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image


def scene(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [H, W, 3]: gradients, a block and some noise, so that turned or shifted pixels show."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x + 2 * y + 40 * seed) % 256], -1)
    picture[: max(height // 3, 1), : max(width // 4, 1)] = (250, 20 + seed * 7 % 200, 30)
    return np.clip(picture + rng.integers(-6, 7, picture.shape), 0, 255).astype(np.uint8)


def movie(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames that all differ: brightness names the frame, a bright column moves."""
    frames = []
    for i in range(count):
        frame = (scene(height, width) // 3 + (i * 37) % 150).astype(np.uint8)
        frame[:, (i * 3) % width : (i * 3) % width + 4] = 255
        frames.append(frame)
    return frames


def save(image: Image.Image | np.ndarray, format: str, **options: Any) -> bytes:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def animate(
    frames: Sequence[np.ndarray | Image.Image], format: str, duration: int | list[int], **options: Any
) -> bytes:
    images = [Image.fromarray(f) if isinstance(f, np.ndarray) else f for f in frames]
    return save(images[0], format, save_all=True, append_images=images[1:], duration=duration, **options)


def pillow_rgb(data: bytes, **options: Any) -> np.ndarray:
    """What transformers' loader makes of a still: Pillow's `convert("RGB")`."""
    return np.asarray(Image.open(io.BytesIO(data), **options).convert("RGB"))


# JPEG


def jpeg_without(data: bytes, marker: int) -> bytes:
    """Drops every segment with this marker byte."""
    out, at = bytearray(data[:2]), 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] != marker:
            out += data[at:end]
        at = end
    return bytes(out + data[at:])


def jpeg_frame_header(data: bytes) -> int:
    """Offset of the SOF0..SOF2 marker."""
    at = 2
    while data[at + 1] not in (0xC0, 0xC1, 0xC2):
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def patch(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def progressive_bomb(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last, nearly empty scan is repeated: each costs a pass over all coefficients."""
    data = save(np.zeros((side, side, 3), np.uint8), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * scans + data[-2:]


# PNG


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(rows: np.ndarray, depth: int, colour: int, extra: bytes = b"", size: tuple[int, int] | None = None) -> bytes:
    """A PNG from samples [H, W, C] (uint8 or uint16), unfiltered. `size` (w, h) may lie."""
    height, width = rows.shape[:2]
    packed = rows.astype(">u2") if depth == 16 else rows.astype(np.uint8)
    raw = b"".join(b"\0" + packed[y].tobytes() for y in range(height))
    claimed = size or (width, height)
    header = struct.pack(">IIBBBBB", *claimed, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + extra
        + png_chunk(b"IDAT", zlib.compress(raw))
        + png_chunk(b"IEND", b"")
    )


def png_interlaced(rgb: np.ndarray) -> bytes:
    """Adam7."""
    height, width = rgb.shape[:2]
    raw = b""
    for x0, y0, dx, dy in (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ):
        part = rgb[y0::dy, x0::dx]
        if part.size:
            raw += b"".join(b"\0" + row.tobytes() for row in part)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(raw))
        + png_chunk(b"IEND", b"")
    )


def png_set_chunk(data: bytes, kind: bytes, at: int, new: bytes) -> bytes:
    """Overwrites bytes of the first chunk of that kind and mends its checksum."""
    start = data.index(kind) + 4
    length = int.from_bytes(data[start - 8 : start - 4], "big")
    body = patch(data[start : start + length], at, new)
    return data[: start - 8] + png_chunk(kind, body) + data[start + length + 4 :]


# GIF


class GifFrame:
    """Palette indices [h, w] at (left, top), shown for `delay` hundredths of a second."""

    def __init__(
        self,
        pixels: np.ndarray,
        left: int = 0,
        top: int = 0,
        delay: int = 10,
        disposal: int = 0,
        clear: int | None = None,
    ) -> None:
        self.pixels, self.left, self.top = pixels, left, top
        self.delay, self.disposal, self.clear = delay, disposal, clear


def gif(size: tuple[int, int], palette: np.ndarray, frames: Sequence[GifFrame], trailer: bytes = b";") -> bytes:
    """GIF89a, `palette` [256, 3], frames coded without compression (a clear code before the table grows)."""
    out = b"GIF89a" + struct.pack("<HHBBB", *size, 0xF7, 0, 0) + palette.astype(np.uint8).tobytes()
    for frame in frames:
        height, width = frame.pixels.shape
        flags = frame.disposal << 2 | (frame.clear is not None)
        out += b"\x21\xf9\x04" + struct.pack("<BHBB", flags, frame.delay, frame.clear or 0, 0)
        out += b"," + struct.pack("<HHHHB", frame.left, frame.top, width, height, 0) + b"\x08"
        codes: list[int] = []
        for i, value in enumerate(frame.pixels.reshape(-1).tolist()):
            if i % 200 == 0:
                codes.append(256)
            codes.append(value)
        bits = "".join(f"{code:09b}"[::-1] for code in [*codes, 257])
        body = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
        out += b"".join(bytes([len(body[i : i + 255])]) + body[i : i + 255] for i in range(0, len(body), 255)) + b"\0"
    return out + trailer


# Clips


# SVT-AV1 writes its settings to the terminal otherwise.
os.environ.setdefault("SVT_LOG", "1")
FAST = {
    "libvpx": {"cpu-used": "5"},
    "libvpx-vp9": {"cpu-used": "8", "row-mt": "0"},
    "libx265": {"x265-params": "log-level=none:pools=none:frame-threads=1", "preset": "ultrafast"},
    "libsvtav1": {"preset": "12", "svtav1-params": "lp=1"},
}


def clip(
    frames: Sequence[np.ndarray],
    format: str,
    codec: str,
    rate: int | Fraction = 30,
    pix_fmt: str = "yuv420p",
    stamps: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    muxer: dict[str, str] | None = None,
    sample_aspect: Fraction | None = None,
    sink: Any = None,
    **options: str,
) -> bytes:
    """Encodes RGB frames; `stamps` in `time_base` (default: frame numbers at `rate`)."""
    out = sink if sink is not None else io.BytesIO()
    with av.open(out, "w", format=format, options=muxer or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        # One thread: encoders that spin for each other take minutes on a busy machine.
        stream.options = {"threads": "1", **FAST.get(codec, {}), **options}
        if time_base is not None:
            stream.codec_context.time_base = time_base
        if sample_aspect is not None:
            stream.codec_context.sample_aspect_ratio = sample_aspect
        _encode(container, stream, frames, rate, stamps, time_base)
    return out.getvalue()


def _encode(
    container: Any,
    stream: Any,
    frames: Sequence[np.ndarray],
    rate: int | Fraction,
    stamps: Sequence[int] | None = None,
    time_base: Fraction | None = None,
) -> None:
    for i, array in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(array, format="rgb24")
        frame.pts = i if stamps is None else stamps[i]
        frame.time_base = time_base or 1 / Fraction(rate)
        for packet in stream.encode(frame):
            container.mux(packet)
    for packet in stream.encode():
        container.mux(packet)


def sound(format: str, codec: str) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        stream = container.add_stream(codec, rate=44100)
        _encode_sound(container, stream)
    return out.getvalue()


def _encode_sound(container: Any, stream: Any) -> None:
    tone = (np.sin(np.arange(44100) / 20) * 8000).astype(np.int16)
    frame = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
    frame.rate, frame.pts, frame.time_base = 44100, 0, Fraction(1, 44100)
    for part in av.AudioResampler(stream.format.name, stream.layout, 44100, stream.frame_size or 1024).resample(frame):
        for packet in stream.encode(part):
            container.mux(packet)
    for packet in stream.encode():
        container.mux(packet)


def two_streams(first: Sequence[np.ndarray], second: Sequence[np.ndarray], default: int | None) -> bytes:
    """A Matroska file with two video streams, of which number `default` is marked."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        streams = []
        for index, frames in enumerate((first, second)):
            stream = container.add_stream("libx264", rate=30)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt = "yuv420p"
            stream.options = {"threads": "1"}
            stream.disposition = av.stream.Disposition.default.value if index == default else 0
            streams.append(stream)
        for stream, frames in zip(streams, (first, second), strict=True):
            _encode(container, stream, frames, 30)
    return out.getvalue()


def with_cover(cover: np.ndarray, frames: Sequence[np.ndarray] | None) -> bytes:
    """An MP4 with attached cover art, a sound track and, if given, a clip."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        video = None
        art = container.add_stream("mjpeg", rate=1)
        art.height, art.width = cover.shape[:2]
        art.pix_fmt = "yuvj420p"
        art.disposition = av.stream.Disposition.attached_pic.value
        audio = container.add_stream("aac", rate=44100)
        if frames is not None:
            video = container.add_stream("libx264", rate=30)
            video.height, video.width = frames[0].shape[:2]
            video.pix_fmt = "yuv420p"
            video.options = {"threads": "1"}
        _encode(container, art, [cover], 1)
        if video is not None and frames is not None:
            _encode(container, video, frames, 30)
        _encode_sound(container, audio)
    return out.getvalue()


def index_first(data: bytes) -> bytes:
    """Moves an MP4's `moov` before its `mdat` and mends the chunk offsets (ISO/IEC 14496-12, 8.7.5)."""
    boxes, at = {}, 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        boxes[data[at + 4 : at + 8]] = data[at : at + size]
        at += size
    moov = bytearray(boxes[b"moov"])
    table = moov.index(b"stco")
    while table != -1:
        count = int.from_bytes(moov[table + 8 : table + 12], "big")
        for entry in range(table + 12, table + 12 + 4 * count, 4):
            moved = int.from_bytes(moov[entry : entry + 4], "big") + len(moov)
            moov[entry : entry + 4] = moved.to_bytes(4, "big")
        table = moov.find(b"stco", table + 4)
    return boxes[b"ftyp"] + bytes(moov) + boxes.get(b"free", b"") + boxes[b"mdat"]


class NoSeek(io.BytesIO):
    """A sink that cannot go back: a muxer then leaves lengths and durations unknown."""

    def seekable(self) -> bool:
        return False


def decoded(data: bytes, demuxer: str, stream: int = 0) -> tuple[list[np.ndarray], list[int | None], Fraction]:
    """Every frame as transformers' PyAV loader has it, its time stamps and their base; damaged packets are skipped."""
    frames: list[np.ndarray] = []
    stamps: list[int | None] = []
    with av.open(io.BytesIO(data), format=demuxer) as container:
        video = container.streams.video[stream]
        base = Fraction(video.time_base)
        for packet in container.demux(video):
            try:
                for frame in packet.decode():
                    frames.append(frame.to_ndarray(format="rgb24", threads=1))
                    stamps.append(frame.pts)
            except av.error.InvalidDataError:
                continue
    return frames, stamps, base


def display_matrix(data: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """Sets the 2x2 part of an MP4's track matrix (ISO/IEC 14496-12, 8.3.2)."""
    at = data.index(b"tkhd")
    at += 4 + 4 + (32 if data[at + 4] else 20) + 16
    return patch(data, at, struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30))


def box_field(data: bytes, box: bytes, offset: int, value: int, size: int = 4) -> bytes:
    """Overwrites a big-endian number `offset` bytes into the payload of the first box of that type."""
    return patch(data, data.index(box) + 4 + offset, value.to_bytes(size, "big"))
