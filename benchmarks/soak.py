"""Mixed load on the service while its parts are killed: nothing may be lost, wrong or kept.

    python -m benchmarks.soak [--seconds 1800] [--json FILE]

Clients send images of several sizes, animations, short and long videos and bad files, and compare every answer bit for
bit with that of the first pass; other clients leave in the middle. Every half minute a random part is killed with
SIGKILL: a pool's replica, a decoder, now and then the ingress replica. Ends with 1 if a request was lost or answered
wrongly, if a client waited in vain, or if the memory or the open files of the service grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checked import CheckedLoad, Request, first_answers
from benchmarks.processes import measure, pss_bytes
from benchmarks.service import Service
from tests.integration.media import jpeg, mp4, png, webp_animation

KILL_EVERY_S = 30.0
SAMPLE_EVERY_S = 5.0
REPLICAS = {"ingress", "image replica", "video replica", "eager replica"}  # as `benchmarks.processes` names them
VICTIMS = {"ImageGraph": 2, "VideoGraph": 2, "Eager": 2, "decoder": 2, "Ingress": 1}  # name: how often, relatively
MAX_GROWTH = 0.10  # over the whole run, as a part of the median
# A run shorter than this is mostly warming up: decoders alone keep some hundred MiB once they have seen large pictures.
SHORT_S, MAX_GROWTH_OF_SHORT = 600.0, 0.25
WARM_UP = 0.25  # the part of the run before which growth is not looked at
# A process that was killed starts small and grows while it warms up, for this long. Growth over the run is therefore
# looked for between samples at which the processes had like ages.
WARM_S, LIKE_S = 120.0, 10.0


def requests() -> list[Request]:
    """Something for every pool, decoder and error."""
    good = [
        png(64, 64, 1),
        png(256, 288, 2),
        jpeg(640, 480, 3),
        jpeg(1600, 1200, 4),  # over the largest budget of a CPU: eager
        webp_animation(96, 64, 5, 5),
        mp4(128, 96, 8, 6),
        mp4(320, 240, 12, 7),
        mp4(96, 96, 40, 8),  # longer than t_capture: eager
        mp4(160, 128, 64, 9),
    ]
    bad = [
        Request("text", b"not a picture"),
        Request("half a picture", good[2].data[: len(good[2].data) // 2]),
        Request("half a video", good[6].data[: len(good[6].data) // 2]),
        Request("empty", b""),
        Request("bad option", good[0].data, {"fsp": 1}),
    ]
    pooled = Request("pooled", good[1].data, {"pooling": "mean", "dtype": "float16"})
    return [*(Request(sample.name, sample.data) for sample in good), pooled, *bad]


class Leavers:
    """Clients that send a request, or a part of it, and close the connection before there can be an answer."""

    def __init__(self, url: str, bodies: Sequence[bytes], seed: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address, self._bodies, self._rng = (host, int(port)), bodies, random.Random(seed)
        self.count = 0

    def leave(self) -> None:
        body = self._rng.choice(self._bodies)
        head = f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        part = body[: len(body) if self._rng.random() < 0.7 else len(body) // 2]
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=5) as connection:
            connection.sendall(head + part)
            time.sleep(self._rng.uniform(0, 0.3))
        self.count += 1


@dataclass(frozen=True)
class Sample:
    """The service at one moment at which no part was missing. By kind of process, memory: PSS in bytes; ages: seconds
    since the start of the youngest."""

    seconds: float
    memory: dict[str, int]
    ages: dict[str, float]
    open_files: int
    processes: int


def look(service: Service, seconds: float) -> Sample | None:
    """None while a part is missing: what starts anew would hide, or look like, growth."""
    pids = service.processes()
    costs = measure(pids).values()
    if not {cost.name for cost in costs} >= REPLICAS or not whole(service):
        return None
    ages: dict[str, float] = {}
    for cost in costs:
        ages[cost.name] = min(cost.age_s, ages.get(cost.name, cost.age_s))
    return Sample(seconds, pss_bytes(pids), ages, sum(cost.files for cost in costs), len(pids))


def whole(service: Service) -> bool:
    """Every pool has its replica and /health says so."""
    try:
        return httpx.get(f"{service.url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def slope(points: Sequence[tuple[float, float, float]]) -> float:
    """Theil and Sen's: the median of the slopes of y over x between all pairs, here of points (x, y, age) whose ages
    are alike. A few odd points do not move it."""
    slopes = [
        (y1 - y0) / (x1 - x0)
        for i, (x0, y0, age0) in enumerate(points)
        for x1, y1, age1 in points[i + 1 :]
        if x1 > x0 and abs(min(age1, WARM_S) - min(age0, WARM_S)) <= LIKE_S
    ]
    return statistics.median(slopes) if slopes else 0.0


def growth(points: Sequence[tuple[float, float, float]], seconds: float) -> dict[str, float]:
    """How much y of (seconds, y, age) would grow over the run at the slope of its steady part, and its median."""
    steady = [point for point in points if point[0] >= WARM_UP * seconds]
    if len(steady) < 3:
        return {"median": 0.0, "over_the_run": 0.0}
    return {"median": statistics.median(y for _, y, _ in steady), "over_the_run": slope(steady) * seconds}


def together(growths: Iterable[dict[str, float]]) -> dict[str, float]:
    """Their sums, and what the growth is of the median."""
    told = [*growths]
    median, grown = (sum(one[name] for one in told) for name in ("median", "over_the_run"))
    return {"median": median, "over_the_run": grown, "part": grown / median if median else 0.0}


class Killer:
    """Kills one random part and waits until the service is whole again."""

    def __init__(self, service: Service, seed: int) -> None:
        self._service, self._rng = service, random.Random(seed)
        self.kills: list[dict[str, Any]] = []

    def kill(self) -> None:
        victim = self._rng.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        title = f"ServeReplica:foveal:{victim}"
        if victim == "decoder":
            # The first one is the parent that decoders are forked from; it may be hit as well.
            title = "app.media.worker"
        pids = self._service.processes(title)
        if not pids:
            return
        pid = self._rng.choice(pids)
        started = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if victim != "decoder":
            while self._service.processes(title) in ([], [pid]) or not whole(self._service):
                if time.monotonic() - started > 120:
                    break
                time.sleep(0.1)
        self.kills.append({"victim": victim, "full_health_s": round(time.monotonic() - started, 2)})


def soak(seconds: float, clients: int, seed: int) -> dict[str, Any]:
    """Runs it; the figures, and under "failures" what is wrong with them."""
    asked = requests()
    with Service(_shorter_deadline, timeout_s=600, dashboard=False) as service:
        references = first_answers(service.url, asked)
        leavers = Leavers(service.url, [r.data for r in asked if references[r.name].status == 200], seed)
        killer, samples = Killer(service, seed), list[Sample]()
        started, done = time.monotonic(), threading.Event()

        def every(period_s: float, action: Callable[[], object]) -> threading.Thread:
            def repeat() -> None:
                while not done.wait(period_s):
                    action()

            thread = threading.Thread(target=repeat, daemon=True)
            thread.start()
            return thread

        def sample() -> None:
            if (seen := look(service, time.monotonic() - started)) is not None:
                samples.append(seen)

        load = CheckedLoad(service.url, asked, references, clients=clients, pause_s=0.05, seed=seed)
        with load:
            threads = [every(1.0, leavers.leave), every(KILL_EVERY_S, killer.kill), every(SAMPLE_EVERY_S, sample)]
            done.wait(seconds)
            done.set()
            for thread in threads:
                thread.join()
        lasted = time.monotonic() - started
        limit = time.monotonic() + 60
        while not (well := whole(service)) and time.monotonic() < limit:
            time.sleep(0.2)
    return report(load, killer.kills, samples, leavers.count, lasted, well)


def report(
    load: CheckedLoad,
    kills: Sequence[dict[str, Any]],
    samples: Sequence[Sample],
    left: int,
    seconds: float,
    well: bool,
) -> dict[str, Any]:
    kinds = sorted({kind for s in samples for kind in s.memory})
    by_kind = {
        kind: growth([(s.seconds, s.memory.get(kind, 0), s.ages.get(kind, 0.0)) for s in samples], seconds)
        for kind in kinds
    }
    memory = together(by_kind.values())
    files = together([growth([(s.seconds, s.open_files, WARM_S) for s in samples], seconds)])
    recovery: dict[str, list[float]] = {}
    for kill in kills:
        recovery.setdefault(kill["victim"], []).append(kill["full_health_s"])
    failures = []
    for outcome in ("wrong", "failed", "hang"):
        if count := load.count(outcome):
            failures.append(f"{count} attempts ended {outcome}")
    if load.lost:
        failures.append(f"{len(load.lost)} requests lost")
    if not well:
        failures.append("the service was not well at the end")
    if len(samples) < 3:
        failures.append(f"only {len(samples)} samples of memory")
    limit = MAX_GROWTH_OF_SHORT if seconds < SHORT_S else MAX_GROWTH
    for name, told in (("memory", memory), ("open files", files)):
        if told["part"] > limit:
            failures.append(f"{name} grew by {told['part']:.0%} of the median")
    return {
        "seconds": round(seconds),
        "load": load.summary(),
        "clients_that_left": left,
        "kills": Counter(kill["victim"] for kill in kills),
        "full_health_s": {name: {"median": statistics.median(s), "max": max(s)} for name, s in recovery.items()},
        "memory_mib": {name: round(value / 2**20, 1) for name, value in memory.items() if name != "part"}
        | {"part": round(memory["part"], 4)},
        "memory_by_kind_mib": {
            kind: {name: round(value / 2**20, 1) for name, value in told.items()} for kind, told in by_kind.items()
        },
        "open_files": {name: round(value, 3) for name, value in files.items()},
        "samples": len(samples),
        "failures": failures,
    }


def _shorter_deadline(config: dict[str, Any]) -> None:
    """So that a client's own time-out can be told from the service's."""
    config["applications"][0]["args"]["limits"]["deadline_s"] = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    figures = soak(arguments.seconds, arguments.clients, arguments.seed)
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return bool(figures["failures"])


if __name__ == "__main__":
    sys.exit(main())
