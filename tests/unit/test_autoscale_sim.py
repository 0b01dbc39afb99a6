"""The simulator against queueing theory and by its books."""

from __future__ import annotations

import json
import random
from xml.etree import ElementTree

import pytest

from benchmarks.autoscale_sim import (
    RESULTS,
    Autoscaler,
    Pool,
    Scaling,
    by_requests,
    by_work,
    draw,
    measured_pools,
    simulate,
    traces,
)
from deployments.protocol import Size
from encoder.budgets import CostTable, PackLimits

ONE = Size("image", 64, 1)
SINGLE = Pool("image", PackLimits(64, 1, 1), CostTable({64: 0.1}), max_queued=10**9)


def arrivals(rate: float, seconds: float) -> list[tuple[float, Size]]:
    rng, at, out = random.Random(1), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        out.append((at, ONE))
    return out


def test_one_replica_without_batching_waits_as_an_m_d_1_queue() -> None:
    fixed = Scaling(max_replicas=1, initial_replicas=1)
    outcome = simulate(arrivals(5.0, 2000), SINGLE, by_requests(1), 2000, fixed)
    waits = [wait for _, wait in outcome.queue_s]
    # rho = 0.5, service 0.1 s: rho * service / (2 (1 - rho)) = 0.05 s
    assert sum(waits) / len(waits) == pytest.approx(0.05, rel=0.1)
    assert outcome.replica_seconds == pytest.approx(2000, abs=1)


@pytest.mark.parametrize("policy", [by_requests(2), by_work(0.2)])
def test_both_policies_grow_to_the_load_and_shrink(policy: object) -> None:
    busy = [a for a in arrivals(35.0, 200) if a[0] < 150]
    outcome = simulate(busy, SINGLE, policy, 400, Scaling(initial_replicas=1))  # type: ignore[arg-type]
    assert len(outcome.queue_s) + outcome.refused == len(busy)
    assert min(wait for _, wait in outcome.queue_s) >= 0
    counts = dict(outcome.replicas)
    assert counts[140] >= 4  # 3.5 replicas' worth of work
    assert counts[399] == 1
    assert outcome.replica_seconds == pytest.approx(sum(counts.values()), rel=0.05)


def test_bounds_and_delays() -> None:
    scaler = Autoscaler(Scaling(min_replicas=1, max_replicas=4, upscale_delay_s=5, downscale_delay_s=60))
    assert [scaler.decide(t, 9, 2) for t in (0, 4, 5)] == [2, 2, 4]
    assert [scaler.decide(t, 0, 4) for t in (10, 69, 70)] == [4, 4, 1]
    # A wish that changes its direction starts anew.
    assert [scaler.decide(t, wanted, 2) for t, wanted in ((80, 3), (84, 1), (85, 3), (89, 3), (90, 3))] == [
        2,
        2,
        2,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("pool", "size", "row", "column"),
    [
        ("image", Size("image", 49, 1), "ours as served: GPU time", "1x224^2"),
        ("image", Size("image", 1024, 1), "ours as served: GPU time", "1x1024^2"),
        ("video", Size("video", 784, 16), "ours as served: GPU time", "16x224^2"),
        ("video", Size("video", 1568, 8), "ours as served: GPU time", "video t=8 448^2"),
        ("eager", Size("video", 6272, 32), "ours as served: GPU time", "video t=32 448^2"),
    ],
)
def test_the_measured_pools_cost_what_was_measured(pool: str, size: Size, row: str, column: str) -> None:
    rows = json.loads((RESULTS / "encoder-full-cuda.json").read_text())["rows"]
    assert measured_pools()[pool].seconds([size]) == pytest.approx(rows[row][column]["ms"] / 1000, rel=0.03)


def test_traces_are_seeded_and_the_flood_is_heavier() -> None:
    steady, flood = traces()[0], traces()[3]
    assert steady.arrivals("eager", 0) == steady.arrivals("eager", 0)
    assert steady.arrivals("eager", 0) != steady.arrivals("eager", 1)
    during = [size for at, size in flood.arrivals("eager", 0) if 100 <= at < 180]
    assert sum(size.segments == 64 for size in during) == pytest.approx(15 * 80, rel=0.1)


def test_the_drawing_is_an_svg_with_a_line_for_each_series() -> None:
    outcome = simulate(arrivals(5.0, 50), SINGLE, by_work(0.2), 50)
    root = ElementTree.fromstring(draw({("a", "x"): [outcome], ("a", "y"): [outcome]}, ["x", "y"]))
    assert len(root.findall(".//{*}polyline")) == 4
