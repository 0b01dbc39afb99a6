"""What media decoding takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Modality = Literal["image", "video"]


@dataclass(frozen=True)
class MediaOptions:
    """A request's options that change what is decoded; None means the checkpoint's own value."""

    modality: Literal["auto", "image", "video"] = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None


@dataclass(frozen=True)
class DecodedMedia:
    """One item, decoded, sampled and resized.

    frames: uint8 [T, 3, H, W], C-contiguous, RGB; T = 1 for an image. An odd T is not padded here: the encoder
        repeats the last frame when it makes patches.
    timestamps: float32 [t], seconds from the first shown frame, the mean of each frame pair; None for an image.
    """

    modality: Modality
    frames: np.ndarray
    timestamps: np.ndarray | None = None

    @property
    def num_frames(self) -> int:
        return int(self.frames.shape[0])

    @property
    def height(self) -> int:
        return int(self.frames.shape[2])

    @property
    def width(self) -> int:
        return int(self.frames.shape[3])
