"""What a family of processes costs, read from /proc: CPU seconds, memory and open files, by what the processes are."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
# The first that a command line contains names the process.
NAMES = {
    "decoders": "app.media.worker",
    "ingress": "ServeReplica:foveal:Ingress",
    "image replica": "ServeReplica:foveal:ImageGraph",
    "video replica": "ServeReplica:foveal:VideoGraph",
    "eager replica": "ServeReplica:foveal:Eager",
    "baseline replica": "ServeReplica:baseline",
    "controller": "ServeController",
    "proxy": "haproxy",
    "proxy manager": "HAProxyManager",
    "python proxy": "ProxyActor",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "agents": "agent.py",
    "spare workers": "ray::IDLE",
}


@dataclass(frozen=True)
class Cost:
    """Of one process. anon: bytes that are its own; rss: with what it maps, shared memory included; age_s: since its
    start."""

    name: str
    cpu_s: float
    rss: int
    anon: int
    files: int
    age_s: float


def name_of(command_line: str) -> str:
    return next((name for name, part in NAMES.items() if part in command_line), "other")


def measure(pids: Iterable[int]) -> dict[int, Cost]:
    """The cost of each process that still runs."""
    costs, now = {}, time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid in pids:
        folder = Path("/proc", str(pid))
        try:
            line = (folder / "cmdline").read_text().replace("\0", " ")
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            status = dict(row.split(":", 1) for row in (folder / "status").read_text().splitlines() if ":" in row)
            files = len(os.listdir(folder / "fd"))
        except OSError:
            continue
        rss, anon = (int(status.get(key, "0 kB").split()[0]) * 1024 for key in ("VmRSS", "RssAnon"))
        costs[pid] = Cost(
            name_of(line), sum(map(int, stat[11:13])) / TICK, rss, anon, files, now - int(stat[19]) / TICK
        )
    return costs


def cores(before: Mapping[int, Cost], after: Mapping[int, Cost], seconds: float) -> dict[str, float]:
    """Cores in use by what the processes are, the busiest first."""
    used: dict[str, float] = defaultdict(float)
    for pid, cost in after.items():
        used[cost.name] += cost.cpu_s - (before[pid].cpu_s if pid in before else 0.0)
    return {name: round(s / seconds, 3) for name, s in sorted(used.items(), key=lambda item: -item[1])}


def pss_bytes(pids: Iterable[int]) -> dict[str, int]:
    """Proportional set size by what the processes are: shared pages are counted once over all of them."""
    sizes: dict[str, int] = defaultdict(int)
    for pid in pids:
        try:
            name = name_of(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes[name] += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


class MemoryWatch:
    """Memory of every process over time. `sample` as often as wanted."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
        self._names: dict[int, str] = {}

    def sample(self, pids: Iterable[int]) -> None:
        now = time.monotonic()
        for pid, cost in measure(pids).items():
            self._rows[pid].append((now, cost.rss, cost.anon))
            self._names[pid] = cost.name

    def report(self) -> list[dict[str, float | str | int]]:
        """MiB of each process, the largest first. growth: mean of the last quarter over that of the second quarter, so
        that warming up does not count."""
        found: list[dict[str, float | str | int]] = []
        for pid, rows in self._rows.items():
            rss, anon = ([row[i] / 2**20 for row in rows] for i in (1, 2))
            quarter = max(1, len(rows) // 4)
            early, late = anon[quarter : 2 * quarter] or anon[:1], anon[-quarter:]
            found.append(
                {
                    "name": self._names[pid],
                    "pid": pid,
                    "samples": len(rows),
                    "rss_first": round(rss[0], 1),
                    "rss_peak": round(max(rss), 1),
                    "rss_last": round(rss[-1], 1),
                    "anon_first": round(anon[0], 1),
                    "anon_peak": round(max(anon), 1),
                    "anon_last": round(anon[-1], 1),
                    "anon_growth": round(sum(late) / len(late) - sum(early) / len(early), 1),
                }
            )
        return sorted(found, key=lambda row: -float(row["rss_peak"]))
