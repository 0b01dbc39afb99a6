"""What an operator changes while clients ask: no request may notice."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy

import httpx
import pytest

from benchmarks.checked import Answer, CheckedLoad, Request
from tests.cluster.cluster import POOLS, Config, ServiceCluster, deployment, eventually
from tests.integration.media import png

pytestmark = pytest.mark.cluster
Record = Callable[[str, object], None]


def changed_limits(config: Config) -> None:
    """`args:` are the constructors' arguments: every replica is replaced."""
    config["applications"][0]["args"]["limits"]["max_items"] = 7


def more_replicas(config: Config) -> None:
    deployment(config, "ImageGraph")["num_replicas"] = 2


def fewer_replicas(config: Config) -> None:
    deployment(config, "ImageGraph")["num_replicas"] = 1


def other_batches(config: Config) -> None:
    deployment(config, "ImageGraph")["user_config"] = {"max_batch_size": 3, "max_queued_items": 200}


def other_limits(config: Config) -> None:
    deployment(config, "Ingress")["user_config"] = {"max_items": 2}


@pytest.mark.parametrize(
    ("change", "replaces"),
    [
        (changed_limits, True),
        (more_replicas, False),
        (fewer_replicas, False),
        (other_batches, False),
        (other_limits, False),
    ],
)
def test_an_update_fails_no_request(
    cluster: ServiceCluster,
    load: Callable[[], CheckedLoad],
    record: Record,
    change: Callable[[Config], None],
    replaces: bool,
) -> None:
    config = deepcopy(cluster.config)
    change(config)
    names = (*POOLS, "Ingress")
    before = {name: {r["pid"] for r in cluster.replicas(name)} for name in names}
    with load() as running:
        eventually(lambda: running.count("right") >= 10)
        seconds = cluster.deploy(config)
        after = time.monotonic()
        eventually(lambda: sum(running.outcomes(after).values()) >= 20)
    record(f"update: {change.__name__}", {"seconds": round(seconds, 1), **running.summary()})
    assert set(running.outcomes()) == {"right"}
    assert running.lost == []
    kept = {name: before[name] & {r["pid"] for r in cluster.replicas(name)} for name in names}
    assert all(bool(pids) != replaces for pids in kept.values()), kept
    if change is other_batches:
        pools = httpx.get(f"{cluster.url}/v1/pools", timeout=30).json()["pools"]
        assert {p["name"]: p["max_batch_size"] for p in pools} == {"image": 3, "video": 8, "eager": 4}
    if change is other_limits:
        files = [("file", (f"{i}.png", png(64, 64, i).data, "image/png")) for i in range(3)]
        codes = [httpx.post(f"{cluster.url}/v1/encode", files=files[:n], timeout=60).status_code for n in (2, 3)]
        assert codes == [200, 413]


def test_pools_beside_the_ingress_are_updated_and_move_away(
    cluster: ServiceCluster, load: Callable[[], CheckedLoad], record: Record
) -> None:
    """There calls go by lanes, which must end before their replicas do."""
    apart, beside = deepcopy(cluster.config), deepcopy(cluster.config)
    for name in POOLS:
        deployment(beside, name)["ray_actor_options"]["label_selector"] = {"foveal": "ingress"}
    updated = deepcopy(beside)
    changed_limits(updated)
    updated["applications"][0]["args"]["limits"]["max_items"] += 1

    def lane_calls() -> dict[str, int]:
        return {p["name"]: p["lane_calls"] for p in httpx.get(f"{cluster.url}/v1/pools", timeout=30).json()["pools"]}

    assert set(lane_calls().values()) == {0}
    seconds = []
    with load() as running:
        for config in (beside, updated, apart):
            seconds.append(round(cluster.deploy(config), 1))
            after = time.monotonic()
            eventually(lambda: sum(running.outcomes(after).values()) >= 20)  # noqa: B023
            if config is not apart:
                eventually(lambda: min(lane_calls().values()) > 0)
    record("update: pools beside the ingress", {"seconds": seconds, **running.summary()})
    assert set(running.outcomes()) == {"right"}
    assert running.lost == []


def test_a_pool_scales_to_zero_and_back(
    cluster: ServiceCluster, requests: list[Request], references: dict[str, Answer], record: Record
) -> None:
    config = deepcopy(cluster.config)
    eager = deployment(config, "Eager")
    del eager["num_replicas"]
    eager["autoscaling_config"] = {
        "min_replicas": 0,
        "max_replicas": 1,
        "look_back_period_s": 2,
        "upscale_delay_s": 0,
        "downscale_delay_s": 2,
        "downscale_to_zero_delay_s": 4,
        "policy": {
            "policy_function": "deployments.autoscaling:QueuedWorkPolicy",
            "policy_kwargs": {"target_queued": 1000},
        },
    }
    cluster.deploy(config)

    def asleep() -> bool:
        """No replica in any state; and the service is well all the while."""
        assert cluster.health() == 200
        return cluster.replica_states("Eager") == {}

    first = eventually(asleep)
    (pool,) = (p for p in httpx.get(f"{cluster.url}/v1/pools", timeout=30).json()["pools"] if p["name"] == "eager")
    assert (pool["state"], pool["replicas"]) == ("idle", 0)
    for _ in range(30):  # three seconds in which looking must not wake it
        assert asleep()
        time.sleep(0.1)
    long_video = requests[-1]
    started = time.monotonic()
    answer = httpx.post(f"{cluster.url}/v1/encode", content=long_video.data, timeout=60)
    woken = time.monotonic() - started
    assert Answer.of(answer) == references[long_video.name]
    record("to zero and back", {"to_zero_s": round(first, 1), "first_answer_s": round(woken, 2)})
    eventually(asleep)
