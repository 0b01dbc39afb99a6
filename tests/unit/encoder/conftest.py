"""The tiny checkpoint, our tower of it, and the reference: `transformers`' own tower of the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder.checkpoint import load_vision_encoder, write_tiny_checkpoint
from encoder.qwen3_vl import Qwen3VLVisionEncoder

CPU = torch.device("cpu")
Grid = tuple[int, int, int]
Reference = Callable[[torch.Tensor, Sequence[Grid]], list[list[torch.Tensor]]]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Qwen3VLVisionEncoder:
    return load_vision_encoder(tiny_folder, CPU, torch.float32)


@pytest.fixture(scope="session")
def tiny_bfloat16(tiny_folder: Path) -> Qwen3VLVisionEncoder:
    return load_vision_encoder(tiny_folder, CPU, torch.bfloat16)


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> Reference:
    return reference_of(_reference_tower(tiny_folder, torch.float32))


@pytest.fixture(scope="session")
def reference_bfloat16(tiny_folder: Path) -> Reference:
    return reference_of(_reference_tower(tiny_folder, torch.bfloat16))


def _reference_tower(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    tower: torch.nn.Module = model.model.visual
    return tower


def reference_of(tower: Any) -> Reference:
    """(patches, grids) -> for each item the levels [main, deepstack 0, ...], each [tokens, out_hidden_size]."""

    @torch.inference_mode()
    def run(patches: torch.Tensor, grids: Sequence[Grid]) -> list[list[torch.Tensor]]:
        output = tower(patches.to(tower.dtype), torch.tensor(grids))
        sizes = [t * h * w // 4 for t, h, w in grids]
        levels = [output.pooler_output, *(output.deepstack_features or [])]
        return [list(item) for item in zip(*(level.split(sizes) for level in levels), strict=True)]

    return run


def make_patches(grids: Sequence[Grid], seed: int = 0) -> torch.Tensor:
    """Patches as normalised pixels are: within [-1, 1]."""
    rows = sum(t * h * w for t, h, w in grids)
    return torch.rand(rows, 1536, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def image_batch(grids: Sequence[Grid], seed: int = 0) -> dict[str, Any]:
    return {"pixel_values": make_patches(grids, seed), "image_grid_thw": torch.tensor(grids)}


def video_batch(grids: Sequence[Grid], seed: int = 0) -> dict[str, Any]:
    return {"pixel_values_videos": make_patches(grids, seed), "video_grid_thw": torch.tensor(grids)}


def batch_of(modality: str, grids: Sequence[Grid], seed: int = 0) -> dict[str, Any]:
    return (video_batch if modality == "video" else image_batch)(grids, seed)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def worst_level_error(rows: torch.Tensor, levels: Sequence[torch.Tensor]) -> float:
    """The largest relative error over the levels that `rows` [tokens, width] holds side by side."""
    width = levels[0].shape[1]
    assert rows.shape[1] == width * len(levels)
    return max(relative_error(rows[:, i * width : (i + 1) * width], level) for i, level in enumerate(levels))


def random_frames(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def reference_patches(folder: Path, modality: str, frames: np.ndarray, **options: Any) -> tuple[torch.Tensor, Grid]:
    """What `transformers`' own processor of the checkpoint makes of frames [T, 3, H, W] that need no resizing."""
    from transformers import AutoImageProcessor, AutoVideoProcessor

    options |= {"do_resize": False, "return_tensors": "pt", "input_data_format": "channels_first"}
    if modality == "image":
        output = AutoImageProcessor.from_pretrained(folder)(images=[frames[0]], **options)
        pixels, grid = output["pixel_values"], output["image_grid_thw"]
    else:
        processor = AutoVideoProcessor.from_pretrained(folder)
        output = processor(videos=[frames], do_sample_frames=False, **options)
        pixels, grid = output["pixel_values_videos"], output["video_grid_thw"]
    t, h, w = grid[0].tolist()
    return pixels, (t, h, w)
