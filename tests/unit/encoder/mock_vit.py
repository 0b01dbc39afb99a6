"""A small vision model whose answer is easy to compute by hand, to test the manager without a real tower."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from encoder.defs import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    MmKwargs,
    Modality,
    Stop,
    Stopped,
)
from encoder.graph import StaticBuffers

MERGE, CHANNELS, WIDTH = 2, 6, 5
KEYS: dict[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
Grid = tuple[int, int, int]


class SimpleMockViTModel:
    """Rows are scaled by their item's area, lose the mean of their segment, are averaged over each merge block and
    projected to `WIDTH` columns. So an answer depends on the pixels, on the float buffer and on the segment bounds.

    Args:
        modality_keys: the config's `modality_input_keys`; None makes every modality use `pixel_values`.
        check_segments: False captures with `max_num_seqs=0`.
        keep: buffers that a replay gives as None.
    """

    def __init__(
        self,
        modalities: Sequence[Modality] = ("image", "video"),
        modality_keys: Mapping[str, str] | None = KEYS,
        t_capture: int = 8,
        check_segments: bool = True,
        keep: Sequence[str] = (),
    ) -> None:
        self.modalities, self.modality_keys = tuple(modalities), modality_keys
        self.t_capture, self.check_segments, self.keep = t_capture, check_segments, tuple(keep)
        self.weight = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(7))
        self.captured: list[tuple[str, int]] = []
        self.eager_grids: list[list[Grid]] = []
        self.forward_rows: list[int] = []
        self.refuse = False

    # --- the protocol ---

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            self.modalities, "pixel_values", ("scale", "cu_seqlens"), WIDTH, modality_input_keys=self.modality_keys
        )

    def get_encoder_cudagraph_num_seqs(self, mm_kwargs: MmKwargs) -> int:
        return sum(t for t, _, _ in self._grids(mm_kwargs))

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: MmKwargs) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(t * h * w, t * h * w // 4, t) for t, h, w in self._grids(mm_kwargs)]

    def get_encoder_cudagraph_max_item_seqs(self, modality: Modality) -> int:
        if not self.check_segments:
            return 0
        return self.t_capture if modality == "video" else 1

    def select_encoder_cudagraph_items(self, mm_kwargs: MmKwargs, indices: Sequence[int]) -> MmKwargs:
        grids = self._grids(mm_kwargs)
        parts = self._pixels(mm_kwargs).split([t * h * w for t, h, w in grids])
        modality = self._modality(mm_kwargs)
        return {
            (self.modality_keys or {}).get(modality, "pixel_values"): torch.cat([parts[i] for i in indices]),
            f"{modality}_grid_thw": [grids[i] for i in indices],
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        modality: Modality = "image",
        static: StaticBuffers | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        self.captured.append((modality, token_budget))
        rows, seqs = token_budget * MERGE**2, max_batch_size * (self.t_capture if modality == "video" else 1)
        buffers = {
            "scale": torch.full((rows,), 3.0, dtype=dtype, device=device),
            "cu_seqlens": torch.zeros(seqs + 1, dtype=torch.int32, device=device),
        }
        pixels = torch.zeros(rows, CHANNELS, dtype=dtype, device=device)
        key = (self.modality_keys or {}).get(modality, "pixel_values")
        return EncoderCudaGraphCaptureInputs({key: pixels}, buffers, seqs if self.check_segments else 0)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: MmKwargs, token_budget: int, max_batch_size: int
    ) -> EncoderCudaGraphReplayBuffers:
        if self.refuse:
            return EncoderCudaGraphReplayBuffers({}, fits=False)
        grids = self._grids(mm_kwargs)
        scale, bounds = self._metadata(grids)
        seqs = max_batch_size * (self.t_capture if self._modality(mm_kwargs) == "video" else 1)
        padded = torch.cat((bounds, bounds[-1:].expand(max(seqs + 1 - len(bounds), 0))))
        values = {"scale": scale, "cu_seqlens": padded}
        return EncoderCudaGraphReplayBuffers({n: None if n in self.keep else v for n, v in values.items()})

    def write_encoder_cudagraph_input(self, mm_kwargs: MmKwargs, input_buffer: torch.Tensor) -> None:
        pixels = self._pixels(mm_kwargs)
        input_buffer[: len(pixels)].copy_(pixels)

    def encoder_cudagraph_warmup(
        self, input_buffer: torch.Tensor, buffers: dict[str, torch.Tensor], output: torch.Tensor
    ) -> None:
        self.encoder_cudagraph_forward(input_buffer, buffers, output)

    def encoder_cudagraph_forward(
        self,
        input_buffer: torch.Tensor,
        buffers: dict[str, torch.Tensor],
        output: torch.Tensor,
        stop: Stop | None = None,
    ) -> None:
        if stop is not None and stop():
            raise Stopped
        self.forward_rows.append(len(input_buffer))
        x = input_buffer * buffers["scale"][:, None]
        bounds = buffers["cu_seqlens"].tolist()
        for start, end in itertools.pairwise(bounds):
            if end > start:
                x[start:end] -= x[start:end].mean(0)
        output.copy_(x.view(-1, MERGE**2, CHANNELS).mean(1) @ self.weight)

    def encoder_eager_forward(self, mm_kwargs: MmKwargs, stop: Stop | None = None) -> torch.Tensor:
        grids = self._grids(mm_kwargs)
        self.eager_grids.append(grids)
        scale, bounds = self._metadata(grids)
        output = torch.empty(sum(t * h * w for t, h, w in grids) // 4, WIDTH)
        self.encoder_cudagraph_forward(self._pixels(mm_kwargs), {"scale": scale, "cu_seqlens": bounds}, output, stop)
        return output

    # --- for tests ---

    def batch(self, grids: Sequence[Grid], modality: Modality = "image", seed: int = 0) -> dict[str, object]:
        rows = sum(t * h * w for t, h, w in grids)
        pixels = torch.randn(rows, CHANNELS, generator=torch.Generator().manual_seed(seed))
        key = (self.modality_keys or {}).get(modality, "pixel_values")
        return {key: pixels, f"{modality}_grid_thw": list(grids)}

    def expected(self, mm_kwargs: MmKwargs, scale: float | None = None) -> list[torch.Tensor]:
        """Each item by itself, by another way than the model: frames as a leading dimension, no bounds."""
        grids, answers = self._grids(mm_kwargs), []
        for pixels, (t, h, w) in zip(
            self._pixels(mm_kwargs).split([t * h * w for t, h, w in grids]), grids, strict=True
        ):
            frames = pixels.double().view(t, h * w, CHANNELS) * (_area(h, w) if scale is None else scale)
            frames = frames - frames.mean(1, keepdim=True)
            tokens = frames.view(-1, MERGE**2, CHANNELS).mean(1) @ self.weight.double()
            answers.append(tokens.float())
        return answers

    def _modality(self, mm_kwargs: MmKwargs) -> Modality:
        return "video" if "video_grid_thw" in mm_kwargs else "image"

    def _grids(self, mm_kwargs: MmKwargs) -> list[Grid]:
        grids: list[Grid] = mm_kwargs[f"{self._modality(mm_kwargs)}_grid_thw"]
        return grids

    def _pixels(self, mm_kwargs: MmKwargs) -> torch.Tensor:
        pixels: torch.Tensor = mm_kwargs[(self.modality_keys or {}).get(self._modality(mm_kwargs), "pixel_values")]
        return pixels

    def _metadata(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.cat([torch.full((t * h * w,), _area(h, w)) for t, h, w in grids])
        lengths = [0] + [h * w for t, h, w in grids for _ in range(t)]
        return scale, torch.tensor(lengths).cumsum(0).to(torch.int32)


def _area(h: int, w: int) -> float:
    return 1 + h * w / 16
