"""What a response format is given and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from deployments.protocol import PoolName


@dataclass(frozen=True)
class EncodedItem:
    """One item of the answer.

    embeddings: [rows, columns], float32, float16, or uint16 holding bfloat16 bits, as `dtype` says; None once they
        are in the store. shape: theirs, wherever they are.
    timestamps: float32 [t], seconds; None for an image.
    num_tokens: visual tokens of the item, whether pooled or not. num_frames, width, height: of what was encoded.
    hash: the item's name in the store; None if it is delivered inline. stored: "new" if this request had it encoded,
        "hit" if it was there, and pool, execution, reason and budget tell how it was encoded then.
    """

    index: int
    modality: Literal["image", "video"]
    grid_thw: tuple[int, int, int]
    timestamps: np.ndarray | None
    embeddings: np.ndarray | None
    shape: tuple[int, int]
    dtype: str
    pool: PoolName
    execution: Literal["graph", "eager"]
    reason: str | None
    budget: int | None
    num_tokens: int
    num_frames: int
    width: int
    height: int
    hash: str | None = None
    stored: Literal["hit", "new"] | None = None

    def facts(self) -> dict[str, Any]:
        """The fields that every format tells, JSON-able. Of an item in the store also what its tensor would tell."""
        names = ["index", "modality", "pool", "execution", "reason", "budget", "num_tokens", "num_frames"]
        names += ["width", "height"]
        if self.hash is None:
            return {name: getattr(self, name) for name in names}
        names += ["hash", "stored", "dtype"]
        return {**{name: getattr(self, name) for name in names}, "shape": list(self.shape)}

    def arrays(self) -> dict[str, Any]:
        """The facts, and the arrays as they are: what a call through a Serve handle is answered with.

        `grid_thw` int64 [3], `timestamps` float32 [t] of a video, `dtype`, and unless stored `embeddings`
        [rows, columns], bfloat16 as its bits in uint16.
        """
        told = {**self.facts(), "dtype": self.dtype, "grid_thw": np.array(self.grid_thw, np.int64)}
        arrays = {"timestamps": self.timestamps, "embeddings": self.embeddings}
        return told | {name: array for name, array in arrays.items() if array is not None}


@dataclass(frozen=True)
class Rendered:
    """A response body as pieces that are made when they are sent. `length` is their sum in bytes."""

    media_type: str
    length: int
    pieces: Iterable[bytes | memoryview]


Render = Callable[[str, Sequence[EncodedItem]], Rendered]
