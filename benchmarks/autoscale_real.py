"""Autoscaling by queued work on the real service, tiny model, CPU: replicas over time while videos come in bursts.

    python -m benchmarks.autoscale_real [--json FILE]

Pictures are asked for all the time. A burst of long videos, then one of short videos: each may grow its own pool only,
and once it is over the pool must shrink to what it was. Ends with 1 if one did not. Delays are short so that it takes
minutes; a CPU's work is told in tokens, and so is the target.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.service import Service
from tests.integration.media import mp4, png

MAX_REPLICAS = 3
BURST_S = 45.0
SETTLE_S = 90.0  # by then a pool must have shrunk
PUSH_S = "1"


def settings(config: dict[str, Any]) -> None:
    """All three pools scale by the same rule; the picture pool must not need to."""
    for deployment in config["applications"][0]["deployments"]:
        deployment["ray_actor_options"]["num_cpus"] = 0.1
        if deployment["name"] == "Ingress":
            continue
        del deployment["num_replicas"]
        deployment["autoscaling_config"] = {
            "min_replicas": 1,
            "max_replicas": MAX_REPLICAS,
            "look_back_period_s": 4,
            "upscale_delay_s": 2,
            "downscale_delay_s": 8,
            "policy": {
                "policy_function": "deployments.autoscaling:QueuedWorkPolicy",
                "policy_kwargs": {"target_queued": 2000, "target_busy": 0.9},
            },
        }


@contextmanager
def asking(url: str, body: bytes, clients: int, pause_s: float, statuses: list[int]) -> Iterator[None]:
    """`clients` threads that send `body` until the context ends; what they are answered goes to `statuses`."""
    stop = threading.Event()

    def client() -> None:
        with httpx.Client(base_url=url, timeout=150) as session:
            while not stop.wait(pause_s):
                statuses.append(session.post("/v1/encode", content=body, params={"pooling": "mean"}).status_code)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Recorder:
    """Replicas and queue of every pool, once a second."""

    def __init__(self, url: str) -> None:
        self._url, self._started = url, time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.phase = "pictures only"

    def look(self) -> dict[str, int]:
        """Replicas by pool, now; also a row of the record."""
        pools = httpx.get(f"{self._url}/v1/pools", timeout=60).json()["pools"]
        replicas = {pool["name"]: pool["replicas"] for pool in pools}
        queued = {pool["name"]: pool["queue"]["tokens"] for pool in pools}
        row = {"s": round(time.monotonic() - self._started, 1), "phase": self.phase}
        self.rows.append(row | {"replicas": replicas, "queued_tokens": queued})
        return replicas

    def watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            time.sleep(1)

    def until_shrunk(self, pool: str) -> bool:
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            if self.look()[pool] == 1:
                return True
            time.sleep(1)
        return False

    def most(self, phases: Sequence[str]) -> dict[str, int]:
        """The most replicas that each pool had in `phases`."""
        rows = [row["replicas"] for row in self.rows if row["phase"] in phases]
        return {pool: max(row[pool] for row in rows) for pool in rows[0]}


def measure() -> dict[str, Any]:
    """The record, and under "failures" what is wrong with it."""
    bursts = {"eager": mp4(448, 448, 64, 1).data, "video": mp4(320, 320, 16, 2).data}
    statuses: list[int] = []
    failures = []
    env = {
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": PUSH_S,
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": PUSH_S,
    }
    with Service(settings, env, timeout_s=600, dashboard=False) as service:
        recorder = Recorder(service.url)
        with asking(service.url, png(256, 256, 3).data, 1, 0.5, statuses):
            recorder.watch(10)
            for pool, body in bursts.items():
                recorder.phase = f"burst for {pool}"
                with asking(service.url, body, 12, 0, statuses):
                    recorder.watch(BURST_S)
                recorder.phase = f"after the burst for {pool}"
                if not recorder.until_shrunk(pool):
                    failures.append(f"{pool} did not shrink")
                most = recorder.most([f"burst for {pool}", f"after the burst for {pool}"])
                failures += [f"{pool} did not grow"] if most[pool] < 2 else []
                failures += [f"{other} grew with {pool}" for other in most if other != pool and most[other] > 1]
    bad = sorted({status for status in statuses if status != 200})
    failures += [f"answers with status {bad}"] if bad else []
    return {"answers": len(statuses), "failures": failures, "rows": recorder.rows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line whenever a pool's replicas or the phase change."""
    lines = ["| s | phase | image | video | eager |", "| --- | --- | --- | --- | --- |"]
    last: Any = None
    for row in rows:
        if (now := (row["phase"], row["replicas"])) != last:
            lines.append(
                f"| {row['s']:.0f} | {row['phase']} | " + " | ".join(map(str, row["replicas"].values())) + " |"
            )
            last = now
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the record there")
    arguments = parser.parse_args()
    record = measure()
    print(table(record["rows"]))
    print(f"{record['answers']} answers; failures: {record['failures'] or 'none'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(record) + "\n")
    return bool(record["failures"])


if __name__ == "__main__":
    sys.exit(main())
