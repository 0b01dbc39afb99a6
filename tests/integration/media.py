"""Media made for the tests, and the frames that an honest decoder finds in them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import av
import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Sample:
    """data: the file. frames: uint8 [T, H, W, 3], all frames that the service samples with its default options."""

    name: str
    modality: Literal["image", "video"]
    data: bytes
    frames: np.ndarray


def picture(width: int, height: int, seed: int) -> np.ndarray:
    """uint8 [H, W, 3]: smooth, and different for every seed."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 6, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def png(width: int, height: int, seed: int) -> Sample:
    return _still("PNG", width, height, seed)


def jpeg(width: int, height: int, seed: int) -> Sample:
    return _still("JPEG", width, height, seed)


def _still(kind: str, width: int, height: int, seed: int) -> Sample:
    pixels, file = picture(width, height, seed), io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    decoded = np.asarray(Image.open(io.BytesIO(file.getvalue())).convert("RGB"))
    return Sample(f"{kind.lower()} {width}x{height}", "image", file.getvalue(), decoded[None])


def webp_animation(width: int, height: int, frames: int, seed: int) -> Sample:
    """Lossless, two frames a second: every frame is sampled."""
    pixels, file = [picture(width, height, seed * 1000 + i) for i in range(frames)], io.BytesIO()
    first, *rest = map(Image.fromarray, pixels)
    first.save(file, "WEBP", save_all=True, append_images=rest, duration=500, lossless=True)
    return Sample(f"webp {frames} frames", "video", file.getvalue(), np.stack(pixels))


def mp4(width: int, height: int, frames: int, seed: int) -> Sample:
    """H.264, two frames a second: every frame is sampled."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(2))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(width, height, seed * 1000 + i), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with av.open(io.BytesIO(file.getvalue())) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return Sample(f"mp4 {frames} frames", "video", file.getvalue(), np.stack(decoded))
