"""Pure decisions: which budgets to capture, which one fits, how items are packed and what a batch costs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from encoder.defs import EncoderItemSpec, Reason


def generate_token_budgets(min_tokens: int, max_tokens: int, steps_per_octave: int = 1) -> list[int]:
    """Budgets from `min_tokens` up, the maximum always in.

    One step an octave gives powers of two times the minimum; more steps divide each octave evenly, in whole
    multiples of 16 tokens (64 patches, half a GEMM tile) where the octave is wide enough.

    Raises:
        ValueError: names the setting that is out of range.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens must be at least 1, got {min_tokens}")
    if max_tokens < min_tokens:
        raise ValueError(f"max_tokens ({max_tokens}) must not be below min_tokens ({min_tokens})")
    if steps_per_octave < 1:
        raise ValueError(f"steps_per_octave must be at least 1, got {steps_per_octave}")
    budgets = {max_tokens}
    octave = min_tokens
    while octave < max_tokens:
        for step in range(steps_per_octave):
            budget = octave + octave * step // steps_per_octave
            budget = -(-budget // 16) * 16 if step else budget
            if budget < max_tokens:
                budgets.add(budget)
        octave *= 2
    return sorted(budgets)


def default_token_budgets(device_type: str, min_tokens: int = 64, max_tokens: int | None = None) -> list[int]:
    """The budgets to capture where none are named: eight an octave up to 16384 tokens on CUDA, where a graph costs next
    to nothing and padding a lot; powers of two up to 1024 elsewhere."""
    if device_type == "cuda":
        return generate_token_budgets(min_tokens, max_tokens or 16384, 8)
    return generate_token_budgets(min_tokens, max_tokens or 1024)


def validate_budgets(token_budgets: Sequence[int], max_batch_size: int) -> list[int]:
    """The budgets, ascending.

    Raises:
        ValueError: names the setting that is impossible.
    """
    if not token_budgets:
        raise ValueError("token_budgets must not be empty")
    for budget in token_budgets:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ValueError(f"token_budgets must be whole numbers above 0, got {budget!r}")
    if len(set(token_budgets)) != len(token_budgets):
        raise ValueError(f"token_budgets must not repeat, got {list(token_budgets)}")
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
    return sorted(token_budgets)


def find_budget(token_budgets: Sequence[int], num_tokens: int) -> int | None:
    """The smallest of the ascending `token_budgets` with room for `num_tokens`; None if none has."""
    at = bisect.bisect_left(token_budgets, num_tokens)
    return token_budgets[at] if at < len(token_budgets) else None


@dataclass(frozen=True)
class PackLimits:
    """Limits of one batch; 0 means unchecked."""

    max_tokens: int
    max_items: int = 0
    max_seqs: int = 0

    def admit(self, tokens: int, items: int, seqs: int) -> bool:
        """Whether a batch of these totals is within every limit."""
        return (
            tokens <= self.max_tokens
            and (not self.max_items or items <= self.max_items)
            and (not self.max_seqs or seqs <= self.max_seqs)
        )


def pack_greedily(specs: Sequence[EncoderItemSpec], limits: PackLimits) -> list[list[int]]:
    """Cuts the items, in order, into runs that keep every limit. An item over a limit by itself is a run of its own."""
    runs: list[list[int]] = []
    tokens = seqs = 0
    for index, spec in enumerate(specs):
        tokens, seqs = tokens + spec.num_tokens, seqs + spec.num_seqs
        if runs and limits.admit(tokens, len(runs[-1]) + 1, seqs):
            runs[-1].append(index)
        else:
            runs.append([index])
            tokens, seqs = spec.num_tokens, spec.num_seqs
    return runs


# What an eager run must save to be chosen. More than the eighth that the larger default budgets on CUDA pad by, so
# with them a large batch keeps its graph, and the memory that an eager run would take beside it stays free.
EAGER_MARGIN = 1.15


@dataclass(frozen=True)
class CostTable:
    """Seconds (or any one unit) of a replay of each budget, and of an eager run by its tokens.

    Attention is left out of both: it depends on the segments alone, so it is the same however a batch is cut.

    eager: ascending (tokens, cost) points, interpolated linearly and extrapolated from the last two; empty: an
        eager run is never the cheaper way.
    """

    graph: Mapping[int, float]
    eager: tuple[tuple[int, float], ...] = field(default=())

    @classmethod
    def by_size(cls, token_budgets: Sequence[int]) -> CostTable:
        """Costs in tokens, where nothing was measured: the budget, and 32 tokens for the replay itself."""
        return cls({b: float(b + 32) for b in token_budgets})

    def eager_cost(self, num_tokens: int) -> float:
        if not self.eager:
            return math.inf
        if len(self.eager) == 1 or num_tokens <= self.eager[0][0]:
            return self.eager[0][1]
        at = min(bisect.bisect_left(self.eager, (num_tokens, -math.inf)), len(self.eager) - 1)
        (x0, y0), (x1, y1) = self.eager[at - 1], self.eager[at]
        return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)


