"""The manager on a model that is computed by hand: budgets, packing, guards, counters, modalities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder import manager as manager_module
from encoder.budgets import CostTable
from encoder.defs import Modality, Stopped
from encoder.interface import SupportsEncoderCudaGraph
from encoder.manager import EncoderCudaGraphManager
from tests.unit.encoder.conftest import CPU
from tests.unit.encoder.mock_vit import WIDTH, Grid, SimpleMockViTModel

BUDGETS = [16, 64]
# A replay costs almost nothing beside its rows' count, so that the tests' batches are not cut unless they say so.
ONE_REPLAY = {m: CostTable({16: 1.0, 64: 1.0}) for m in ("image", "video")}
MODALITIES: tuple[Modality, ...] = ("image", "video")
BUDGETS_OF_BOTH = dict.fromkeys(MODALITIES, BUDGETS)


def make_manager(
    model: SimpleMockViTModel | None = None,
    budgets: Mapping[str, Sequence[int]] | None = None,
    max_batch_size: int = 4,
    costs: Mapping[str, CostTable] | None = None,
) -> EncoderCudaGraphManager:
    model = model or SimpleMockViTModel()
    if budgets is None:
        budgets = dict.fromkeys(model.modalities, BUDGETS)
        costs = costs or ONE_REPLAY
    manager = EncoderCudaGraphManager(model, budgets, max_batch_size, CPU, torch.float32, costs)
    manager.capture()
    return manager


def check(manager: EncoderCudaGraphManager, batch: dict[str, Any]) -> None:
    model = manager.model
    assert isinstance(model, SimpleMockViTModel)
    outputs = manager.execute(batch)
    expected = model.expected(batch)
    assert [o.shape for o in outputs] == [e.shape for e in expected]
    for output, answer in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, answer, rtol=1e-4, atol=1e-5)


def test_mock_implements_the_protocol() -> None:
    assert isinstance(SimpleMockViTModel(), SupportsEncoderCudaGraph)


class TestCapture:
    def test_one_graph_a_budget_of_each_modality(self) -> None:
        manager = make_manager(budgets={"image": [64, 16, 32], "video": [8, 128]})
        assert {m: sorted(g) for m, g in manager.budget_graphs.items()} == {"image": [16, 32, 64], "video": [8, 128]}
        for graphs in manager.budget_graphs.values():
            for budget, graph in graphs.items():
                assert graph.token_budget == budget
                assert graph.max_batch_size == 4
                assert graph.input_buffer.shape == (budget * 4, 6)
                assert graph.output.shape == (budget, WIDTH)
                assert graph.output.dtype == torch.float32

    def test_largest_first(self) -> None:
        model = SimpleMockViTModel()
        make_manager(model, {"image": [16, 128, 64], "video": [32, 256]})
        assert [budget for _, budget in model.captured] == [256, 128, 64, 32, 16]
        assert dict(model.captured[:2]) == {"video": 256, "image": 128}

    def test_segments_of_a_graph(self) -> None:
        manager = make_manager(SimpleMockViTModel(t_capture=5), max_batch_size=3)
        assert {m: {g.max_num_seqs for g in graphs.values()} for m, graphs in manager.budget_graphs.items()} == {
            "image": {3},
            "video": {15},
        }

    def test_outputs_share_memory(self) -> None:
        graphs = make_manager().budget_graphs
        addresses = {g.output.data_ptr() for by_budget in graphs.values() for g in by_budget.values()}
        assert len(addresses) == 1

    def test_backend_is_told_as_what_it_is(self) -> None:
        manager = make_manager()
        assert manager.backend == manager.stats()["backend"] == "cpu-static"
        assert EncoderCudaGraphManager(SimpleMockViTModel(), {}, 4, CPU, torch.float32).backend == "eager"

    @pytest.mark.parametrize("modality", MODALITIES)
    def test_only_one_modality(self, modality: Modality) -> None:
        other: Modality = "image" if modality == "video" else "video"
        model = SimpleMockViTModel()
        manager = make_manager(model, {modality: [16]})
        assert list(manager.budget_graphs) == [modality]
        check(manager, model.batch([(1, 4, 4)], modality))
        check(manager, model.batch([(1, 4, 4)], other))
        stats = manager.stats()
        assert (stats["hits"], stats["misses"]) == (1, 1)
        assert stats["misses_by_reason"] == {"no_graphs": 1}

    @pytest.mark.parametrize(
        ("budgets", "max_batch_size", "name"),
        [
            ({"audio": [64]}, 4, "audio"),
            ({"image": []}, 4, "token_budgets"),
            ({"image": [0]}, 4, "token_budgets"),
            ({"video": [64, 64]}, 4, "token_budgets"),
            ({"image": [64]}, 0, "max_batch_size"),
            ({"image": [64]}, -2, "max_batch_size"),
        ],
    )
    def test_refuses_by_name(self, budgets: dict[str, list[int]], max_batch_size: int, name: str) -> None:
        with pytest.raises(ValueError, match=name):
            EncoderCudaGraphManager(SimpleMockViTModel(), budgets, max_batch_size, CPU, torch.float32)

    def test_refuses_a_modality_that_the_model_lacks(self) -> None:
        with pytest.raises(ValueError, match="video"):
            make_manager(SimpleMockViTModel(modalities=("image",)), {"video": [64]})


@pytest.mark.parametrize("modality", MODALITIES)
class TestExecute:
    def test_one_tensor_an_item_with_its_own_shape(self, modality: Modality) -> None:
        manager = make_manager()
        batch = SimpleMockViTModel().batch([(1, 4, 4), (1, 8, 8)], modality)
        assert [o.shape for o in manager.execute(batch)] == [(4, WIDTH), (16, WIDTH)]
        check(manager, batch)

    def test_too_many_tokens_for_any_budget_goes_eager(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        batch = model.batch([(1, 18, 18)], modality)
        (output,) = manager.execute_items(batch)
        assert output.embeddings.shape == (81, WIDTH)
        assert (output.execution, output.reason, output.budget) == ("eager", "tokens_over_budget", None)
        torch.testing.assert_close(output.embeddings, model.expected(batch)[0], rtol=1e-4, atol=1e-5)
        stats = manager.stats()
        assert (stats["hits"], stats["misses"]) == (0, 1)
        assert stats["misses_by_reason"] == {"tokens_over_budget": 1}

    def test_hits_count_items(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        manager.execute(model.batch([(1, 4, 4)] * 3, modality))
        manager.execute(model.batch([(1, 8, 8)], modality))
        stats = manager.stats()
        assert (stats["hits"], stats["misses"], stats["replays"]) == (4, 0, 2)
        assert stats["hits_by_budget"] == {modality: {16: 4}}
        assert (stats["budget_tokens"], stats["used_tokens"]) == (32, 28)
        assert stats["padding_ratio"] == pytest.approx(32 / 28)

    def test_misses_count_items(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        manager.execute(model.batch([(1, 18, 18), (1, 20, 20)], modality))
        stats = manager.stats()
        assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (0, 2, 0.0)

    def test_an_oversized_item_leaves_its_neighbours_their_graph(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        batch = model.batch([(1, 4, 4), (1, 18, 18), (1, 6, 4), (1, 2, 2)], modality)
        outputs = manager.execute_items(batch)
        assert [o.execution for o in outputs] == ["graph", "eager", "graph", "graph"]
        assert [o.budget for o in outputs] == [16, None, 16, 16]
        for output, expected in zip(outputs, model.expected(batch), strict=True):
            torch.testing.assert_close(output.embeddings, expected, rtol=1e-4, atol=1e-5)
        assert manager.stats()["hit_rate"] == 0.75

    def test_more_items_than_a_batch_are_chunked(self, modality: Modality) -> None:
        manager, model = make_manager(max_batch_size=4), SimpleMockViTModel()
        check(manager, model.batch([(1, 4, 4)] * 8, modality))
        stats = manager.stats()
        assert (stats["hits"], stats["misses"], stats["replays"]) == (8, 0, 2)

    def test_more_tokens_than_a_budget_are_chunked(self, modality: Modality) -> None:
        manager, model = make_manager(max_batch_size=8), SimpleMockViTModel()
        check(manager, model.batch([(1, 12, 12)] * 3, modality))
        stats = manager.stats()
        assert (stats["hits"], stats["replays"], stats["hits_by_budget"]) == (3, 3, {modality: {64: 3}})

    def test_a_large_batch_never_raises(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        shapes = [(1, 4, 4), (1, 2, 2), (1, 16, 16), (1, 18, 18), (1, 2, 12)]
        check(manager, model.batch([shapes[i % 5] for i in range(50)], modality))
        stats = manager.stats()
        assert (stats["hits"], stats["misses"]) == (40, 10)

    def test_nothing_gives_nothing(self, modality: Modality) -> None:
        key = {"image": "pixel_values", "video": "pixel_values_videos"}[modality]
        batch = {key: torch.empty(0, 6), f"{modality}_grid_thw": []}
        assert make_manager().execute(batch) == []
        assert EncoderCudaGraphManager(SimpleMockViTModel(), {}, 4, CPU, torch.float32).execute(batch) == []

    def test_outputs_survive_the_next_replay(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        first = manager.execute(model.batch([(1, 4, 4), (1, 8, 4)], modality, seed=1))
        kept = [o.clone() for o in first]
        manager.execute(model.batch([(1, 8, 8)], modality, seed=2))
        assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))

    @pytest.mark.parametrize("columns", [[2, 2, 2, 2], [5, 2, 5, 1]])
    def test_leading_columns(self, modality: Modality, columns: list[int]) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        batch = model.batch([(1, 4, 4), (1, 18, 18), (1, 8, 4), (1, 2, 2)], modality)
        outputs = manager.execute_items(batch, columns)
        for output, whole, width in zip(outputs, model.expected(batch), columns, strict=True):
            assert output.embeddings.is_contiguous()
            torch.testing.assert_close(output.embeddings, whole[:, :width], rtol=1e-4, atol=1e-5)

    def test_a_model_that_refuses_a_batch_runs_it_eagerly(self, modality: Modality) -> None:
        model = SimpleMockViTModel()
        manager = make_manager(model)
        model.refuse = True
        batch = model.batch([(1, 4, 4), (1, 8, 4)], modality)
        outputs = manager.execute_items(batch)
        assert {(o.execution, o.reason, o.budget) for o in outputs} == {("eager", "batch_over_segments", None)}
        assert model.eager_grids == [[(1, 4, 4), (1, 8, 4)]]
        assert (manager.stats()["hits"], manager.stats()["misses"]) == (0, 2)
        check(manager, batch)

    def test_the_cheaper_way_is_taken(self, modality: Modality) -> None:
        model = SimpleMockViTModel()
        costs: dict[str, CostTable] = {modality: CostTable({16: 1.0, 64: 9.0}, ((1, 6.0), (64, 6.0)))}
        manager = make_manager(model, {modality: BUDGETS}, costs=costs)
        batch = model.batch([(1, 8, 8), (1, 8, 8)], modality)
        assert [o.budget for o in manager.execute_items(batch)] == [16, 16]
        assert manager.stats()["replays"] == 2
        (output,) = manager.execute_items(model.batch([(1, 10, 10)], modality))
        assert (output.execution, output.reason) == ("eager", "cheaper_eager")
        assert manager.stats()["misses_by_reason"] == {"cheaper_eager": 1}

    @pytest.mark.parametrize("grid", [(1, 8, 8), (1, 20, 20)])
    def test_a_stop_ends_a_batch_and_no_other(self, modality: Modality, grid: Grid) -> None:
        """Of a CPU's graph and of an eager run."""
        model = SimpleMockViTModel()
        manager = make_manager(model)
        batch = model.batch([grid], modality)
        asked: list[bool] = []
        with pytest.raises(Stopped):
            manager.execute_items(batch, stop=lambda: not asked.append(True))
        assert asked == [True]
        (output,) = manager.execute_items(batch, stop=lambda: False)
        torch.testing.assert_close(output.embeddings, model.expected(batch)[0], rtol=1e-4, atol=1e-5)

    def test_clear_drops_graphs_and_memory(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        assert manager.stats()["static_bytes"] == 64 * WIDTH * 4
        manager.clear()
        assert manager.budget_graphs == {}
        assert (manager.backend, manager.stats()["static_bytes"]) == ("eager", 0)
        check(manager, model.batch([(1, 4, 4), (1, 8, 8)], modality))
        assert (manager.stats()["hits"], manager.stats()["misses"]) == (0, 2)

    def test_captures_again_after_clear(self, modality: Modality) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        manager.clear()
        manager.capture()
        check(manager, model.batch([(1, 4, 4)], modality))
        assert manager.stats()["hits"] == 1


class TestStats:
    def test_zeros_at_first(self) -> None:
        stats = make_manager().stats()
        assert {n: stats[n] for n in ("hits", "misses", "replays", "budget_tokens", "used_tokens", "hit_rate")} == {
            "hits": 0,
            "misses": 0,
            "replays": 0,
            "budget_tokens": 0,
            "used_tokens": 0,
            "hit_rate": 0.0,
        }
        assert stats["padding_ratio"] is None

    def test_all_hits(self) -> None:
        manager = make_manager()
        manager.execute(SimpleMockViTModel().batch([(1, 4, 4)] * 4))
        assert manager.stats()["hit_rate"] == 1.0

    def test_budgets_and_limits(self) -> None:
        stats = make_manager(budgets={"video": [64, 16, 32]}, max_batch_size=7).stats()
        assert (stats["token_budgets"], stats["max_batch_size"]) == ({"video": [16, 32, 64]}, 7)
        assert stats["num_graphs"] == {"video": 3}

    def test_json_able(self) -> None:
        manager = make_manager()
        manager.execute(SimpleMockViTModel().batch([(1, 4, 4), (1, 18, 18)]))
        assert json.loads(json.dumps(manager.stats()))["misses"] == 1


class TestModality:
    def test_detected_from_the_keys(self) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        for modality in MODALITIES:
            assert manager._detect_modality(model.batch([(1, 4, 4)], modality)) == modality

    def test_image_then_video_through_one_manager(self) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        image, video = model.batch([(1, 4, 4), (1, 8, 8)]), model.batch([(2, 4, 4), (8, 2, 2)], "video")
        for batch in (image, video, image):
            check(manager, batch)
        assert manager.stats()["hits_by_budget"] == {"image": {64: 4}, "video": {16: 2}}

    def test_both_keys(self) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        both = model.batch([(1, 4, 4)]) | model.batch([(1, 4, 4)], "video")
        with pytest.raises(ValueError, match="exactly one of pixel_values, pixel_values_videos"):
            manager.execute(both)

    def test_neither_key(self) -> None:
        with pytest.raises(ValueError, match="it has image_grid_thw"):
            make_manager().execute({"image_grid_thw": [(1, 4, 4)]})
        with pytest.raises(ValueError, match="it has nothing"):
            make_manager().execute({})

    def test_without_modality_keys_the_input_key_is_everybodys(self) -> None:
        model = SimpleMockViTModel(modality_keys=None)
        manager = make_manager(model)
        assert [manager._get_input_key(m) for m in MODALITIES] == ["pixel_values", "pixel_values"]
        assert manager._detect_modality({"pixel_values": None}) == "image"
        check(manager, model.batch([(1, 4, 4)]))

    def test_one_modality_without_modality_keys(self) -> None:
        model = SimpleMockViTModel(modalities=("video",), modality_keys=None)
        manager = make_manager(model)
        check(manager, model.batch([(2, 4, 4)], "video"))
        assert manager.stats()["hits_by_budget"] == {"video": {16: 1}}
        with pytest.raises(ValueError, match="pixel_values"):
            manager.execute({"pixels": None})

    def test_a_modality_absent_from_the_keys_uses_the_input_key(self) -> None:
        model = SimpleMockViTModel(modality_keys={"video": "pixel_values_videos"})
        manager = make_manager(model)
        assert [manager._get_input_key(m) for m in MODALITIES] == ["pixel_values", "pixel_values_videos"]
        check(manager, model.batch([(1, 4, 4)]))
        check(manager, model.batch([(1, 4, 4)], "video"))


class TestGuards:
    """Limits of a video graph: 4 videos of at most 8 temporal patches."""

    def test_a_long_video_leaves_its_short_neighbours_their_graph(self) -> None:
        manager, model = make_manager(), SimpleMockViTModel()
        batch = model.batch([(2, 2, 2), (9, 2, 2), (8, 2, 2), (1, 2, 2)], "video")
        outputs = manager.execute_items(batch)
        assert [(o.execution, o.reason) for o in outputs] == [
            ("graph", None),
            ("eager", "t_over_capture"),
            ("graph", None),
            ("graph", None),
        ]
        check(manager, batch)
        assert model.t_capture == 8

    def test_more_segments_than_a_graph_has_are_chunked(self) -> None:
        model = SimpleMockViTModel()
        manager = make_manager(model, max_batch_size=4)
        check(manager, model.batch([(6, 2, 2)] * 6, "video"))
        assert (manager.stats()["replays"], manager.stats()["misses"]) == (2, 0)

    @pytest.mark.parametrize("grids", [[(8, 2, 2)] * 5, [(7, 2, 2)] * 4 + [(5, 2, 2)]])
    def test_direct_call_with_too_many_segments(self, grids: list[Grid]) -> None:
        model = SimpleMockViTModel()
        manager = make_manager(model)
        batch = model.batch(grids, "video")
        specs = model.get_encoder_cudagraph_item_specs(batch)
        before = manager.budget_graphs["video"][64].output.clone()
        assert manager._run_budget_graph("video", batch, specs, 64) is None
        assert torch.equal(manager.budget_graphs["video"][64].output, before)
        assert (manager.stats()["hits"], manager.stats()["misses"]) == (0, 5)

    def test_direct_call_at_the_limit_of_segments(self) -> None:
        model = SimpleMockViTModel()
        manager = make_manager(model)
        batch = model.batch([(8, 2, 2)] * 4, "video")
        rows = manager._run_budget_graph("video", batch, model.get_encoder_cudagraph_item_specs(batch), 64)
        assert rows is not None
        torch.testing.assert_close(rows[:32], torch.cat(model.expected(batch)), rtol=1e-4, atol=1e-5)

    def test_direct_call_with_too_many_tokens(self) -> None:
        model = SimpleMockViTModel()
        manager = make_manager(model)
        batch = model.batch([(1, 8, 8), (1, 2, 2)])
        specs = model.get_encoder_cudagraph_item_specs(batch)
        assert manager._run_budget_graph("image", batch, specs, 16) is None
        assert manager._run_budget_graph("image", batch, specs, 64) is not None
        assert (manager.stats()["hits"], manager.stats()["misses"]) == (2, 2)

    def test_direct_call_that_the_model_refuses(self) -> None:
        model = SimpleMockViTModel()
        manager = make_manager(model)
        batch = model.batch([(1, 2, 2)])
        model.refuse = True
        assert manager._run_budget_graph("image", batch, model.get_encoder_cudagraph_item_specs(batch), 16) is None
        assert manager.stats()["misses_by_reason"] == {"batch_over_segments": 1}

    def test_zero_segments_means_unchecked(self) -> None:
        model = SimpleMockViTModel(check_segments=False)
        manager = make_manager(model)
        graph = manager.budget_graphs["video"][64]
        assert graph.max_num_seqs == 0
        # 9 temporal patches in one video and 34 in the batch pass every limit, so the bounds need the room.
        graph.buffers["cu_seqlens"] = torch.zeros(65, dtype=torch.int32)
        batch = model.batch([(9, 2, 2), (9, 2, 2), (8, 2, 2), (8, 2, 2)], "video")
        check(manager, batch)
        assert (manager.stats()["hits"], manager.stats()["misses"]) == (4, 0)

    def test_a_replay_buffer_of_none_leaves_the_captured_one(self) -> None:
        model = SimpleMockViTModel(keep=("scale",))
        manager = make_manager(model)
        batch = model.batch([(1, 4, 4), (1, 4, 8)])
        outputs = manager.execute(batch)
        assert torch.equal(manager.budget_graphs["image"][16].buffers["scale"], torch.full((64,), 3.0))
        for output, expected in zip(outputs, model.expected(batch, scale=3.0), strict=True):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("modality", MODALITIES)
def test_small_large_small_through_one_graph(modality: Modality) -> None:
    model = SimpleMockViTModel()
    manager = make_manager(model, {modality: [64]})
    small, large = model.batch([(1, 4, 4)], modality, 1), model.batch([(1, 8, 8), (1, 12, 12)], modality, 2)
    first = manager.execute(small)
    manager.execute(large)
    assert torch.equal(manager.execute(small)[0], first[0])
    assert manager.stats()["hits"] == 4


grids = st.lists(
    st.tuples(st.integers(1, 11), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8])), min_size=1, max_size=12
)


