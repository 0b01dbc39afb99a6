"""Towers of real width on the GPU, the reference beside them, and helpers that the tests share."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.encoder import TOWERS, build_encoder, build_reference, cast_reference, level_errors, reference_levels
from encoder.budgets import CostTable
from encoder.defs import BudgetGraphMetadata, Modality
from encoder.manager import EncoderCudaGraphManager
from encoder.preprocess import patchify
from encoder.qwen3_vl import Qwen3VLVisionEncoder

DEVICE = torch.device("cuda")
FULL: dict[str, Any] = TOWERS["full"]
# Real width, so that every kernel runs at its real shape, but two blocks: for tests of many forwards.
SHALLOW: dict[str, Any] = FULL | {"depth": 2, "deepstack_visual_indexes": [0]}
MODALITIES: tuple[Modality, ...] = ("image", "video")
Grid = tuple[int, int, int]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _without_gradients_or_tf32() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    kept = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    with torch.no_grad():
        yield
    matmul.allow_tf32, cudnn.allow_tf32 = kept


@dataclass
class Towers:
    """Ours and `transformers`' over the same weights, and theirs in float32."""

    ours: Qwen3VLVisionEncoder
    theirs: Any
    exact: Any

    def expected(self, frames: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Levels in float32, of all items."""
        return self._levels(self.exact, frames, grids)

    def their_errors(
        self, frames: Sequence[torch.Tensor], grids: Sequence[Grid], expected: list[torch.Tensor]
    ) -> list[float]:
        """The reference's own errors in the dtype of the weights, a value a level."""
        return level_errors(self._levels(self.theirs, frames, grids), expected)

    def _levels(self, tower: Any, frames: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        half = torch.full((3,), 127.5, device=DEVICE)
        patches = torch.cat([patchify(f, half, half) for f in frames])
        return reference_levels(tower, patches, torch.tensor(grids, device=DEVICE))


def make_towers(vision_config: dict[str, Any], dtype: torch.dtype) -> Towers:
    with torch.no_grad():
        exact = build_reference(vision_config, DEVICE, dtype)
        theirs = build_reference(vision_config, DEVICE, dtype)
        ours = build_encoder(vision_config, theirs.state_dict(), DEVICE, dtype)
        return Towers(ours, theirs, cast_reference(exact, torch.float32))


@pytest.fixture(scope="session")
def full() -> Towers:
    return make_towers(FULL, torch.bfloat16)


@pytest.fixture(scope="session")
def shallow() -> Towers:
    return make_towers(SHALLOW, torch.bfloat16)


def make_manager(
    encoder: Qwen3VLVisionEncoder, budgets: Sequence[int], max_batch_size: int = 16
) -> EncoderCudaGraphManager:
    """Costs are by size, so that what fits a graph runs in one."""
    costs = dict.fromkeys(MODALITIES, CostTable.by_size(budgets))
    manager = EncoderCudaGraphManager(
        encoder, {m: list(budgets) for m in MODALITIES}, max_batch_size, DEVICE, encoder.dtype, costs
    )
    manager.capture()
    return manager


def make_frames(grids: Sequence[Grid], seed: int = 0) -> list[torch.Tensor]:
    """Random uint8 frames [T, 3, H, W] of these grids, on the device."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (t if t == 1 else 2 * t, 3, h * 16, w * 16), dtype=torch.uint8, generator=generator).to(
            DEVICE
        )
        for t, h, w in grids
    ]


def batch_of(modality: Modality, grids: Sequence[Grid], seed: int = 0) -> dict[str, Any]:
    key = "pixel_values_videos" if modality == "video" else "pixel_values"
    return {key: make_frames(grids, seed), f"{modality}_grid_thw": list(grids)}


def shape_of(modality: Modality, tokens: int) -> Grid:
    """A grid of exactly so many tokens, a power of two: as square as can be, over 8 temporal patches of a video."""
    t = min(8, tokens) if modality == "video" else 1
    exponent = (tokens // t).bit_length() - 1
    assert t << exponent == tokens
    return t, 2 << (exponent // 2), 2 << (exponent - exponent // 2)


def poison(graph: BudgetGraphMetadata, integer: int = -123456) -> None:
    """NaN into every static float of the graph, its output too, and `integer` into every static integer."""
    for tensor in (graph.input_buffer, graph.output, *graph.buffers.values()):
        tensor.fill_(float("nan") if tensor.is_floating_point() else integer)


def level_rows(rows: torch.Tensor, encoder: Qwen3VLVisionEncoder) -> list[torch.Tensor]:
    """[main, deepstack 0, ...] of rows [tokens, width]."""
    return list(rows.split(encoder.config.out_hidden_size, dim=1))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def worst_row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any one row; NaN if any value is NaN."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).norm(dim=1)
    return float((difference / expected.double().norm(dim=1)).max())


def assert_close_in_bfloat16(
    rows: torch.Tensor, eager: torch.Tensor, encoder: Qwen3VLVisionEncoder, label: object = ""
) -> None:
    """Two runs of the tower whose products were tiled differently: each level, and each row of it."""
    for level, (a, b) in enumerate(zip(level_rows(rows, encoder), level_rows(eager, encoder), strict=True)):
        assert relative_error(a, b) < 0.03, (label, level)
        assert worst_row_error(a, b) < 0.15, (label, level)


def device_bytes() -> tuple[int, int]:
    """Bytes in tensors, and bytes that the process holds of the device, once what is free has been given back."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free


def bounds_of(lengths: Sequence[int], empty: int = 0) -> torch.Tensor:
    """cu_seqlens of these segments and of `empty` more, on the device."""
    bounds = [0, *itertools.accumulate(lengths)]
    return torch.tensor(bounds + bounds[-1:] * empty, dtype=torch.int32, device=DEVICE)
