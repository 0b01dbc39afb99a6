"""The tower of Qwen3-VL-8B through its graphs: against the reference in float32, and every graph against eager."""

from __future__ import annotations

import pytest
import torch

from encoder.attention import FlashVarlen
from encoder.defs import Modality
from encoder.manager import EncoderCudaGraphManager
from encoder.ops import TorchOps
from tests.gpu.conftest import (
    MODALITIES,
    Grid,
    Towers,
    assert_close_in_bfloat16,
    batch_of,
    level_errors,
    level_rows,
    make_frames,
    make_manager,
    poison,
    shape_of,
)

BUDGETS = [64, 256, 1024, 4096]
CASES: dict[str, tuple[Modality, list[Grid]]] = {
    "1x224^2": ("image", [(1, 14, 14)]),
    "1x448^2": ("image", [(1, 28, 28)]),
    "1x1024^2": ("image", [(1, 64, 64)]),
    "16x224^2": ("image", [(1, 14, 14)] * 16),
    "video t=8 448^2": ("video", [(8, 28, 28)]),
    "images of mixed sizes": ("image", [(1, 14, 14), (1, 28, 20), (1, 2, 2), (1, 40, 30), (1, 6, 90), (1, 64, 4)]),
    "videos of mixed sizes": ("video", [(3, 10, 6), (8, 14, 14), (1, 4, 4), (5, 28, 28), (7, 2, 2)]),
}


@pytest.fixture(scope="module")
def manager(full: Towers) -> EncoderCudaGraphManager:
    return make_manager(full.ours, BUDGETS)


@pytest.mark.parametrize("name", CASES)
def test_no_worse_than_the_reference_in_bfloat16(full: Towers, manager: EncoderCudaGraphManager, name: str) -> None:
    modality, grids = CASES[name]
    frames, batch = make_frames(grids), batch_of(modality, grids)
    expected = full.expected(frames, grids)
    theirs = full.their_errors(frames, grids, expected)
    for graphs in manager.budget_graphs.values():
        for graph in graphs.values():
            poison(graph)
    outputs = manager.execute_items(batch)
    assert {o.execution for o in outputs} == {"graph"}
    assert [len(o.embeddings) for o in outputs] == [t * h * w // 4 for t, h, w in grids]
    ours = level_errors(level_rows(torch.cat([o.embeddings for o in outputs]), full.ours), expected)
    assert len(ours) == 4
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine <= 1.1 * reference, (ours, theirs)


def test_eager_is_no_worse_either(full: Towers) -> None:
    grids: list[Grid] = [(9, 14, 14), (2, 8, 30)]
    frames = make_frames(grids)
    expected = full.expected(frames, grids)
    ours = level_errors(level_rows(full.ours.encoder_eager_forward(batch_of("video", grids)), full.ours), expected)
    for mine, reference in zip(ours, full.their_errors(frames, grids, expected), strict=True):
        assert mine <= 1.1 * reference


def test_plain_operations_are_no_worse_either(full: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU without the project's own kernels runs."""
    monkeypatch.setattr(full.ours, "ops", TorchOps())
    monkeypatch.setattr(full.ours, "attention", FlashVarlen())
    modality, grids = CASES["images of mixed sizes"]
    frames = make_frames(grids)
    manager = make_manager(full.ours, [1024])
    outputs = manager.execute_items(batch_of(modality, grids))
    assert {o.execution for o in outputs} == {"graph"}
    expected = full.expected(frames, grids)
    ours = level_errors(level_rows(torch.cat([o.embeddings for o in outputs]), full.ours), expected)
    manager.clear()
    for mine, reference in zip(ours, full.their_errors(frames, grids, expected), strict=True):
        assert mine <= 1.1 * reference


def filled(modality: Modality, budget: int) -> dict[str, list[Grid]]:
    """Batches of one token, of half of the budget in two unequal items and a rest, and of all of it, one item or 16."""
    return {
        "one": [(1, 2, 2)],
        "half": [shape_of(modality, budget // 4), shape_of(modality, budget // 8), shape_of(modality, budget // 8)],
        "all, one item": [shape_of(modality, budget)],
        "all, 16 items": [shape_of(modality, budget // 16)] * 16,
    }


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("modality", MODALITIES)
def test_every_budget_filled(full: Towers, manager: EncoderCudaGraphManager, modality: Modality, budget: int) -> None:
    graph = manager.budget_graphs[modality][budget]
    for label, grids in filled(modality, budget).items():
        batch = batch_of(modality, grids, seed=budget)
        specs = manager.model.get_encoder_cudagraph_item_specs(batch)
        used = sum(spec.num_tokens for spec in specs)
        assert used == {"one": 1, "half": budget // 2}.get(label, budget)
        poison(graph)
        rows = manager._run_budget_graph(modality, batch, specs, budget)
        assert rows is not None
        assert len(rows) == budget
        assert_close_in_bfloat16(rows[:used], full.ours.encoder_eager_forward(batch), full.ours, label)
