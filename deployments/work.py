"""How much work a replica has accepted and not finished, predicted from the costs that its planner goes by."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future

from deployments.autoscaling import BUSY, QUEUED_WORK
from deployments.protocol import EncodeResult, Size
from encoder.budgets import CostTable, PackLimits, pack_greedily, plan_batches, timed_eager_sizes
from encoder.defs import EncoderItemSpec
from encoder.runner import EncoderRunner

_BEHIND_S = 5.0  # an ingress that has not called for so long has nothing waiting
_EAGER_TOKENS = 8192  # of the largest eager run that is timed: past it, time grows evenly


def predicted_work(sizes: Sequence[Size], costs: CostTable, limits: PackLimits) -> float:
    """What the items cost in the unit of `costs`, in the batches that they would run in were they all that waits.

    Without graphs a batch costs what an eager run of its tokens does. An item that no graph takes, where eager runs
    have no known cost, counts by its tokens as the largest graph does.
    """
    specs = [EncoderItemSpec(4 * size.tokens, size.tokens, size.segments) for size in sizes]
    if not costs.graph:
        return sum(costs.eager_cost(sum(specs[i].num_tokens for i in run)) for run in pack_greedily(specs, limits))
    largest = max(costs.graph)
    work = 0.0
    for batch in plan_batches(specs, sorted(costs.graph), limits, costs):
        if batch.budget is not None:
            work += costs.graph[batch.budget]
        else:
            tokens = sum(specs[i].num_tokens for i in batch.indices)
            eager = costs.eager_cost(tokens)
            work += eager if eager < math.inf else costs.graph[largest] * tokens / largest
    return work


class WorkMeter:
    """What is unfinished in one replica, and what waits for it in the ingress. Safe to call from any thread."""

    def __init__(self, costs: CostTable, limits: PackLimits) -> None:
        self._costs, self.limits = costs, limits
        self._unfinished: dict[Future[EncodeResult], Size] = {}
        self._behind: dict[str, tuple[float, int]] = {}

    def add(self, size: Size, future: Future[EncodeResult]) -> None:
        """Counts an item until its future is done, whatever way that comes."""
        self._unfinished[future] = size
        future.add_done_callback(self._unfinished.pop)

    def note_behind(self, ingress: str, tokens: int) -> None:
        """What waits in an ingress replica beyond the call that it just made; the next call tells anew."""
        self._behind[ingress] = (time.monotonic(), tokens)

    def report(self) -> dict[str, float]:
        """For Serve's `record_autoscaling_stats`; `busy` is 0 or 1, its mean over time the utilisation."""
        sizes = list(self._unfinished.values())
        fresh = time.monotonic() - _BEHIND_S
        self._behind = {ingress: noted for ingress, noted in list(self._behind.items()) if noted[0] > fresh}
        behind = sum(tokens for _, tokens in self._behind.values())
        if behind:
            room = self.limits.max_tokens
            sizes += [Size("image", min(room, behind - start), 1) for start in range(0, behind, room)]
        return {QUEUED_WORK: predicted_work(sizes, self._costs, self.limits), BUSY: float(bool(sizes))}


def cost_table(runner: EncoderRunner) -> CostTable:
    """The costs of the runner's pool: of its graphs, as measured at capture, or of eager runs where it has none."""
    return next(iter(runner.manager.costs.values()), None) or eager_costs(runner)


def eager_costs(runner: EncoderRunner) -> CostTable:
    """Seconds of eager runs by tokens, measured; on a CPU tokens, as `CostTable.by_size` has it."""
    points: tuple[tuple[int, float], ...] = ()
    if runner.encoder.device.type == "cuda":
        points = runner.manager.time_eager(timed_eager_sizes(_EAGER_TOKENS))
    return CostTable({}, points or ((0, 32.0), (1, 33.0)))
