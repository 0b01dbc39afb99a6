"""Patches against the reference's own processors, and the order of a patch's values by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder.frames import check_frames, frames_grid
from encoder.preprocess import patchify
from tests.unit.encoder.conftest import random_frames, reference_patches

HALF = torch.full((3,), 127.5)


@pytest.mark.parametrize("shape", [(1, 3, 32, 32), (1, 3, 64, 96), (1, 3, 256, 32), (1, 3, 96, 160)])
def test_images(tiny_folder: Path, shape: tuple[int, ...]) -> None:
    frames = random_frames(shape)
    expected, grid = reference_patches(tiny_folder, "image", frames)
    assert frames_grid(shape) == grid
    assert torch.equal(patchify(torch.from_numpy(frames), HALF, HALF), expected)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 16, 17])
def test_videos_odd_counts_too(tiny_folder: Path, count: int) -> None:
    frames = random_frames((count, 3, 64, 32))
    expected, grid = reference_patches(tiny_folder, "video", frames)
    assert frames_grid(frames.shape) == grid == (-(-count // 2), 4, 2)
    assert torch.equal(patchify(torch.from_numpy(frames), HALF, HALF), expected)


def test_other_constants(tiny_folder: Path) -> None:
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    frames = random_frames((1, 3, 64, 96))
    expected, _ = reference_patches(tiny_folder, "image", frames, image_mean=mean, image_std=std)
    patches = patchify(torch.from_numpy(frames), torch.tensor(mean) * 255, torch.tensor(std) * 255)
    assert torch.equal(patches, expected)


def test_order_of_rows_and_columns() -> None:
    frames = torch.from_numpy(random_frames((3, 3, 64, 96)))
    patches = patchify(frames, torch.zeros(3), torch.ones(3))
    assert patches.shape == (2 * 4 * 6, 1536)
    rng = np.random.default_rng(0)
    for _ in range(200):
        t, y, x, c = (int(rng.integers(n)) for n in (4, 64, 96, 3))
        h, w = y // 16, x // 16
        row = (t // 2) * 24 + ((h // 2) * 3 + w // 2) * 4 + (h % 2) * 2 + w % 2
        column = c * 512 + (t % 2) * 256 + (y % 16) * 16 + x % 16
        assert patches[row, column] == frames[min(t, 2), c, y, x]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 3, 32, 33), "uint8"),
        ((1, 3, 16, 32), "uint8"),
        ((1, 1, 32, 32), "uint8"),
        ((3, 32, 32), "uint8"),
        ((0, 3, 32, 32), "uint8"),
        ((1, 3, 0, 32), "uint8"),
        ((1, 3, 32, 32), "float32"),
    ],
)
def test_refuses_by_shape(shape: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"frames must be uint8 \[T, 3, H, W\]"):
        check_frames(shape, dtype)
    with pytest.raises(ValueError, match=r"frames must be uint8 \[T, 3, H, W\]"):
        patchify(torch.zeros(shape, dtype=getattr(torch, dtype)), HALF, HALF)
