"""What the ingress sends to a replica and what comes back. Arrays travel by reference and arrive read-only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

PoolName = Literal["image", "video", "eager"]


@dataclass(frozen=True)
class EncodeItem:
    """One item to encode.

    frames: uint8 [T, 3, H, W], sides multiples of 32; T = 1 for an image.
    reason: why the router chose the eager pool; None for a graph pool.
    deadline: `time.time()` after which nobody waits for the answer; the item is then dropped, not encoded.
    """

    modality: Literal["image", "video"]
    frames: np.ndarray
    main_only: bool = False
    pooling: Literal["none", "mean"] = "none"
    reason: str | None = None
    deadline: float | None = None


@dataclass(frozen=True)
class EncodeResult:
    """One item's embeddings, or the error that befell this item alone.

    embeddings: [tokens, width] ([1, width] if pooled, [.., out_hidden_size] if main_only), float32, float16, or
        uint16 holding bfloat16 bits; None on error.
    dtype: the compute dtype's name: "float32", "bfloat16" or "float16".
    queue_s, encode_s: seconds waited in the batcher; seconds from batch start to the embeddings on the host.
    error: a code ("overloaded", "deadline", "internal") or None.
    """

    embeddings: np.ndarray | None
    dtype: str
    pool: PoolName
    execution: Literal["graph", "eager"] | None = None
    reason: str | None = None
    budget: int | None = None
    queue_s: float = 0.0
    encode_s: float = 0.0
    error: str | None = None
    message: str = ""
