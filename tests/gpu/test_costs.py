"""What a capture measures, and what the packer makes of it."""

from __future__ import annotations

import pytest
import torch

from encoder.budgets import EAGER_MARGIN, CostTable
from encoder.defs import Modality, Stopped
from encoder.manager import EncoderCudaGraphManager
from tests.gpu.conftest import (
    DEVICE,
    MODALITIES,
    Grid,
    Towers,
    assert_close_in_bfloat16,
    batch_of,
    device_bytes,
    make_manager,
    shape_of,
)

BUDGETS = [64, 1024, 8192]


@pytest.fixture(scope="module")
def manager(full: Towers) -> EncoderCudaGraphManager:
    """Of the full tower, with measured costs."""
    manager = EncoderCudaGraphManager(full.ours, {m: list(BUDGETS) for m in MODALITIES}, 16, DEVICE, full.ours.dtype)
    manager.capture()
    return manager


def test_the_measured_table(manager: EncoderCudaGraphManager) -> None:
    assert manager.costs["image"] == manager.costs["video"]
    costs = manager.costs["image"]
    assert sorted(costs.graph) == BUDGETS == [tokens for tokens, _ in costs.eager]
    replays, eager = [costs.graph[b] for b in BUDGETS], [seconds for _, seconds in costs.eager]
    assert replays == sorted(replays)
    assert eager == sorted(eager)
    # The host launches 27 blocks more slowly than the GPU runs 64 tokens; 8192 keep the GPU busy either way.
    assert 1e-4 < replays[0] < eager[0] / 2
    assert 0.8 < eager[2] / replays[2] < 1.5
    assert replays[2] > 20 * replays[0]


@pytest.mark.parametrize("modality", MODALITIES)
def test_the_decision_follows(full: Towers, manager: EncoderCudaGraphManager, modality: Modality) -> None:
    """Little in a budget of 8192 tokens costs less eagerly; a budget that fits costs less as a replay."""
    costs = manager.costs[modality]
    for tokens, eagerly in ((2048, True), (64, False), (8192, False)):
        assert (EAGER_MARGIN * costs.eager_cost(tokens) < costs.graph[max(BUDGETS)]) == (tokens < 8192)
        grids: list[Grid] = [shape_of(modality, tokens)]
        batch = batch_of(modality, grids, seed=tokens)
        before = dict(manager.stats()["misses_by_reason"])
        (output,) = manager.execute_items(batch)
        after = manager.stats()["misses_by_reason"]
        if not eagerly:
            assert (output.execution, output.reason) == ("graph", None)
            assert after == before
            continue
        assert (output.execution, output.reason, output.budget) == ("eager", "cheaper_eager", None)
        assert after == before | {"cheaper_eager": before.get("cheaper_eager", 0) + 1}
        assert_close_in_bfloat16(output.embeddings, full.ours.encoder_eager_forward(batch), full.ours)


def test_measuring_leaves_the_graphs_right(full: Towers, manager: EncoderCudaGraphManager) -> None:
    for modality in MODALITIES:
        batch = batch_of(modality, [shape_of(modality, 64)])
        (output,) = manager.execute_items(batch)
        assert output.execution == "graph"
        assert_close_in_bfloat16(output.embeddings, full.ours.encoder_eager_forward(batch), full.ours)


def test_given_costs_are_kept_and_the_others_measured(shallow: Towers) -> None:
    given = CostTable.by_size([64])
    manager = EncoderCudaGraphManager(
        shallow.ours, {"image": [64], "video": [128]}, 4, DEVICE, shallow.ours.dtype, {"image": given}
    )
    manager.capture()
    assert manager.costs["image"] is given
    assert list(manager.costs["video"].graph) == [128]
    assert [tokens for tokens, _ in manager.costs["video"].eager] == [64, 128]
    manager.clear()


def test_eager_times_without_graphs_take_no_memory_for_good(shallow: Towers) -> None:
    manager = EncoderCudaGraphManager(shallow.ours, {}, 4, DEVICE, shallow.ours.dtype)
    manager.capture()
    assert manager.costs == {}
    manager.time_eager([64])
    before = device_bytes()
    points = manager.time_eager([64, 1024, 4096])
    assert [tokens for tokens, _ in points] == [64, 1024, 4096]
    assert 0 < points[0][1] <= points[1][1] <= points[2][1] < 1
    assert device_bytes()[0] - before[0] <= 64 * 2**20


def test_an_eager_run_stops_and_a_replay_does_not(shallow: Towers) -> None:
    manager = make_manager(shallow.ours, [64])
    asked: list[bool] = []
    with pytest.raises(Stopped):
        manager.execute_items(batch_of("image", [(1, 32, 32)]), stop=lambda: not asked.append(True))
    assert asked == [True]
    batch = batch_of("image", [(1, 14, 14)])
    (output,) = manager.execute_items(batch, stop=lambda: True)
    assert output.execution == "graph"
    torch.cuda.synchronize()
    assert_close_in_bfloat16(output.embeddings, shallow.ours.encoder_eager_forward(batch), shallow.ours)
    manager.clear()
