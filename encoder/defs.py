"""The data that runner, manager, model and captured graph exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

    from encoder.graph import CapturedGraph

Modality = Literal["image", "video"]
Execution = Literal["graph", "eager"]
Reason = Literal["t_over_capture", "tokens_over_budget", "batch_over_segments", "cheaper_eager"]
MmKwargs = Mapping[str, Any]
Stop = Callable[[], bool]


class Stopped(Exception):
    """A forward ended between two blocks because its `stop` said so; it has no result."""


@dataclass(frozen=True)
class EncodeRequest:
    """frames: uint8 [T, 3, H, W], sides multiples of 32. main_only: only the first out_hidden_size columns.
    pooling: "mean" gives one row, the mean over the item's tokens taken in float32."""

    frames: np.ndarray
    main_only: bool = False
    pooling: Literal["none", "mean"] = "none"


@dataclass(frozen=True)
class EncodeOutput:
    """embeddings: [rows, columns] float32 or float16, or uint16 that holds bfloat16 bits.
    has_nan: any of them is NaN."""

    embeddings: np.ndarray
    execution: Execution
    reason: str | None
    budget: int | None
    has_nan: bool = False


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """What the manager needs to know of a model.

    input_key: key of the pixel input, used where `modality_input_keys` is None or lacks the modality.
    buffer_keys: names of the metadata buffers, in the order in which they are written.
    out_hidden_size: the full width of an output row: main and all deepstack levels.
    """

    modalities: tuple[Modality, ...]
    input_key: str
    buffer_keys: tuple[str, ...]
    out_hidden_size: int
    modality_input_keys: Mapping[str, str] | None = None


@dataclass(frozen=True)
class EncoderItemSpec:
    """Sizes of one item: input patches, output tokens, attention segments (an item has `t` of them)."""

    num_patches: int
    num_tokens: int
    num_seqs: int


@dataclass(frozen=True)
class EncoderCudaGraphCaptureInputs:
    """Static inputs of one graph: pixels under the modality's input key, and every metadata buffer.

    max_num_seqs: segments that `cu_seqlens` has room for; 0 means unchecked.
    """

    mm_kwargs: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    max_num_seqs: int


@dataclass(frozen=True)
class EncoderCudaGraphReplayBuffers:
    """Metadata of one batch. A value of None leaves the captured buffer as it is.

    fits: False, with empty buffers, if the batch breaks a limit of the captured graphs.
    """

    buffers: dict[str, torch.Tensor | None]
    fits: bool = True


@dataclass
class BudgetGraphMetadata:
    """One captured graph with its static buffers. `output` is [token_budget, out_hidden_size]."""

    token_budget: int
    max_batch_size: int
    max_num_seqs: int
    graph: CapturedGraph
    input_buffer: torch.Tensor
    buffers: dict[str, torch.Tensor]
    output: torch.Tensor


@dataclass(frozen=True)
class ItemOutput:
    """One item's embeddings [tokens, columns] in the compute dtype on the device, and how they were made."""

    embeddings: torch.Tensor
    execution: Execution
    reason: Reason | None = None
    budget: int | None = None


@dataclass
class GraphStats:
    """Counters in items; `padding_ratio` is budget tokens replayed over tokens used."""

    hits: int = 0
    misses: int = 0
    replays: int = 0
    budget_tokens: int = 0
    used_tokens: int = 0
    hits_by_budget: dict[str, dict[int, int]] = field(default_factory=dict)
    misses_by_reason: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        total = self.hits + self.misses
        return self.hits / total if total else 0.0

    @property
    def padding_ratio(self) -> float | None:
        return self.budget_tokens / self.used_tokens if self.used_tokens else None
