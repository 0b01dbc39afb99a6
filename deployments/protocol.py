"""What the ingress sends to a replica and what comes back. Arrays travel by reference and arrive read-only."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    error: "overloaded" (queue full), "deadline" (passed while it waited), "internal" (this item cannot be encoded),
        "fault" (the replica is broken and about to be replaced; another may be asked), or None.
    """

    embeddings: np.ndarray | None
    dtype: str
    pool: PoolName
    execution: Literal["graph", "eager"] | None = None
    reason: str | None = None
    budget: int | None = None
    queue_s: float = 0.0
    encode_s: float = 0.0
    error: Literal["overloaded", "deadline", "internal", "fault"] | None = None
    message: str = ""


@dataclass(frozen=True)
class QueueState:
    """What waits in one replica's batcher, and what left it without being encoded, in items."""

    items: int = 0
    tokens: int = 0
    bytes: int = 0
    cancelled: int = 0
    expired: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class ReplicaState:
    """What one replica is and what it has done. Counters are in items; tokens as in `GraphStats`.

    token_budgets: the captured budgets, ascending; empty in the eager pool.
    t_capture: temporal patches a video may have in a graph; None outside the video pool.
    fault: why the replica must be replaced; None while it is well.
    """

    backend: str
    attention: str
    device: str
    dtype: str
    token_budgets: tuple[int, ...]
    t_capture: int | None
    max_batch_size: int
    hits: int = 0
    misses: int = 0
    budget_tokens: int = 0
    used_tokens: int = 0
    queue: QueueState = field(default_factory=QueueState)
    fault: str | None = None
