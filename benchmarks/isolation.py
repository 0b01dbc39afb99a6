"""Does a flood of long videos move the latency of pictures? The same service with and without it, in turns.

    python -m benchmarks.isolation [--rounds 4] [--seconds 20] [--haproxy] [--json FILE]

Pools share nothing but the way in, so each gets cores of its own (`os.sched_setaffinity`), a quarter of the machine:
the image replica and the clients that ask for pictures; proxy and ingress; the decoders; and the eager replica, the
clients of the flood and the rest of Ray. On fewer than four cores proxy and ingress share a half with the pictures,
and the decoders, which both sides need, may run anywhere: the flood then takes core time from the pictures.
Tiny model on CPUs: what is measured is queues and scheduling, not a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import measure as processes
from benchmarks.service import Service
from tests.integration.media import mp4, png

PICTURES = {"image replica"}
WAY_IN = {"ingress", "python proxy", "proxy"}
TARGET = 1.2


@dataclass(frozen=True)
class Cores:
    """Which cores each part has."""

    pictures: frozenset[int]
    way_in: frozenset[int]
    decoders: frozenset[int]
    flood: frozenset[int]

    @classmethod
    def share(cls, cores: Sequence[int]) -> Cores:
        """A quarter of `cores` for each part; of fewer than four, halves, and all of them for the decoders."""
        if len(cores) < 4:
            half = (len(cores) + 1) // 2
            first, second = frozenset(cores[:half]), frozenset(cores[-half:])
            return cls(first, first, frozenset(cores), second)
        return cls(*(frozenset(cores[i * len(cores) // 4 : (i + 1) * len(cores) // 4]) for i in range(4)))

    def of(self, process: str) -> frozenset[int]:
        """Those of a process of the service, by what `benchmarks.processes` calls it."""
        if process in PICTURES:
            return self.pictures
        if process in WAY_IN:
            return self.way_in
        return self.decoders if process == "decoders" else self.flood


@dataclass(frozen=True)
class Clients:
    """Closed-loop clients of one process. pause_s: between an answer and the next request."""

    body: bytes
    count: int
    pause_s: float
    cores: frozenset[int]


def run_clients(url: str, clients: Clients, stop: Event, out: Queue[list[tuple[float, int]]]) -> None:
    """Asks until `stop`; puts (seconds, status) of each answer."""
    os.sched_setaffinity(0, clients.cores)
    import threading

    answers: list[tuple[float, int]] = []

    def client() -> None:
        with httpx.Client(base_url=url, timeout=150) as session:
            while not stop.wait(clients.pause_s):
                started = time.perf_counter()
                status = session.post("/v1/encode", content=clients.body, params={"pooling": "mean"}).status_code
                answers.append((time.perf_counter() - started, status))

    threads = [threading.Thread(target=client) for _ in range(clients.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.put(answers)


def phase(url: str, sides: Sequence[Clients], seconds: float) -> list[list[tuple[float, int]]]:
    """Runs all clients side by side; the answers of each."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    queues: list[Any] = [context.Queue() for _ in sides]
    workers = [
        context.Process(target=run_clients, args=(url, side, stop, queue), daemon=True)
        for side, queue in zip(sides, queues, strict=True)
    ]
    for worker in workers:
        worker.start()
    time.sleep(seconds)
    stop.set()
    answers = [queue.get(timeout=200) for queue in queues]
    for worker in workers:
        worker.join()
    return answers


def pin(service: Service, cores: Cores) -> dict[str, list[int]]:
    """Gives every process of the service its cores; which processes went where."""
    placed: dict[str, list[int]] = {}
    for pid, cost in processes(service.processes()).items():
        own = cores.of(cost.name)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), own)
            placed[cost.name] = sorted(own)
    return dict(sorted(placed.items()))


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def told(latencies: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(latencies),
        "p50_ms": round(percentile(latencies, 0.5) * 1000, 1),
        "p99_ms": round(percentile(latencies, 0.99) * 1000, 1),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Quiet and flooded phases in turns; image latencies of each, and of all, with their ratios."""
    cores = Cores.share(sorted(os.sched_getaffinity(0)))
    pictures = Clients(png(256, 256, 1).data, 2, 0.03, cores.pictures)
    flood = Clients(mp4(448, 448, 64, 2).data, 4, 0.0, cores.flood)

    def change(config: dict[str, Any]) -> None:
        (app,) = config["applications"]
        app["args"] = {"model": "tiny", "device": "cpu", "limits": {"decode_processes": options.decoders}}

    latencies: dict[str, list[list[float]]] = {"quiet": [], "flood": []}
    videos = 0
    statuses: Counter[int] = Counter()
    env = {"OMP_NUM_THREADS": "1"}
    with Service(change, env, timeout_s=600, haproxy=options.haproxy, dashboard=False) as service:
        phase(service.url, [pictures, flood], 8)  # starts every decoder, fills caches
        placed = pin(service, cores)
        for _ in range(options.rounds):
            for name, sides in (("quiet", [pictures]), ("flood", [pictures, flood])):
                answers = phase(service.url, sides, options.seconds)
                latencies[name].append([s for s, status in answers[0] if status == 200])
                statuses.update(status for side in answers for _, status in side)
                videos += sum(len(side) for side in answers[1:])
    pooled = {name: told([s for part in parts for s in part]) for name, parts in latencies.items()}
    return {
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg(), "python": platform.python_version()},
        "decode_processes": options.decoders,
        "proxy": "HAProxy" if options.haproxy else "Serve's own",
        "cores_of": placed,
        "rounds": {name: [told(part) for part in parts] for name, parts in latencies.items()},
        **pooled,
        "long_videos_answered": videos,
        "statuses": dict(statuses),
        "p50_ratio": round(pooled["flood"]["p50_ms"] / pooled["quiet"]["p50_ms"], 3),
        "p99_ratio": round(pooled["flood"]["p99_ms"] / pooled["quiet"]["p99_ms"], 3),
        "p99_ratio_of_rounds": round(
            statistics.median(
                percentile(f, 0.99) / percentile(q, 0.99)
                for q, f in zip(latencies["quiet"], latencies["flood"], strict=True)
            ),
            3,
        ),
        "target": TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--decoders", type=int, default=2, help="decode_processes, at least 2")
    parser.add_argument("--haproxy", action="store_true", help="HAProxy in place of Serve's own proxy")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    figures = measure(arguments)
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return figures["p99_ratio"] > TARGET


if __name__ == "__main__":
    sys.exit(main())
