"""Replays in any order and over any rubbish, managers side by side, memory, and attention outputs that start as NaN."""

from __future__ import annotations

import random
import resource
from typing import Any

import pytest
import torch

from encoder.attention import Attention, FlashVarlen
from encoder.budgets import CostTable
from encoder.defs import ItemOutput, Modality
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
    poison,
)

BUDGETS = [64, 192, 512, 1024]
REPLAYS = 10_000
SMALL: dict[Modality, list[Grid]] = {"image": [(1, 14, 14), (1, 2, 6)], "video": [(3, 8, 6), (1, 2, 2)]}
LARGE: dict[Modality, list[Grid]] = {
    "image": [(1, 40, 40), (1, 12, 100), (1, 2, 2), (1, 28, 28)],
    "video": [(8, 14, 14), (8, 20, 10), (5, 8, 20), (1, 2, 2)],
}


@pytest.fixture(scope="module")
def manager(shallow: Towers) -> EncoderCudaGraphManager:
    return make_manager(shallow.ours, BUDGETS)


def joined(outputs: list[ItemOutput]) -> torch.Tensor:
    assert {o.execution for o in outputs} == {"graph"}
    return torch.cat([o.embeddings for o in outputs])


@pytest.mark.parametrize("modality", MODALITIES)
def test_mixed_sizes(shallow: Towers, manager: EncoderCudaGraphManager, modality: Modality) -> None:
    for grids in (SMALL[modality], LARGE[modality], LARGE[modality][::-1]):
        batch = batch_of(modality, grids)
        assert_close_in_bfloat16(
            joined(manager.execute_items(batch)), shallow.ours.encoder_eager_forward(batch), shallow.ours
        )


@pytest.mark.parametrize("modality", MODALITIES)
def test_small_large_small_bit_for_bit(shallow: Towers, modality: Modality) -> None:
    manager = make_manager(shallow.ours, [1024])
    small, large = batch_of(modality, SMALL[modality], 1), batch_of(modality, LARGE[modality], 2)
    first = joined(manager.execute_items(small))
    joined(manager.execute_items(large))
    again = joined(manager.execute_items(small))
    assert torch.equal(first, again)
    assert manager.stats()["hits_by_budget"] == {modality: {1024: 2 * len(SMALL[modality]) + len(LARGE[modality])}}
    manager.clear()


@pytest.mark.parametrize("integer", [-123456, 2**31 - 1, 0])
@pytest.mark.parametrize("modality", MODALITIES)
def test_poison_changes_nothing(manager: EncoderCudaGraphManager, modality: Modality, integer: int) -> None:
    for grids in (SMALL[modality], LARGE[modality], [(1, 2, 2)]):
        batch = batch_of(modality, grids)
        clean = joined(manager.execute_items(batch))
        for graphs in manager.budget_graphs.values():
            for graph in graphs.values():
                poison(graph, integer)
        poisoned = joined(manager.execute_items(batch))
        assert not poisoned.isnan().any()
        assert torch.equal(clean, poisoned)


class RecordedAttention:
    """An attention that keeps what it gives in the capture and, beside each, a tensor that nobody writes to."""

    def __init__(self, inner: Attention) -> None:
        self.inner, self.name, self.capturable = inner, inner.name, inner.capturable
        self.outputs: list[torch.Tensor] = []
        self.probes: list[torch.Tensor] = []

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> Any:
        return self.inner.plan(cu_seqlens, max_seqlen, rows)

    def __call__(self, qkv: torch.Tensor, plan: Any) -> torch.Tensor:
        probe = torch.empty(16, dtype=qkv.dtype, device=qkv.device)
        out = self.inner(qkv, plan)
        if torch.cuda.is_current_stream_capturing():
            self.probes.append(probe)
            self.outputs.append(out)
        return out


