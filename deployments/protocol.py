"""What the ingress sends to a replica and what comes back. Arrays travel by reference and arrive read-only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

import numpy as np

from encoder.budgets import PackLimits
from encoder.frames import frames_grid

PoolName = Literal["image", "video", "eager"]
Refusal = Literal["overloaded", "deadline", "cancelled", "internal", "fault"]


@dataclass(frozen=True)
class Size:
    """What one item takes of a batch's room: tokens, and segments (temporal patches)."""

    modality: Literal["image", "video"]
    tokens: int
    segments: int


@dataclass(frozen=True)
class EncodeItem:
    """One item to encode.

    frames: uint8 [T, 3, H, W], sides multiples of 32; T = 1 for an image.
    reason: why the router chose the eager pool; None for a graph pool.
    deadline: `time.time()` after which nobody waits for the answer; the item is then dropped, not encoded.
    waited_s: seconds that it waited in the ingress to be sent.
    id: by which it can be dropped while it waits.
    """

    modality: Literal["image", "video"]
    frames: np.ndarray
    main_only: bool = False
    pooling: Literal["none", "mean"] = "none"
    reason: str | None = None
    deadline: float | None = None
    waited_s: float = 0.0
    id: str = field(default_factory=lambda: uuid4().hex)

    @property
    def size(self) -> Size:
        t, h, w = frames_grid(self.frames.shape)
        return Size(self.modality, t * h * w // 4, t)


@dataclass(frozen=True)
class EncodeCall:
    """The items of one call, of any requests, at most what one batch takes.

    ingress: the replica that sends. tokens_behind: those that wait there for a call, this replica's share of them.
    """

    ingress: str
    items: list[EncodeItem]
    tokens_behind: int = 0


@dataclass(frozen=True)
class EncodeReply:
    """The items' results, in order, and which replica gave them."""

    replica: str
    results: list[EncodeResult]


@dataclass(frozen=True)
class EncodeResult:
    """One item's embeddings, or the error that befell this item alone.

    embeddings: [tokens, width] ([1, width] if pooled, [.., out_hidden_size] if main_only), float32, float16, or
        uint16 holding bfloat16 bits; None on error.
    dtype: the compute dtype's name: "float32", "bfloat16" or "float16".
    queue_s, encode_s: seconds waited in ingress and batcher; seconds from batch start to the embeddings on the host.
    error: "overloaded" (queue full), "deadline" (passed while it waited), "cancelled" (dropped while it waited),
        "internal" (this item cannot be encoded), "fault" (the replica is broken and about to be replaced; another may
        be asked), or None.
    """

    embeddings: np.ndarray | None
    dtype: str
    pool: PoolName
    execution: Literal["graph", "eager"] | None = None
    reason: str | None = None
    budget: int | None = None
    queue_s: float = 0.0
    encode_s: float = 0.0
    error: Refusal | None = None
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

    attention, linears: what runs the attention and the linear layers.
    width, main_width: columns of the embeddings, and of those of a `main_only` item.
    token_budgets: the captured budgets, ascending; empty in the eager pool.
    t_capture: temporal patches a video may have in a graph; None outside the video pool.
    limits: what one batch takes.
    calls, batches: calls received, batches run. lane_calls: those of the calls that came past Serve's handle.
    busy_s: seconds that the device has worked on batches.
    fault: why the replica must be replaced; None while it is well.
    """

    backend: str
    attention: str
    linears: str
    device: str
    dtype: str
    width: int
    main_width: int
    token_budgets: tuple[int, ...]
    t_capture: int | None
    limits: PackLimits
    calls: int = 0
    lane_calls: int = 0
    batches: int = 0
    busy_s: float = 0.0
    hits: int = 0
    misses: int = 0
    budget_tokens: int = 0
    used_tokens: int = 0
    queue: QueueState = field(default_factory=QueueState)
    fault: str | None = None

    def result_bytes(self, item: EncodeItem) -> int:
        """Of the item's embeddings."""
        rows = 1 if item.pooling == "mean" else item.size.tokens
        return rows * (self.main_width if item.main_only else self.width) * (4 if self.dtype == "float32" else 2)
