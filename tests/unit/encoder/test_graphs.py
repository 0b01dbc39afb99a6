"""Static buffers and replays on the tiny tower: sizes, contents, poison, and the rules that guard a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from encoder.defs import BudgetGraphMetadata, Modality
from encoder.graph import StaticBuffers
from encoder.manager import EncoderCudaGraphManager
from encoder.ops import TorchOps
from encoder.qwen3_vl import _VIDEO_CUDAGRAPH_T_CAPTURE, Qwen3VLVisionEncoder
from tests.unit.encoder.conftest import (
    CPU,
    Grid,
    Reference,
    batch_of,
    make_patches,
    relative_error,
    video_batch,
    worst_level_error,
)

MODALITIES: tuple[Modality, ...] = ("image", "video")
SMALL: dict[Modality, list[Grid]] = {"image": [(1, 4, 6), (1, 2, 2)], "video": [(3, 4, 2), (1, 2, 2)]}
LARGE: dict[Modality, list[Grid]] = {
    "image": [(1, 8, 8), (1, 4, 12), (1, 10, 6), (1, 2, 8)],
    "video": [(8, 4, 2), (5, 2, 4), (8, 2, 2), (7, 2, 4)],
}


def make_manager(encoder: Qwen3VLVisionEncoder, budgets: list[int], max_batch_size: int = 4) -> EncoderCudaGraphManager:
    manager = EncoderCudaGraphManager(encoder, dict.fromkeys(MODALITIES, budgets), max_batch_size, CPU, encoder.dtype)
    manager.capture()
    return manager


@pytest.fixture(scope="module")
def manager(tiny: Qwen3VLVisionEncoder) -> EncoderCudaGraphManager:
    return make_manager(tiny, [16, 57, 64])


def poison(graph: BudgetGraphMetadata, integer: int) -> int:
    """NaN into every static float and garbage into every integer; gives the number of tensors written."""
    tensors = [graph.input_buffer, graph.output, *graph.buffers.values()]
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else integer)
    return len(tensors)


class TestStaticBuffers:
    def test_a_smaller_request_shares_the_leading_part(self) -> None:
        static = StaticBuffers(CPU)
        large, small = static.take("x", (6, 4), torch.float32), static.take("x", (2, 4), torch.float32)
        assert torch.equal(large, torch.zeros(6, 4))
        small.fill_(1.0)
        assert large.sum() == 8 == large[:2].sum()
        assert static.nbytes == 6 * 4 * 4

    def test_names_and_dtypes_are_apart(self) -> None:
        static = StaticBuffers(CPU)
        taken = [static.take(n, (4,), d) for n in ("x", "y") for d in (torch.float32, torch.int32)]
        assert len({t.data_ptr() for t in taken}) == 4

    def test_refuses_to_grow(self) -> None:
        static = StaticBuffers(CPU)
        static.take("x", (4,), torch.float32)
        with pytest.raises(ValueError, match=r"'x' holds 4 elements, not 5"):
            static.take("x", (5,), torch.float32)

    def test_clear_forgets(self) -> None:
        static = StaticBuffers(CPU)
        static.take("x", (4,), torch.float32)
        static.clear()
        assert static.nbytes == 0
        assert static.take("x", (8,), torch.float32).shape == (8,)


class TestBuffers:
    @pytest.mark.parametrize("max_batch_size", [1, 3, 8])
    @pytest.mark.parametrize("t_capture", [1, 5, 8])
    def test_exact_sizes(self, tiny: Qwen3VLVisionEncoder, t_capture: int, max_batch_size: int) -> None:
        encoder = Qwen3VLVisionEncoder(tiny.config, t_capture).finalize(CPU, torch.float32)
        encoder.load_state_dict(tiny.state_dict())
        manager = make_manager(encoder, [1, 7, 17, 64, 129], max_batch_size)
        for modality, seqs in (("image", max_batch_size), ("video", max_batch_size * t_capture)):
            graphs = manager.budget_graphs[modality]  # type: ignore[index]
            assert sorted(graphs) == [1, 7, 17, 64, 129]
            for budget, graph in graphs.items():
                assert graph.max_num_seqs == seqs
                assert graph.input_buffer.shape == (budget * 4, 1536)
                assert graph.output.shape == (budget, 96 * 4)
                assert {n: (tuple(b.shape), b.dtype) for n, b in graph.buffers.items()} == {
                    "pos_embeds": ((budget * 4, 144), torch.float32),
                    "rotary_pos_emb_cos": ((budget * 4, 36), torch.float32),
                    "rotary_pos_emb_sin": ((budget * 4, 36), torch.float32),
                    "cu_seqlens": ((seqs + 1,), torch.int32),
                    "sequence_lengths": ((seqs,), torch.int32),
                    "num_patches": ((1,), torch.int32),
                    "max_seqlen": ((), torch.int32),
                }
                assert set(graph.buffers) == set(manager.config.buffer_keys)

    def test_budgets_share_memory_and_modalities_keep_their_own_bounds(self, manager: EncoderCudaGraphManager) -> None:
        graphs = [g for by_budget in manager.budget_graphs.values() for g in by_budget.values()]
        for name in ("pos_embeds", "rotary_pos_emb_cos", "rotary_pos_emb_sin"):
            assert len({g.buffers[name].data_ptr() for g in graphs}) == 1
        assert len({g.input_buffer.data_ptr() for g in graphs}) == len({g.output.data_ptr() for g in graphs}) == 1
        assert len({g.buffers["cu_seqlens"].data_ptr() for g in graphs}) == 2

    @pytest.mark.parametrize("modality", MODALITIES)
    def test_half_precision_buffers(self, tiny_bfloat16: Qwen3VLVisionEncoder, modality: Modality) -> None:
        graph = make_manager(tiny_bfloat16, [16]).budget_graphs[modality][16]
        assert graph.input_buffer.dtype == graph.output.dtype == graph.buffers["pos_embeds"].dtype == torch.bfloat16
        assert graph.buffers["rotary_pos_emb_cos"].dtype == torch.float32

    @pytest.mark.parametrize(
        ("modality", "grids", "bounds", "lengths"),
        [
            ("image", [(1, 4, 6), (1, 2, 2)], [0, 24, 28, 28, 28], [24, 4, 0, 0]),
            ("image", [(1, 2, 2)] * 4, [0, 4, 8, 12, 16], [4, 4, 4, 4]),
            ("video", [(3, 2, 4), (1, 2, 2)], [0, 8, 16, 24, *[28] * 29], [8, 8, 8, 4, *[0] * 28]),
        ],
    )
    def test_bounds_past_the_last_segment_repeat_it(
        self,
        manager: EncoderCudaGraphManager,
        modality: Modality,
        grids: list[Grid],
        bounds: list[int],
        lengths: list[int],
    ) -> None:
        manager.execute(batch_of(modality, LARGE[modality]))
        graph = manager.budget_graphs[modality][16]
        poison(graph, -77)
        manager.execute(batch_of(modality, grids))
        assert graph.buffers["cu_seqlens"].tolist() == bounds
        assert graph.buffers["sequence_lengths"].tolist() == lengths
        assert graph.buffers["num_patches"].tolist() == [sum(lengths)]
        assert int(graph.buffers["max_seqlen"]) == 64

    def test_rotary_and_position_rows(self, manager: EncoderCudaGraphManager, tiny: Qwen3VLVisionEncoder) -> None:
        """Against the formulas, at corners where they are simple: a table's corner is itself, row 0 is not rotated."""
        manager.execute(batch_of("image", [(1, 4, 6)]))
        buffers = manager.budget_graphs["image"][16].buffers
        table = tiny.pos_embed.weight
        # Merge-block order: patch (0, 0) is row 0, patch (3, 5) the last of 24.
        torch.testing.assert_close(buffers["pos_embeds"][0], table[0])
        torch.testing.assert_close(buffers["pos_embeds"][23], table[48 * 48 - 1])
        assert torch.equal(buffers["rotary_pos_emb_cos"][0], torch.ones(36))
        assert torch.equal(buffers["rotary_pos_emb_sin"][0], torch.zeros(36))
        frequencies = 10000.0 ** (-torch.arange(0, 36, 2) / 36)
        torch.testing.assert_close(buffers["rotary_pos_emb_sin"][23][:18], (3 * frequencies).sin())
        torch.testing.assert_close(buffers["rotary_pos_emb_sin"][23][18:], (5 * frequencies).sin())