@given(grids, st.integers(1, 5), st.sampled_from([[16], [64], [3, 16, 50], [8, 16, 32, 64]]))
@settings(max_examples=60)
def test_any_videos_through_any_manager(grids: list[Grid], max_batch_size: int, budgets: list[int]) -> None:
    model = SimpleMockViTModel()
    manager = make_manager(model, {"video": budgets}, max_batch_size)
    check(manager, model.batch(grids, "video"))
    stats = manager.stats()
    fitting = sum(t <= 8 and t * h * w // 4 <= max(budgets) for t, h, w in grids)
    # Costs by size never favour an eager run: what fits is a hit.
    assert (stats["hits"], stats["misses"]) == (fitting, len(grids) - fitting)
    assert stats["used_tokens"] <= stats["budget_tokens"]


class TestEagerTimes:
    """Runs of a model that take what a made-up clock says."""

    def time(
        self, seconds: Sequence[float], sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch, capture: bool = True
    ) -> tuple[tuple[tuple[int, float], ...], list[int]]:
        """`time_eager` of runs that take `seconds` one after the other; and the rows of each forward, warm-ups too."""
        model = SimpleMockViTModel()
        manager = make_manager(model, BUDGETS_OF_BOTH if capture else {})
        model.forward_rows.clear()
        # The clock is read before and after a run.
        readings = iter([reading for s in seconds for reading in (0.0, s)])
        monkeypatch.setattr(manager_module, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
        return manager.time_eager(sizes), model.forward_rows

    def test_the_least_of_three_short_runs_and_one_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points, rows = self.time([0.004, 0.002, 0.003, 0.5], [8, 64], monkeypatch)
        assert points == ((8, 0.002), (64, 0.5))
        # A warm-up of each on the CPU, where the capture makes none.
        assert rows == [32] * 4 + [256] * 2

    def test_a_larger_run_never_costs_less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.time([0.3, 0.2, 0.4], [1, 16, 64], monkeypatch)[0] == ((1, 0.3), (16, 0.3), (64, 0.4))

    def test_a_manager_without_graphs_has_them_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points, rows = self.time([0.1, 0.2], [16, 640], monkeypatch, capture=False)
        assert points == ((16, 0.1), (640, 0.2))
        assert rows == [64, 64, 2560, 2560]

    def test_none_where_the_memory_does_not_suffice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        manager = make_manager()
        monkeypatch.setattr(manager.model, "encoder_cudagraph_forward", fail)
        assert manager.time_eager([16]) == ()

    def test_graphs_replay_the_same_afterwards(self) -> None:
        manager = make_manager()
        model = manager.model
        assert isinstance(model, SimpleMockViTModel)
        batch = model.batch([(1, 6, 6), (1, 4, 4)])
        before = manager.execute(batch)
        assert [tokens for tokens, _ in manager.time_eager([4, 16, 64])] == [4, 16, 64]
        assert all(torch.equal(a, b) for a, b in zip(before, manager.execute(batch), strict=True))
