"""Metrics that a test can read."""

from __future__ import annotations

from collections import defaultdict

import pytest

from app.metrics import METRICS

Recorded = dict[str, dict[tuple[str, ...], list[float]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Metric name -> tag values -> all values recorded, in order; takes the place of Serve's instruments."""
    values: Recorded = defaultdict(lambda: defaultdict(list))
    for metric in METRICS:

        def record(value: float, tags: dict[str, str], name: str = metric.name) -> None:
            values[name][tuple(tags.values())].append(value)

        monkeypatch.setitem(vars(metric), "_record", record)
        monkeypatch.setitem(vars(metric), "_series", {})
    return values