class LiveRows(TorchOps):
    """Notes how many rows of each linear layer are in use, and how many there are."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def linear(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        self.seen.append((int(args[2]), len(x)))
        return super().linear(x, *args, **options)

    def linear_gelu(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        self.seen.append((int(args[2]), len(x)))
        return super().linear_gelu(x, *args, **options)


def test_linear_layers_are_told_the_rows_in_use(tiny: Qwen3VLVisionEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = LiveRows()
    monkeypatch.setattr(tiny, "ops", ops)
    manager = make_manager(tiny, [16])
    manager.execute(batch_of("image", [(1, 4, 6), (1, 2, 2)]))
    # 28 patches are 7 tokens: of 64 rows in the blocks, of 16 in the mergers.
    mergers = 2 * (1 + len(tiny.config.deepstack_visual_indexes))
    assert set(ops.seen) == {(28, 64), (7, 16)}
    assert ops.seen.count((7, 16)) == mergers
    assert ops.seen.count((28, 64)) == 1 + 4 * tiny.config.depth
    ops.seen.clear()
    # A timed eager run of 8 tokens counts all of its rows.
    manager.time_eager([8])
    assert set(ops.seen) == {(32, 32), (8, 8)}


@pytest.mark.parametrize("modality", MODALITIES)
class TestReplay:
    def test_equals_eager(
        self, manager: EncoderCudaGraphManager, tiny: Qwen3VLVisionEncoder, modality: Modality
    ) -> None:
        for grids in (SMALL[modality], LARGE[modality]):
            batch = batch_of(modality, grids)
            outputs = manager.execute_items(batch)
            assert {o.execution for o in outputs} == {"graph"}
            eager = tiny.encoder_eager_forward(batch)
            assert relative_error(torch.cat([o.embeddings for o in outputs]), eager) < 1e-5

    def test_small_large_small_bit_for_bit(self, tiny: Qwen3VLVisionEncoder, modality: Modality) -> None:
        manager = make_manager(tiny, [64])
        small, large = batch_of(modality, SMALL[modality], 1), batch_of(modality, LARGE[modality], 2)
        first = manager.execute(small)
        manager.execute(large)
        again = manager.execute(small)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert manager.stats()["hits_by_budget"] == {modality: {64: 8}}

    @pytest.mark.parametrize("integer", [-123456, 2**31 - 1, 7, 0])
    @pytest.mark.parametrize("budget", [16, 57, 64])
    def test_poison_changes_nothing(
        self, tiny: Qwen3VLVisionEncoder, modality: Modality, budget: int, integer: int
    ) -> None:
        manager = make_manager(tiny, [budget])
        batch = batch_of(modality, SMALL[modality])
        clean = manager.execute(batch)
        for graphs in manager.budget_graphs.values():
            for graph in graphs.values():
                assert poison(graph, integer) == 9
        poisoned = manager.execute(batch)
        for before, after in zip(clean, poisoned, strict=True):
            assert not after.isnan().any()
            assert torch.equal(before, after)
        assert manager.stats()["hits_by_budget"] == {modality: {budget: 4}}

    def test_poison_changes_nothing_in_half_precision(
        self, tiny_bfloat16: Qwen3VLVisionEncoder, modality: Modality
    ) -> None:
        manager = make_manager(tiny_bfloat16, [16])
        batch = batch_of(modality, SMALL[modality])
        clean = manager.execute(batch)
        poison(manager.budget_graphs[modality][16], -1)
        assert all(torch.equal(a, b) for a, b in zip(clean, manager.execute(batch), strict=True))

    def test_poison_in_a_full_graph(self, tiny: Qwen3VLVisionEncoder, modality: Modality) -> None:
        manager = make_manager(tiny, [16])
        batch = batch_of(modality, [(1, 8, 8)] if modality == "image" else [(4, 4, 4)])
        clean = manager.execute(batch)
        poison(manager.budget_graphs[modality][16], -1)
        assert torch.equal(manager.execute(batch)[0], clean[0])
        assert manager.stats()["padding_ratio"] == 1.0

    def test_graphs_of_both_modalities_interleave(
        self, manager: EncoderCudaGraphManager, tiny: Qwen3VLVisionEncoder, modality: Modality
    ) -> None:
        other: Modality = "image" if modality == "video" else "video"
        batch = batch_of(modality, SMALL[modality])
        first = manager.execute(batch)
        manager.execute(batch_of(other, LARGE[other]))
        assert all(torch.equal(a, b) for a, b in zip(first, manager.execute(batch), strict=True))

    def test_the_neighbours_do_not_matter(self, manager: EncoderCudaGraphManager, modality: Modality) -> None:
        grids = SMALL[modality]
        batch = batch_of(modality, grids)
        rows = grids[0][0] * grids[0][1] * grids[0][2]
        key = "pixel_values_videos" if modality == "video" else "pixel_values"
        loud = batch | {key: torch.cat((batch[key][:rows], batch[key][rows:] * 50))}
        quiet_answer, loud_answer = manager.execute(batch), manager.execute(loud)
        assert torch.equal(quiet_answer[0], loud_answer[0])
        assert not torch.equal(quiet_answer[1], loud_answer[1])


class TestVideoGuards:
    """A graph of 4 videos has room for 4 * 8 segments, and for 8 in any one video."""

    def prepare(self, encoder: Qwen3VLVisionEncoder, grids: list[Grid]) -> Any:
        return encoder.prepare_encoder_cudagraph_replay_buffers(video_batch(grids), 64, 4)

    def test_default_of_t_capture(self, tiny: Qwen3VLVisionEncoder) -> None:
        assert tiny.t_capture == _VIDEO_CUDAGRAPH_T_CAPTURE == 8

    @pytest.mark.parametrize(
        "grids",
        [
            [(9, 2, 2)],
            [(1, 2, 2), (9, 2, 2), (1, 2, 2), (1, 2, 2)],
            [(8, 2, 2)] * 4 + [(1, 2, 2)],
            [(7, 2, 2)] * 5,
            [(1, 2, 2)] * 33,
        ],
    )
    def test_does_not_fit(self, tiny: Qwen3VLVisionEncoder, grids: list[Grid]) -> None:
        replay = self.prepare(tiny, grids)
        assert replay.fits is False
        assert replay.buffers == {}

    @pytest.mark.parametrize("grids", [[(8, 2, 2)] * 4, [(8, 2, 2)], [(6, 2, 2)] * 5, [(1, 2, 2)] * 32])
    def test_fits(self, tiny: Qwen3VLVisionEncoder, grids: list[Grid]) -> None:
        replay = self.prepare(tiny, grids)
        assert replay.fits is True
        assert len(replay.buffers["cu_seqlens"]) == 33
        assert int(replay.buffers["cu_seqlens"][-1]) == sum(t for t, _, _ in grids) * 4

    def test_an_image_has_one_segment(self, tiny: Qwen3VLVisionEncoder) -> None:
        for count, fits in ((4, True), (5, False)):
            batch = batch_of("image", [(1, 2, 2)] * count)
            assert tiny.prepare_encoder_cudagraph_replay_buffers(batch, 64, 4).fits is fits

    def test_a_long_video_alone_goes_eager(self, manager: EncoderCudaGraphManager, reference: Reference) -> None:
        grids: list[Grid] = [(2, 2, 2), (9, 2, 2), (8, 2, 2), (1, 2, 4)]
        before = manager.stats()
        outputs = manager.execute_items(video_batch(grids))
        after = manager.stats()
        assert [(o.execution, o.reason) for o in outputs] == [
            ("graph", None),
            ("eager", "t_over_capture"),
            ("graph", None),
            ("graph", None),
        ]
        assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (3, 1)
        for output, levels in zip(outputs, reference(make_patches(grids), grids), strict=True):
            assert worst_level_error(output.embeddings, levels) < 1e-4

    def test_too_many_tokens_alone_goes_eager(self, manager: EncoderCudaGraphManager, reference: Reference) -> None:
        grids: list[Grid] = [(2, 2, 2), (8, 6, 6), (2, 18, 18), (1, 2, 4)]
        outputs = manager.execute_items(video_batch(grids))
        assert [o.reason for o in outputs] == [None, "tokens_over_budget", "tokens_over_budget", None]
        assert [len(o.embeddings) for o in outputs] == [2, 72, 162, 2]
        for output, levels in zip(outputs, reference(make_patches(grids), grids), strict=True):
            assert worst_level_error(output.embeddings, levels) < 1e-4

    @pytest.mark.parametrize("grids", [[(8, 2, 2)] * 5, [(9, 2, 2), (1, 2, 2)], [(1, 2, 2)] * 33])
    def test_direct_call_that_breaks_a_limit(self, manager: EncoderCudaGraphManager, grids: list[Grid]) -> None:
        batch, before = video_batch(grids), manager.stats()["misses"]
        specs = manager.model.get_encoder_cudagraph_item_specs(batch)
        assert manager._run_budget_graph("video", batch, specs, 64) is None
        assert manager.stats()["misses"] - before == len(grids)

    def test_a_smaller_t_capture(self, tiny: Qwen3VLVisionEncoder, reference: Reference) -> None:
        encoder = Qwen3VLVisionEncoder(tiny.config, t_capture=2).finalize(CPU, torch.float32)
        encoder.load_state_dict(tiny.state_dict())
        grids: list[Grid] = [(2, 2, 2), (3, 2, 2), (1, 4, 4)]
        outputs = make_manager(encoder, [16]).execute_items(video_batch(grids))
        assert [o.reason for o in outputs] == [None, "t_over_capture", None]
        for output, levels in zip(outputs, reference(make_patches(grids), grids), strict=True):
            assert worst_level_error(output.embeddings, levels) < 1e-4
