"""Towers of other dtypes and widths through their graphs, against `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.conftest import (
    SHALLOW,
    Grid,
    batch_of,
    level_errors,
    level_rows,
    make_frames,
    make_manager,
    make_towers,
)

# Head dimensions of 72 (8B and up) and 64 (2B and 4B).
WIDTHS: dict[str, dict[str, Any]] = {
    "head_dim 72": SHALLOW,
    "head_dim 64": SHALLOW | {"hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048},
    "tiny": SHALLOW | {"hidden_size": 144, "num_heads": 2, "intermediate_size": 272, "out_hidden_size": 96},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_against_the_reference(width: str, dtype: torch.dtype) -> None:
    towers = make_towers(WIDTHS[width], dtype)
    manager = make_manager(towers.ours, [64, 512])
    images: list[Grid] = [(1, 14, 14), (1, 2, 2), (1, 30, 8), (1, 6, 44)]
    videos: list[Grid] = [(3, 10, 6), (8, 8, 8), (1, 4, 4)]
    for modality, grids in (("image", images), ("video", videos)):
        frames = make_frames(grids)
        outputs = manager.execute_items(batch_of(modality, grids))  # type: ignore[arg-type]
        assert {o.execution for o in outputs} == {"graph"}
        rows = torch.cat([o.embeddings for o in outputs])
        assert rows.dtype == dtype
        expected = towers.expected(frames, grids)
        ours = level_errors(level_rows(rows, towers.ours), expected)
        theirs = towers.their_errors(frames, grids, expected)
        for mine, reference in zip(ours, theirs, strict=True):
            assert mine < (5e-4 if dtype == torch.float32 else 1.1 * reference), (ours, theirs)
    manager.clear()
