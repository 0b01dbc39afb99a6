"""Replicas and a node that are killed under load: clients that ask again get right answers, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from benchmarks.checked import CheckedLoad
from tests.cluster.cluster import POOLS, ServiceCluster, eventually

pytestmark = pytest.mark.cluster


def assert_nothing_lost(load: CheckedLoad) -> None:
    assert load.count("wrong", "failed", "hang") == 0, load.outcomes()
    assert load.lost == []
    assert load.count("right") > 0


@pytest.mark.parametrize("name", [*POOLS, "Ingress"])
def test_a_killed_replica(
    cluster: ServiceCluster, load: Callable[[], CheckedLoad], record: Callable[[str, object], None], name: str
) -> None:
    with load() as running:
        eventually(lambda: running.count("right") >= 10)
        began = time.monotonic()
        cluster.kill(name)
        seconds = eventually(cluster.whole)
        after = time.monotonic()
        eventually(lambda: sum(running.outcomes(after).values()) >= 10)
    told = {"full_health_s": round(seconds, 2), "attempts_from_then_on": running.outcomes(began)}
    record(f"kill -9 of {name}", {**told, "attempts_after_full_health": running.outcomes(after)})
    assert_nothing_lost(running)


def test_a_lost_node(
    cluster: ServiceCluster, load: Callable[[], CheckedLoad], record: Callable[[str, object], None]
) -> None:
    with load() as running:
        eventually(lambda: running.count("right") >= 10)
        began = time.monotonic()
        replicas = cluster.remove_node()
        seconds = eventually(cluster.whole)
        after = time.monotonic()
        eventually(lambda: sum(running.outcomes(after).values()) >= 10)
    told = {
        "pool_replicas": replicas,
        "full_health_s": round(seconds, 2),
        "attempts_from_then_on": running.outcomes(began),
    }
    record("a node lost", told)
    assert replicas > 0
    assert_nothing_lost(running)
    cluster.restore_node()
