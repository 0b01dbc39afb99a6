"""What a model implements to be captured. After vLLM's encoder CUDA graph protocol, with segments and frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from encoder.defs import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    MmKwargs,
    Modality,
    Stop,
)
from encoder.graph import StaticBuffers


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """`mm_kwargs` holds one modality: its pixel input under the input key, its grids under `<modality>_grid_thw`."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig: ...

    def get_encoder_cudagraph_num_seqs(self, mm_kwargs: MmKwargs) -> int:
        """Attention segments of the batch: the sum of t."""
        ...

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: MmKwargs) -> list[EncoderItemSpec]:
        """Input patches, output tokens and segments of each item."""
        ...

    def get_encoder_cudagraph_max_item_seqs(self, modality: Modality) -> int:
        """Segments that one item may have in a graph; 0 means unchecked."""
        ...

    def select_encoder_cudagraph_items(self, mm_kwargs: MmKwargs, indices: Sequence[int]) -> MmKwargs:
        """The sub-batch of these items, in this order."""
        ...

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        modality: Modality = "image",
        static: StaticBuffers | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """Static inputs for exactly `token_budget` output tokens. `static` lends memory shared between budgets."""
        ...

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: MmKwargs, token_budget: int, max_batch_size: int
    ) -> EncoderCudaGraphReplayBuffers:
        """Metadata of the batch: float buffers for the used rows, integer buffers whole."""
        ...

    def write_encoder_cudagraph_input(self, mm_kwargs: MmKwargs, input_buffer: torch.Tensor) -> None:
        """Writes the batch's pixels into the leading rows of `input_buffer`."""
        ...

    def encoder_cudagraph_warmup(
        self, input_buffer: torch.Tensor, buffers: dict[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        """Runs every kernel of the forward at this shape, as cheaply as can be: what compiles or picks an algorithm at
        its first call must not do so during a capture. The result is not used."""
        ...

    def encoder_cudagraph_forward(
        self,
        input_buffer: torch.Tensor,
        buffers: dict[str, torch.Tensor],
        output: torch.Tensor,
        stop: Stop | None = None,
    ) -> None:
        """The captured callable: static inputs -> `output` [token_budget, out_hidden_size]. No host sync, no shape
        that depends on data; rows of padding may hold anything on entry and on exit.

        Raises:
            Stopped: `stop`, asked before each block, gave True; `output` is then half written. A capture gives none.
        """
        ...

    def encoder_eager_forward(self, mm_kwargs: MmKwargs, stop: Stop | None = None) -> torch.Tensor:
        """[sum of tokens, out_hidden_size], at the batch's exact shape.

        Raises:
            Stopped: `stop`, asked before each block, gave True.
        """
        ...
