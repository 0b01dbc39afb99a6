"""Budgets, packing and the planner, against brute force where the answer is an optimum."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.budgets import (
    EAGER_MARGIN,
    Batch,
    CostTable,
    PackLimits,
    default_token_budgets,
    find_budget,
    generate_token_budgets,
    pack_greedily,
    plan_batches,
    validate_budgets,
)
from encoder.defs import EncoderItemSpec


def spec(tokens: int, seqs: int = 1) -> EncoderItemSpec:
    return EncoderItemSpec(tokens * 4, tokens, seqs)


specs = st.lists(st.builds(spec, st.integers(1, 40), st.integers(1, 6)), max_size=12)
limits = st.builds(PackLimits, st.integers(1, 60), st.integers(0, 5), st.integers(0, 10))


class TestGenerate:
    @pytest.mark.parametrize(
        ("low", "high", "budgets"),
        [
            (64, 1024, [64, 128, 256, 512, 1024]),
            (64, 8192, [64, 128, 256, 512, 1024, 2048, 4096, 8192]),
            (64, 1000, [64, 128, 256, 512, 1000]),
            (64, 65, [64, 65]),
            (64, 64, [64]),
            (100, 300, [100, 200, 300]),
            (1, 1, [1]),
            (1, 5, [1, 2, 4, 5]),
        ],
    )
    def test_doubles_from_the_minimum_and_has_the_maximum(self, low: int, high: int, budgets: list[int]) -> None:
        assert generate_token_budgets(low, high) == budgets

    @pytest.mark.parametrize(
        ("low", "high", "steps", "budgets"),
        [
            (64, 256, 2, [64, 96, 128, 192, 256]),
            (64, 256, 4, [64, 80, 96, 112, 128, 160, 192, 224, 256]),
            (64, 300, 2, [64, 96, 128, 192, 256, 300]),
            (64, 128, 3, [64, 96, 112, 128]),
            (32, 128, 4, [32, 48, 64, 80, 96, 112, 128]),
        ],
    )
    def test_steps_divide_an_octave(self, low: int, high: int, steps: int, budgets: list[int]) -> None:
        assert generate_token_budgets(low, high, steps) == budgets

    @given(st.integers(1, 300), st.integers(0, 20000), st.integers(1, 8))
    def test_more_steps_only_add_budgets_and_close_gaps(self, low: int, span: int, steps: int) -> None:
        high = low + span
        budgets = generate_token_budgets(low, high, steps)
        assert budgets == sorted(set(budgets))
        assert (budgets[0], budgets[-1]) == (low, high)
        assert set(generate_token_budgets(low, high)) <= set(budgets)
        for small, large in itertools.pairwise(budgets):
            octave = low * 2 ** int(math.log2(small / low))
            assert large - small <= octave / steps + 16
        added = set(budgets) - set(generate_token_budgets(low, high))
        assert all(budget % 16 == 0 for budget in added)

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ((0, 64), "min_tokens"),
            ((-1, 64), "min_tokens"),
            ((65, 64), "max_tokens"),
            ((1, 0), "max_tokens"),
            ((64, 128, 0), "steps_per_octave"),
        ],
    )
    def test_names_what_is_out_of_range(self, arguments: tuple[int, ...], name: str) -> None:
        with pytest.raises(ValueError, match=name):
            generate_token_budgets(*arguments)


class TestValidate:
    def test_sorts(self) -> None:
        assert validate_budgets([256, 64, 128], 8) == [64, 128, 256]

    def test_allows_the_boundaries(self) -> None:
        assert validate_budgets((1,), 1) == [1]

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            (([], 8), "token_budgets"),
            (([0], 8), "token_budgets"),
            (([-64], 8), "token_budgets"),
            (([64.0], 8), "token_budgets"),
            (([True], 8), "token_budgets"),
            ((["64"], 8), "token_budgets"),
            (([64, 128, 64], 8), "token_budgets"),
            (([64], 0), "max_batch_size"),
            (([64], -1), "max_batch_size"),
        ],
    )
    def test_names_the_setting(self, arguments: tuple[object, ...], name: str) -> None:
        with pytest.raises(ValueError, match=name):
            validate_budgets(*arguments)  # type: ignore[arg-type]

    @given(st.integers(1, 300), st.integers(0, 5000), st.integers(1, 8))
    def test_admits_what_is_generated(self, low: int, span: int, steps: int) -> None:
        budgets = generate_token_budgets(low, low + span, steps)
        assert validate_budgets(budgets, 8) == budgets


class TestFind:
    @pytest.mark.parametrize(
        ("tokens", "budget"),
        [(0, 64), (1, 64), (63, 64), (64, 64), (65, 128), (128, 128), (129, 512), (512, 512), (513, None)],
    )
    def test_smallest_that_fits(self, tokens: int, budget: int | None) -> None:
        assert find_budget([64, 128, 512], tokens) == budget

    @pytest.mark.parametrize(("tokens", "budget"), [(64, 64), (65, None)])
    def test_a_single_budget(self, tokens: int, budget: int | None) -> None:
        assert find_budget([64], tokens) == budget

    def test_no_budgets(self) -> None:
        assert find_budget([], 1) is None

    @given(st.sets(st.integers(1, 500), max_size=8), st.integers(0, 600))
    def test_as_a_scan_finds_it(self, budgets: set[int], tokens: int) -> None:
        assert find_budget(sorted(budgets), tokens) == min((b for b in budgets if b >= tokens), default=None)


class TestPack:
    def test_by_tokens(self) -> None:
        assert pack_greedily([spec(30), spec(30), spec(5), spec(64), spec(1)], PackLimits(64)) == [
            [0, 1],
            [2],
            [3],
            [4],
        ]

    def test_by_items(self) -> None:
        assert pack_greedily([spec(1)] * 5, PackLimits(64, max_items=2)) == [[0, 1], [2, 3], [4]]

    def test_by_segments(self) -> None:
        items = [spec(4, 3), spec(4, 5), spec(4, 1), spec(4, 8)]
        assert pack_greedily(items, PackLimits(64, max_seqs=8)) == [[0, 1], [2], [3]]

    def test_an_item_over_a_limit_is_alone(self) -> None:
        assert pack_greedily([spec(1), spec(99), spec(1)], PackLimits(64)) == [[0], [1], [2]]

    def test_nothing(self) -> None:
        assert pack_greedily([], PackLimits(64)) == []

    @given(specs, limits)
    def test_no_item_lost_order_kept_no_limit_passed(self, items: list[EncoderItemSpec], limit: PackLimits) -> None:
        runs = pack_greedily(items, limit)
        assert [index for run in runs for index in run] == list(range(len(items)))
        for run in runs:
            tokens, seqs = sum(items[i].num_tokens for i in run), sum(items[i].num_seqs for i in run)
            assert len(run) == 1 or (
                tokens <= limit.max_tokens
                and (limit.max_items == 0 or len(run) <= limit.max_items)
                and (limit.max_seqs == 0 or seqs <= limit.max_seqs)
            )

    @given(specs, limits)
    def test_a_run_ends_only_where_the_next_item_does_not_fit(
        self, items: list[EncoderItemSpec], limit: PackLimits
    ) -> None:
        for run, following in itertools.pairwise(pack_greedily(items, limit)):
            grown = [items[i] for i in [*run, following[0]]]
            tokens, seqs = sum(s.num_tokens for s in grown), sum(s.num_seqs for s in grown)
            assert (
                tokens > limit.max_tokens
                or (limit.max_items and len(grown) > limit.max_items)
                or (limit.max_seqs and seqs > limit.max_seqs)
            )


class TestCosts:
    def test_by_size_charges_a_replay(self) -> None:
        assert CostTable.by_size([64, 128]).graph == {64: 96.0, 128: 160.0}

    def test_eager_without_points_is_never_cheaper(self) -> None:
        assert CostTable({}).eager_cost(1) == math.inf

    def test_one_point_is_a_constant(self) -> None:
        assert [CostTable({}, ((64, 2.0),)).eager_cost(n) for n in (1, 64, 1000)] == [2.0, 2.0, 2.0]

    @pytest.mark.parametrize(
        ("tokens", "cost"), [(1, 2.0), (64, 2.0), (96, 3.0), (128, 4.0), (192, 5.0), (256, 6.0), (384, 8.0)]
    )
    def test_interpolates_and_extrapolates(self, tokens: int, cost: float) -> None:
        table = CostTable({}, ((64, 2.0), (128, 4.0), (256, 6.0)))
        assert table.eager_cost(tokens) == pytest.approx(cost)


BUDGETS = [8, 16, 32, 64]


def cost_of(batches: list[Batch], items: list[EncoderItemSpec], costs: CostTable) -> float:
    return sum(
        costs.graph[b.budget]
        if b.budget
        else EAGER_MARGIN * costs.eager_cost(sum(items[i].num_tokens for i in b.indices))
        for b in batches
    )


def brute_force(run: list[EncoderItemSpec], costs: CostTable) -> float:
    """The least cost over every way to cut the run, each part by the cheaper of its graph and a dearer eager run."""
    best = math.inf
    for cuts in itertools.product([False, True], repeat=len(run) - 1):
        parts, part = [], [run[0].num_tokens]
        for item, cut in zip(run[1:], cuts, strict=True):
            if cut:
                parts.append(sum(part))
                part = []
            part.append(item.num_tokens)
        parts.append(sum(part))
        total = 0.0
        for tokens in parts:
            graph = min(cost for budget, cost in costs.graph.items() if budget >= tokens)
            total += min(graph, EAGER_MARGIN * costs.eager_cost(tokens))
        best = min(best, total)
    return best


increasing = st.lists(st.floats(0.1, 20), min_size=4, max_size=4).map(
    lambda steps: dict(zip(BUDGETS, itertools.accumulate(steps), strict=True))
)
eager_points = st.one_of(
    st.just(()),
    st.tuples(st.floats(0.1, 60)).map(lambda c: ((4, c[0]),)),
    st.tuples(st.floats(0.1, 30), st.floats(0.1, 60)).map(lambda c: ((4, c[0]), (64, c[0] + c[1]))),
)
cost_tables = st.builds(CostTable, increasing, eager_points)
small = st.lists(st.builds(spec, st.integers(1, 24), st.integers(1, 3)), min_size=1, max_size=7)


class TestPlan:
    @given(small, cost_tables)
    def test_each_run_is_cut_at_the_least_cost(self, items: list[EncoderItemSpec], costs: CostTable) -> None:
        limit = PackLimits(64, 4, 8)
        batches = plan_batches(items, BUDGETS, limit, costs)
        least = sum(brute_force([items[i] for i in run], costs) for run in pack_greedily(items, limit))
        assert cost_of(batches, items, costs) == pytest.approx(least, rel=1e-9)

    @given(
        st.lists(st.builds(spec, st.integers(1, 90), st.integers(1, 12)), max_size=14),
        cost_tables,
        st.integers(1, 5),
        st.integers(0, 9),
        st.integers(0, 14),
    )
    def test_no_item_lost_order_kept_no_limit_passed(
        self, items: list[EncoderItemSpec], costs: CostTable, max_items: int, max_item_seqs: int, max_seqs: int
    ) -> None:
        batches = plan_batches(items, BUDGETS, PackLimits(64, max_items, max_seqs), costs, max_item_seqs)
        assert sorted(i for b in batches for i in b.indices) == list(range(len(items)))
        packed = [b for b in batches if b.reason in (None, "cheaper_eager")]
        assert [i for b in packed for i in b.indices] == sorted(i for b in packed for i in b.indices)
        for batch in batches:
            chosen = [items[i] for i in batch.indices]
            tokens, seqs = sum(s.num_tokens for s in chosen), sum(s.num_seqs for s in chosen)
            over_item = max_item_seqs and chosen[0].num_seqs > max_item_seqs
            over_seqs = max_seqs and chosen[0].num_seqs > max_seqs
            if batch.budget is not None:
                assert batch.reason is None
                assert batch.budget == find_budget(BUDGETS, tokens)
            if batch in packed:
                assert batch.budget is not None or batch.reason == "cheaper_eager"
                assert len(batch.indices) <= max_items
                assert not max_seqs or seqs <= max_seqs
                assert not max_item_seqs or all(s.num_seqs <= max_item_seqs for s in chosen)
            else:
                assert len(batch.indices) == 1
                expected = "t_over_capture" if over_item else "tokens_over_budget" if tokens > 64 else None
                assert batch.reason == (expected or ("batch_over_segments" if over_seqs else None))

    def test_padding_is_cut_away(self) -> None:
        items = [spec(64), spec(8)]
        costs = CostTable({8: 8.0, 64: 64.0, 128: 128.0})
        assert plan_batches(items, [8, 64, 128], PackLimits(128), costs) == [Batch((0,), 64), Batch((1,), 8)]

    def test_a_tie_goes_to_one_replay(self) -> None:
        costs = CostTable({16: 5.0, 32: 10.0})
        assert plan_batches([spec(16), spec(16)], [16, 32], PackLimits(32), costs) == [Batch((0, 1), 32)]

    def test_a_tie_goes_to_the_graph(self) -> None:
        costs = CostTable({16: 5.0}, ((1, 5.0),))
        assert plan_batches([spec(16)], [16], PackLimits(16), costs) == [Batch((0,), 16)]

    def test_an_eager_run_where_it_is_cheaper(self) -> None:
        costs = CostTable({16: 5.0, 64: 20.0}, ((16, 6.0), (64, 12.0)))
        batches = plan_batches([spec(16), spec(17), spec(20)], [16, 64], PackLimits(64), costs)
        assert batches == [Batch((0, 1, 2), None, "cheaper_eager")]

    @pytest.mark.parametrize(("eager", "budget"), [(8.6, None), (8.7, 64), (10.0, 64)])
    def test_an_eager_run_must_save_more_than_the_margin(self, eager: float, budget: int | None) -> None:
        costs = CostTable({64: 10.0}, ((1, eager),))
        (batch,) = plan_batches([spec(40)], [64], PackLimits(64), costs)
        assert (batch.budget, batch.reason) == (budget, None if budget else "cheaper_eager")

    def test_with_default_budgets_a_large_batch_keeps_its_graph(self) -> None:
        """An eager run of the exact size in proportion to a replay of its budget, as on a full GPU."""
        budgets = default_token_budgets("cuda")
        costs = CostTable({b: b / 150 for b in budgets}, ((0, 0.0), (15_000, 100.0)))
        for tokens in range(129, 16_385, 37):
            (batch,) = plan_batches([spec(tokens)], budgets, PackLimits(16_384), costs)
            assert batch.budget == find_budget(budgets, tokens)

    def test_long_items_leave_before_their_neighbours_are_packed(self) -> None:
        items = [spec(4, 2), spec(9, 9), spec(4, 2), spec(65), spec(4, 2)]
        batches = plan_batches(items, [16, 64], PackLimits(64, 4, 32), CostTable.by_size([16, 64]), 8)
        assert batches == [
            Batch((1,), None, "t_over_capture"),
            Batch((3,), None, "tokens_over_budget"),
            Batch((0, 2, 4), 16),
        ]

    def test_nothing(self) -> None:
        assert plan_batches([], [16], PackLimits(16), CostTable.by_size([16])) == []
