"""What a replica measures, as Ray Serve metrics; `app/metrics.py` has the ingress's and the whole table.

Counters are added up over a batch before they are recorded: one record costs microseconds, and a batch has many items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ray.serve import metrics

from deployments.protocol import EncodeResult, PoolName, Refusal

# Seconds, from a replay of one small image to the default deadline.
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
MAX_SERIES = 256
NONE = "none"


@dataclass(frozen=True)
class Metric:
    """One metric. Serve adds the tags `application`, `deployment` and `replica`.

    tags: what tells its series apart, each with few values. buckets: upper bounds, of a histogram only.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    tags: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """The names under which Prometheus finds it."""
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        return tuple(f"ray_{self.name}{suffix}" for suffix in suffixes[self.kind])

    def record(self, value: float, *tags: str) -> None:
        """Adds to a counter, sets a gauge, or observes in a histogram. `tags` are the values of `self.tags`, in order.

        Combinations past the first `MAX_SERIES` are recorded as "other".
        """
        if self.kind == "counter" and value == 0:
            return
        if tags not in self._series:
            if len(self._series) >= MAX_SERIES:
                tags = ("other",) * len(self.tags)
            self._series[tags] = dict(zip(self.tags, tags, strict=True))
        self._record(value, self._series[tags])

    @cached_property
    def _series(self) -> dict[tuple[str, ...], dict[str, str]]:
        return {}

    @cached_property
    def _record(self) -> Callable[[float, dict[str, str]], None]:
        # Made at first use: only inside a replica does Serve know its tags.
        tags: Any = self.tags  # Serve annotates tuples of one.
        if self.kind == "counter":
            return metrics.Counter(self.name, self.meaning, tags).inc
        if self.kind == "gauge":
            return metrics.Gauge(self.name, self.meaning, tags).set
        return metrics.Histogram(self.name, self.meaning, list(self.buckets), tags).observe


ITEMS = Metric(
    "foveal_items",
    "counter",
    ("pool", "execution", "reason"),
    "items encoded; execution: graph or eager; reason: why eagerly, else none",
)
DROPPED = Metric(
    "foveal_items_dropped",
    "counter",
    ("pool", "cause"),
    "items that a replica did not encode: cancelled or past their deadline while they waited, overloaded (queue full), "
    "internal (this item failed), fault (the replica broke)",
)
HITS = Metric("foveal_graph_hits", "counter", ("pool", "budget"), "items served by a replay of that budget's graph")
MISSES = Metric(
    "foveal_graph_misses",
    "counter",
    ("pool", "budget"),
    "items that ran eagerly; budget: the smallest one captured with room for the item alone, none if there is none",
)
BUDGET_TOKENS = Metric(
    "foveal_graph_budget_tokens", "counter", ("pool",), "budgets of all replays; over the used tokens: padding ratio"
)
USED_TOKENS = Metric("foveal_graph_used_tokens", "counter", ("pool",), "tokens of the items in all replays")
QUEUE_ITEMS = Metric("foveal_queue_items", "gauge", ("pool",), "items that wait in a replica")
QUEUE_TOKENS = Metric("foveal_queue_tokens", "gauge", ("pool",), "tokens of the items that wait in a replica")
QUEUE_SECONDS = Metric(
    "foveal_queue_seconds",
    "histogram",
    ("pool",),
    "an item: from its frames to its batch, in ingress and batcher",
    BUCKETS_S,
)
ENCODE_SECONDS = Metric(
    "foveal_encode_seconds", "histogram", ("pool",), "a batch: from its start to its embeddings on the host", BUCKETS_S
)
BUSY_SECONDS = Metric("foveal_busy_seconds", "counter", ("pool",), "seconds that the device worked on batches")
REPLICA_METRICS = (
    ITEMS,
    DROPPED,
    HITS,
    MISSES,
    BUDGET_TOKENS,
    USED_TOKENS,
    QUEUE_ITEMS,
    QUEUE_TOKENS,
    QUEUE_SECONDS,
    ENCODE_SECONDS,
    BUSY_SECONDS,
)


class ReplicaMetrics:
    """Records what the batcher of one replica tells.

    Args:
        token_budgets: those captured, ascending.
        stats: counters since the start, of which `budget_tokens` and `used_tokens` are taken.
    """

    def __init__(self, pool: PoolName, token_budgets: Sequence[int], stats: Callable[[], Mapping[str, Any]]) -> None:
        self._pool, self._budgets, self._stats = pool, token_budgets, stats
        self._recorded = {"budget_tokens": 0, "used_tokens": 0}

    def batch(self, tokens: Sequence[int], results: Sequence[EncodeResult], encode_s: float, busy_s: float) -> None:
        """One batch is done. tokens: of each item. Called from one thread only."""
        items: Counter[tuple[str, str]] = Counter()
        hits: Counter[str] = Counter()
        misses: Counter[str] = Counter()
        for size, result in zip(tokens, results, strict=True):
            if result.execution is None:
                continue
            items[result.execution, result.reason or NONE] += 1
            QUEUE_SECONDS.record(result.queue_s, self._pool)
            if result.execution == "graph":
                hits[str(result.budget)] += 1
            else:
                misses[str(next((budget for budget in self._budgets if budget >= size), NONE))] += 1
        for (execution, reason), count in items.items():
            ITEMS.record(count, self._pool, execution, reason)
        for metric, by_budget in ((HITS, hits), (MISSES, misses)):
            for budget, count in by_budget.items():
                metric.record(count, self._pool, budget)
        stats = self._stats()
        for metric, name in ((BUDGET_TOKENS, "budget_tokens"), (USED_TOKENS, "used_tokens")):
            metric.record(stats[name] - self._recorded[name], self._pool)
            self._recorded[name] = stats[name]
        ENCODE_SECONDS.record(encode_s, self._pool)
        BUSY_SECONDS.record(busy_s, self._pool)

    def dropped(self, cause: Refusal) -> None:
        DROPPED.record(1, self._pool, cause)

    def waiting(self, items: int, tokens: int) -> None:
        """What is queued now."""
        QUEUE_ITEMS.record(items, self._pool)
        QUEUE_TOKENS.record(tokens, self._pool)