@pytest.mark.parametrize("kind", ["served", "flash", "triton"])
@pytest.mark.parametrize("modality", MODALITIES)
def test_attention_outputs_that_start_as_nan_in_the_graph(
    shallow: Towers, modality: Modality, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's deterministic mode fills every new tensor with NaN, in Python and C++ alike; captured, so does the
    graph. An attention that leaves a used row unwritten, or reads an unwritten one, gives NaN."""
    inner: Attention = shallow.ours.attention
    if kind == "flash":
        inner = FlashVarlen()
    if kind == "triton":
        from encoder.kernels import TritonVarlen

        inner = TritonVarlen()
    recorded = RecordedAttention(inner)
    monkeypatch.setattr(shallow.ours, "attention", recorded)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    costs = {modality: CostTable.by_size([512])}
    manager = EncoderCudaGraphManager(shallow.ours, {modality: [512]}, 16, DEVICE, shallow.ours.dtype, costs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(16, device=DEVICE).isnan().all()
        manager.capture()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(recorded.outputs) == shallow.ours.config.depth
    monkeypatch.setattr(shallow.ours, "attention", inner)
    for grids in ([(1, 2, 2)], SMALL[modality], [(1, 30, 60)], [(1, 4, 8)] * 16, [(1, 32, 64)]):
        batch = batch_of(modality, grids)
        for probe in recorded.probes:
            probe.zero_()
        result = joined(manager.execute_items(batch))
        used = sum(t * h * w for t, h, w in grids)
        for probe, output in zip(recorded.probes, recorded.outputs, strict=True):
            assert probe.isnan().all()
            assert not output[:used].isnan().any()
        assert_close_in_bfloat16(result, shallow.ours.encoder_eager_forward(batch), shallow.ours)
    manager.clear()


def test_many_random_replays(shallow: Towers, manager: EncoderCudaGraphManager) -> None:
    """No drift: a batch gives the same bits each time, near eager's. No growth of memory on the device or the host."""
    rng = random.Random(0)
    batches: list[dict[str, Any]] = []
    expected: list[torch.Tensor] = []
    for seed in range(120):
        modality = rng.choice(MODALITIES)
        grids: list[Grid] = []
        room = rng.choice([16, 64, 300, 1024])
        while len(grids) < rng.randint(1, 16):
            t = rng.randint(1, 8) if modality == "video" else 1
            h, w = 2 * rng.randint(1, 16), 2 * rng.randint(1, 16)
            if t * h * w // 4 <= room:
                room -= t * h * w // 4
                grids.append((t, h, w))
            elif grids:
                break
        batches.append(batch_of(modality, grids, seed))
        outputs = manager.execute_items(batches[-1])
        expected.append(joined(outputs))
        assert_close_in_bfloat16(
            expected[-1], shallow.ours.encoder_eager_forward(batches[-1]), shallow.ours, (modality, grids)
        )
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def replay(count: int) -> None:
        for _ in range(count):
            index = rng.randrange(len(batches))
            wrong.add_((joined(manager.execute_items(batches[index])) != expected[index]).any())
        torch.cuda.synchronize()

    replay(500)
    before, host = device_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    replay(REPLAYS)
    after = device_bytes()
    assert int(wrong) == 0
    assert after[0] - before[0] == 0
    assert after[1] - before[1] <= 32 * 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host <= 200 * 2**10


def test_too_many_segments_go_eager(shallow: Towers) -> None:
    manager = make_manager(shallow.ours, [256], max_batch_size=2)
    batch = batch_of("video", [(8, 2, 2), (8, 2, 4), (1, 2, 2)])
    specs = manager.model.get_encoder_cudagraph_item_specs(batch)
    assert manager._run_budget_graph("video", batch, specs, 256) is None
    assert manager.stats()["misses"] == 3
    assert manager.stats()["misses_by_reason"] == {"batch_over_segments": 3}
    grids: list[Grid] = [(2, 4, 4), (9, 4, 4), (8, 2, 4)]
    batch = batch_of("video", grids)
    outputs = manager.execute_items(batch)
    assert [o.reason for o in outputs] == [None, "t_over_capture", None]
    assert_close_in_bfloat16(
        torch.cat([o.embeddings for o in outputs]), shallow.ours.encoder_eager_forward(batch), shallow.ours
    )
    many: list[Grid] = [(1, 4, 4)] * 7
    batch = batch_of("image", many)
    assert_close_in_bfloat16(
        joined(manager.execute_items(batch)), shallow.ours.encoder_eager_forward(batch), shallow.ours
    )
    manager.clear()


def test_two_managers_interleaved(shallow: Towers, full: Towers) -> None:
    """Of one tower, and of another beside it: each has memory of its own."""
    managers = [
        make_manager(shallow.ours, [64, 1024]),
        make_manager(shallow.ours, [256, 1024]),
        make_manager(full.ours, [128]),
    ]
    batches = [batch_of(m, g, 3) for m in MODALITIES for g in (SMALL[m], [(1, 10, 10)], LARGE[m])]
    alone = [[torch.cat(m.execute(b)) for b in batches] for m in managers]
    for index, batch in enumerate(batches):
        for which in (0, 1, 2, 0, 2, 1):
            assert torch.equal(torch.cat(managers[which].execute(batch)), alone[which][index])
    managers[0].clear()
    for index, batch in enumerate(batches):
        for which in (1, 2):
            assert torch.equal(torch.cat(managers[which].execute(batch)), alone[which][index])
    for manager in managers:
        manager.clear()


def test_clear_gives_the_memory_back(shallow: Towers) -> None:
    batch = batch_of("image", LARGE["image"])
    shallow.ours.encoder_eager_forward(batch)
    before = device_bytes()
    held = []
    for _ in range(3):
        manager = make_manager(shallow.ours, [64, 1024, 8192])
        joined(manager.execute_items(batch))
        taken = device_bytes()
        assert taken[1] - before[1] > 512 * 2**20
        assert manager.stats()["static_bytes"] > 256 * 2**20
        manager.clear()
        assert manager.stats()["static_bytes"] == 0
        assert manager.stats()["num_graphs"] == {}
        held.append(device_bytes())
        assert {o.execution for o in manager.execute_items(batch)} == {"eager"}
    # A stream keeps its cuBLAS workspaces for good, 64 MiB at most.
    for round_, (tensors, device) in enumerate(held, 1):
        assert tensors - before[0] <= round_ * 64 * 2**20
        assert device - before[1] <= (round_ * 64 + 64) * 2**20
