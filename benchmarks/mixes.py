"""Requests of several kinds, made by script and the same on every machine for one seed."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from PIL import Image

from benchmarks.load import Request

BOUNDARY = "----foveal-load"
SMALL = "min_pixels=50176"  # without it the processor makes 256^2 of 224^2


@dataclass(frozen=True)
class Medium:
    """One file. query: the options it is sent with."""

    kind: str
    data: bytes
    query: str = ""


@dataclass(frozen=True)
class Mix:
    """requests: distinct ones. order: in which they are sent, over and over. media: the files in them, for what runs
    without HTTP."""

    name: str
    requests: Sequence[Request]
    order: Sequence[int]
    media: Sequence[Medium]


class Canvas:
    """A large picture with the detail of a photograph, noise at three scales, of which every photo is a cutting."""

    SIDE = 2560

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        layers = []
        for scale, strength in ((64, 0.6), (8, 0.3), (1, 0.1)):
            small = rng.integers(0, 256, (self.SIDE // scale, self.SIDE // scale, 3), dtype=np.uint8)
            layer = Image.fromarray(small).resize((self.SIDE, self.SIDE), Image.Resampling.BICUBIC)
            layers.append(np.asarray(layer, dtype=np.float32) * strength)
        self._pixels = np.clip(sum(layers), 0, 255).astype(np.uint8)

    def cut(self, x: int, y: int, width: int, height: int) -> np.ndarray:
        return np.ascontiguousarray(self._pixels[y : y + height, x : x + width])

    def photo(self, generator: random.Random, width: int, height: int) -> bytes:
        x, y = generator.randrange(self.SIDE - width), generator.randrange(self.SIDE - height)
        out = io.BytesIO()
        Image.fromarray(self.cut(x, y, width, height)).save(out, "JPEG", quality=90)
        return out.getvalue()

    def frames(self, generator: random.Random, width: int, height: int, count: int) -> list[np.ndarray]:
        """A camera that pans over the picture, a few pixels a frame."""
        x, y = generator.randrange(self.SIDE - width - 4 * count), generator.randrange(self.SIDE - height - 4 * count)
        return [self.cut(x + 4 * i, y + 2 * i, width, height) for i in range(count)]


def clip(frames: Sequence[np.ndarray], fps: int) -> bytes:
    """H.264 in MP4."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.options = "yuv420p", {"preset": "veryfast", "crf": "26"}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def animation(frames: Sequence[np.ndarray], fps: int) -> bytes:
    """WebP, for where PyAV is missing."""
    first, *rest = map(Image.fromarray, frames)
    out = io.BytesIO()
    duration = 1000 // fps
    first.save(out, "WEBP", save_all=True, append_images=rest, duration=duration, quality=70, method=0)
    return out.getvalue()


class Media:
    """Makes what the mixes are made of. clips: PyAV is there; else videos are animations at the rate of sampling.

    video: (side, seconds) of the clips.
    """

    FPS = 8

    def __init__(self, video: tuple[int, int], clips: bool = True, seed: int = 0) -> None:
        self._canvas = Canvas(seed)
        self._random = random.Random(seed)
        self._video, self._clips = video, clips

    def photos(self, count: int, width: int, height: int, query: str = "") -> list[Medium]:
        kind = f"photo {width}x{height}"
        return [Medium(kind, self._canvas.photo(self._random, width, height), query) for _ in range(count)]

    def videos(self, count: int) -> list[Medium]:
        side, seconds = self._video
        fps = self.FPS if self._clips else 2
        encode: Callable[[Sequence[np.ndarray], int], bytes] = clip if self._clips else animation
        kind = f"video {seconds} s {side}x{side}"
        return [
            Medium(kind, encode(self._canvas.frames(self._random, side, side, seconds * fps), fps))
            for _ in range(count)
        ]


def make_mix(name: str, media: Media, scale: float = 1.0) -> Mix:
    """A mix by its name; `scale` multiplies the number of distinct files."""

    def some(count: int) -> int:
        return max(2, round(count * scale))

    generator = random.Random(name)
    if name in ("photo224", "photo224x16"):
        files = media.photos(some(512), 224, 224, SMALL)
        if name == "photo224":
            return _mix(name, [raw(m) for m in files], files)
        groups = [generator.sample(files, min(16, len(files))) for _ in range(some(64))]
        return _mix(name, [multipart([m.data for m in g], SMALL) for g in groups], files)
    if name == "photo1024":
        files = media.photos(some(64), 1024, 1024)
        return _mix(name, [raw(m) for m in files], files)
    if name == "video":
        files = media.videos(some(32))
        return _mix(name, [raw(m) for m in files], files)
    if name == "chat":
        files = [
            *media.photos(some(20), 224, 224),
            *media.photos(some(70), 512, 384),
            *media.photos(some(60), 768, 576),
            *media.photos(some(40), 1024, 768),
            *media.videos(some(10)),
        ]
        generator.shuffle(files)
        # Three of ten requests repeat one of a few recent files, as a conversation does that goes on.
        order, fresh = [], 0
        for _ in range(16 * len(files)):
            if generator.random() < 0.3:
                order.append((fresh - generator.randrange(1, 9)) % len(files))
            else:
                order.append(fresh % len(files))
                fresh += 1
        return Mix(name, [raw(m) for m in files], order, files)
    raise ValueError(f"no mix is called {name!r}")


def _mix(name: str, requests: list[Request], files: list[Medium]) -> Mix:
    return Mix(name, requests, range(len(requests)), files)


def raw(medium: Medium) -> Request:
    """The file as the body."""
    return _request(medium.kind, medium.data, "application/octet-stream", medium.query, 1)


def multipart(files: Sequence[bytes], query: str) -> Request:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{i}"\r\n\r\n'.encode() + data + b"\r\n"
        for i, data in enumerate(files)
    ]
    body = b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
    kind = f"{len(files)} photos"
    return _request(kind, body, f"multipart/form-data; boundary={BOUNDARY}", query, len(files))


def _request(kind: str, body: bytes, content_type: str, query: str, items: int) -> Request:
    head = (
        f"POST /v1/encode{'?' if query else ''}{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return Request(kind, head.encode(), body, items)
