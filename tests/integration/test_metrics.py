"""What Prometheus would scrape from the service: exact counts after known requests."""

from __future__ import annotations

import math
import time
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import METRICS
from benchmarks.service import Service
from deployments.metrics import BUCKETS_S
from tests.integration.media import mp4, png

pytestmark = pytest.mark.integration

Series = tuple[str, tuple[tuple[str, str], ...]]
REST_S = 6.0  # Several times the interval at which the service under test exports.


def read(service: Service) -> Counter[Series]:
    """(exported name, the metric's own tags) -> value, summed over replicas."""
    exported = {name: metric for metric in METRICS for name in metric.exported}
    values: Counter[Series] = Counter()
    for family in text_string_to_metric_families(service.metrics()):
        for sample in family.samples:
            if sample.name in exported:
                assert sample.labels.keys() >= {"application", "deployment", "replica"}
                tags = exported[sample.name].tags
                own = sorted((k, v) for k, v in sample.labels.items() if k in tags or k == "le")
                values[sample.name, tuple(own)] += sample.value
    return values


def at_rest(service: Service) -> Counter[Series]:
    """The values once they no longer change: what earlier requests did has been exported."""
    limit, values, since = time.monotonic() + 120, read(service), time.monotonic()
    while time.monotonic() - since < REST_S:
        assert time.monotonic() < limit
        time.sleep(0.5)
        if (now := read(service)) != values:
            values, since = now, time.monotonic()
    return values


def series(name: str, **tags: str) -> Series:
    return f"ray_foveal_{name}", tuple(sorted(tags.items()))


def test_counts_are_exact_and_agree_with_server_timing(service: Service, client: httpx.Client) -> None:
    image, clip, long = png(256, 256, 21).data, mp4(96, 64, 6, 22).data, mp4(96, 96, 17, 23).data
    before = at_rest(service)
    answers = [
        *(client.post("/v1/encode", content=image) for _ in range(3)),
        client.post("/v1/encode", files=[("file", ("a", image)), ("file", ("b", clip))]),
        client.post("/v1/encode", content=long),
    ]
    refused = [
        client.post("/v1/encode", content=b"text"),
        client.post("/v1/encode", content=image, params={"fsp": 1}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert [answer.status_code for answer in refused] == [415, 422]
    received = sum(int(answer.request.headers["content-length"]) for answer in (*answers, *refused))
    sent = sum(len(answer.content) for answer in (*answers, *refused))

    gained = at_rest(service)
    gained.subtract(before)
    busy = {pool: gained.pop(series("busy_seconds_total", pool=pool)) for pool in ("image", "video", "eager")}
    assert all(0 < seconds < 60 for seconds in busy.values())
    assert {key: value for key, value in gained.items() if value and key[0].endswith(("_total", "_count"))} == {
        series("items_total", pool="image", execution="graph", reason="none"): 4,
        series("items_total", pool="video", execution="graph", reason="none"): 1,
        series("items_total", pool="eager", execution="eager", reason="t_over_capture"): 1,
        series("graph_hits_total", pool="image", budget="64"): 4,
        series("graph_hits_total", pool="video", budget="64"): 1,
        series("graph_misses_total", pool="eager", budget="none"): 1,
        series("graph_budget_tokens_total", pool="image"): 256,
        series("graph_budget_tokens_total", pool="video"): 64,
        series("graph_used_tokens_total", pool="image"): 256,
        series("graph_used_tokens_total", pool="video"): 18,
        series("queue_seconds_count", pool="image"): 4,
        series("queue_seconds_count", pool="video"): 1,
        series("queue_seconds_count", pool="eager"): 1,
        series("encode_seconds_count", pool="image"): 4,
        series("encode_seconds_count", pool="video"): 1,
        series("encode_seconds_count", pool="eager"): 1,
        series("decode_seconds_count"): 6,
        series("format_seconds_count"): 5,
        series("total_seconds_count"): 5,
        series("bytes_in_total"): received,
        series("bytes_out_total"): sent,
        series("errors_total", code="unsupported_media"): 1,
        series("errors_total", code="invalid_option"): 1,
    }

    timings = [
        {name: float(ms) / 1000 for name, ms in (part.split(";dur=") for part in header.split(", "))}
        for header in (answer.headers["server-timing"] for answer in answers)
    ]
    rounding = 0.00005
    for timing in timings:
        assert sum(timing.values()) - timing["total"] <= timing["total"] + 6 * rounding
        assert timing["total"] > 0
    # Ray rebuilds a histogram's sum from the middles of its buckets, so the buckets are what can be compared.
    for stage, told in (
        ("total_seconds", [timing["total"] for timing in timings]),
        ("format_seconds", [timing["format"] for timing in timings]),
        ("queue_seconds", [timings[-1]["queue"]]),
        ("encode_seconds", [timings[-1]["encode"]]),
    ):
        pool = {} if len(told) > 1 else {"pool": "eager"}
        buckets = {
            float(dict(tags)["le"]): value
            for (name, tags), value in gained.items()
            if name == f"ray_foveal_{stage}_bucket" and dict(tags).items() >= pool.items()
        }
        assert set(buckets) == {*BUCKETS_S, math.inf}
        for bound, count in buckets.items():
            least, most = (sum(s <= bound + slack for s in told) for slack in (-rounding, rounding))
            assert least <= count <= most, (stage, bound)