_TIME_ALL_UP_TO = 1024


def timed_budgets(token_budgets: Sequence[int]) -> list[int]:
    """The budgets to time, ascending: all the small ones, every fourth of the large ones, and the largest. Beyond 1024
    tokens the GPU is full and time grows evenly, so the others can be interpolated."""
    ordered = sorted(token_budgets)
    large = [b for b in ordered if b > _TIME_ALL_UP_TO]
    return sorted({b for b in ordered if b <= _TIME_ALL_UP_TO} | set(large[3::4]) | set(large[-1:]))


def timed_eager_sizes(largest: int) -> list[int]:
    """The token counts to time eagerly, ascending: where the host's launches decide, where a GPU fills up, and the
    largest."""
    return sorted({min(64, largest), min(_TIME_ALL_UP_TO, largest), largest})


def interpolate_costs(points: Sequence[int], costs: Sequence[float], token_budgets: Sequence[int]) -> dict[int, float]:
    """A cost for every budget from those measured at the ascending `points`, linear between them and from the origin.

    A larger budget never costs less than a smaller one: noise must not make the packer prefer it.
    """
    table: dict[int, float] = {}
    floor = 0.0
    for budget in sorted(token_budgets):
        at = bisect.bisect_left(points, budget)
        cost = costs[at]
        if points[at] != budget:
            low, below = (points[at - 1], costs[at - 1]) if at else (0, 0.0)
            cost = below + (costs[at] - below) * (budget - low) / (points[at] - low)
        floor = table[budget] = max(floor, cost)
    return table


@dataclass(frozen=True)
class Batch:
    """Items to run together: through the graph of `budget`, or eagerly for `reason` if it is None."""

    indices: tuple[int, ...]
    budget: int | None
    reason: Reason | None = None


def plan_batches(
    specs: Sequence[EncoderItemSpec],
    token_budgets: Sequence[int],
    limits: PackLimits,
    costs: CostTable,
    max_item_seqs: int = 0,
) -> list[Batch]:
    """How to run the items: every index in exactly one batch, order kept within a batch.

    Items that no graph takes leave first, each as a batch of its own. The others are packed greedily; then each run
    is cut where several replays (or an eager run, taken `EAGER_MARGIN` times as dear) cost less than one padded replay.
    The cut is the optimal one: a shortest path over the positions between items.

    Args:
        token_budgets: ascending.
        max_item_seqs: segments that one item may have in a graph; 0 means unchecked.
    """
    batches: list[Batch] = []
    packable: list[int] = []
    for index, spec in enumerate(specs):
        if max_item_seqs and spec.num_seqs > max_item_seqs:
            batches.append(Batch((index,), None, "t_over_capture"))
        elif find_budget(token_budgets, spec.num_tokens) is None:
            batches.append(Batch((index,), None, "tokens_over_budget"))
        elif limits.max_seqs and spec.num_seqs > limits.max_seqs:
            batches.append(Batch((index,), None, "batch_over_segments"))
        else:
            packable.append(index)
    for run in pack_greedily([specs[i] for i in packable], limits):
        batches += _cut([packable[i] for i in run], specs, token_budgets, costs)
    return batches


def _cut(
    run: Sequence[int], specs: Sequence[EncoderItemSpec], token_budgets: Sequence[int], costs: CostTable
) -> list[Batch]:
    best: list[tuple[float, int, int | None]] = [(0.0, 0, None)]
    for end in range(1, len(run) + 1):
        options = []
        tokens = 0
        for start in range(end - 1, -1, -1):
            tokens += specs[run[start]].num_tokens
            budget = find_budget(token_budgets, tokens)
            assert budget is not None, "a run within the limits has a budget"
            eager = EAGER_MARGIN * costs.eager_cost(tokens)
            graph = costs.graph[budget]
            # A tie goes to the graph, and to the longer batch.
            choice = (eager, None) if eager < graph else (graph, budget)
            options.append((best[start][0] + choice[0], start, choice[1]))
        best.append(min(options, key=lambda option: (option[0], option[1])))
    batches: list[Batch] = []
    end = len(run)
    while end:
        _, start, budget = best[end]
        batches.append(Batch(tuple(run[start:end]), budget, None if budget is not None else "cheaper_eager"))
        end = start
    return batches[::-1]
