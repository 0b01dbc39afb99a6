"""The table of metrics, the instruments made of it, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve import metrics as serve_metrics

from app.metrics import METRICS
from deployments.metrics import BUCKETS_S, MAX_SERIES, Metric, ReplicaMetrics
from deployments.protocol import EncodeResult
from tests.unit.conftest import Recorded

BY_NAME = {metric.name: metric for metric in METRICS}


class Instrument:
    made: list[Instrument] = []  # noqa: RUF012

    def __init__(self, name: str, description: str, *rest: Any) -> None:
        self.arguments, self.values = (name, description, *rest), list[tuple[float, dict[str, str]]]()
        self.made.append(self)

    def record(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((value, tags))

    inc = set = observe = record


def test_names_are_unique_and_tags_are_few() -> None:
    assert len(BY_NAME) == len(METRICS)
    assert {tag for metric in METRICS for tag in metric.tags} == {
        "pool",
        "execution",
        "reason",
        "cause",
        "budget",
        "code",
        "result",
    }
    assert all((metric.kind == "histogram") == bool(metric.buckets) for metric in METRICS)
    assert list(BUCKETS_S) == sorted(set(BUCKETS_S))


@pytest.mark.parametrize(
    ("kind", "serve_class", "rest"),
    [
        ("counter", "Counter", (("a", "b"),)),
        ("gauge", "Gauge", (("a", "b"),)),
        ("histogram", "Histogram", ([0.1, 1.0], ("a", "b"))),
    ],
)
def test_a_metric_records_through_serve(
    kind: Any, serve_class: str, rest: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Instrument, "made", [])
    monkeypatch.setattr(serve_metrics, serve_class, Instrument)
    metric = Metric("foveal_x", kind, ("a", "b"), "meaning", (0.1, 1.0) if kind == "histogram" else ())
    assert Instrument.made == []
    metric.record(2, "x", "y")
    metric.record(0, "x", "y")
    (instrument,) = Instrument.made
    assert instrument.arguments == ("foveal_x", "meaning", *rest)
    tags = {"a": "x", "b": "y"}
    assert instrument.values == ([(2, tags)] if kind == "counter" else [(2, tags), (0, tags)])
    with pytest.raises(ValueError, match="zip"):
        metric.record(1, "only one")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_ray_takes_every_metric(metric: Metric) -> None:
    made = Metric(metric.name, metric.kind, metric.tags, metric.meaning, metric.buckets)
    made.record(1.5, *metric.tags)


def test_tags_cannot_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instrument, "made", [])
    monkeypatch.setattr(serve_metrics, "Counter", Instrument)
    metric = Metric("foveal_x", "counter", ("a",), "meaning")
    for i in range(2 * MAX_SERIES):
        metric.record(1, str(i))
    metric.record(1, "0")
    values = [tags["a"] for _, tags in Instrument.made[0].values]
    assert values == [*map(str, range(MAX_SERIES)), *["other"] * MAX_SERIES, "0"]


def result(budget: int | None, reason: str | None = None, queue_s: float = 0.0) -> EncodeResult:
    execution: Any = "eager" if budget is None else "graph"
    return EncodeResult(None, "float32", "image", execution, reason, budget, queue_s)


def test_what_a_batch_records(recorded: Recorded) -> None:
    stats = {"budget_tokens": 0, "used_tokens": 0, "hits": 0}
    metrics = ReplicaMetrics("image", (64, 128), lambda: stats)
    stats.update(budget_tokens=192, used_tokens=150)
    metrics.batch(
        [40, 20, 90, 64, 129, 7],
        [
            result(64, queue_s=0.5),
            result(64, queue_s=0.25),
            result(128),
            result(None, "cheaper_eager"),
            result(None, "tokens_over_budget"),
            EncodeResult(None, "float32", "image", error="internal"),
        ],
        0.125,
        0.0625,
    )
    stats.update(budget_tokens=256, used_tokens=200)
    metrics.batch([50], [result(64, queue_s=1.0)], 0.0625, 0.03125)
    metrics.batch([65], [result(None, "cheaper_eager")], 0.25, 0.125)
    assert recorded == {
        "foveal_items": {
            ("image", "graph", "none"): [3, 1],
            ("image", "eager", "cheaper_eager"): [1, 1],
            ("image", "eager", "tokens_over_budget"): [1],
        },
        "foveal_graph_hits": {("image", "64"): [2, 1], ("image", "128"): [1]},
        "foveal_graph_misses": {("image", "64"): [1], ("image", "128"): [1], ("image", "none"): [1]},
        "foveal_graph_budget_tokens": {("image",): [192, 64]},
        "foveal_graph_used_tokens": {("image",): [150, 50]},
        "foveal_queue_seconds": {("image",): [0.5, 0.25, 0.0, 0.0, 0.0, 1.0, 0.0]},
        "foveal_busy_seconds": {("image",): [0.0625, 0.03125, 0.125]},
        "foveal_encode_seconds": {("image",): [0.125, 0.0625, 0.25]},
    }


DASHBOARD = json.loads((Path(__file__).parents[2] / "configs" / "grafana.json").read_text())


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


@pytest.mark.parametrize("expr", list(expressions()))
def test_every_expression_names_exported_metrics_and_their_tags(expr: str) -> None:
    exported = {name: metric for metric in METRICS for name in metric.exported}
    used = re.findall(r"\bray_\w+", expr)
    assert used
    assert set(used) <= set(exported), expr
    tags = {tag for name in used for tag in exported[name].tags} | {"application", "deployment", "replica", "le"}
    grouped = {tag.strip() for group in re.findall(r"\bby \(([^)]*)\)", expr) for tag in group.split(",")}
    assert grouped <= tags, expr
    assert set(re.findall(r"(\w+)=~?\"", expr)) <= tags, expr


def test_the_dashboard_shows_every_metric() -> None:
    shown = set(re.findall(r"\bray_\w+", " ".join(expressions())))
    assert [metric.name for metric in METRICS if shown.isdisjoint(metric.exported)] == []


def test_panels_have_their_own_ids_and_places() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
