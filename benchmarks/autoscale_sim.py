"""Autoscaling by request count against autoscaling by queued work, simulated: no Ray, no GPU.

    python -m benchmarks.autoscale_sim [--seeds 5] [--svg docs/autoscaling.svg]

Seeded arrival traces are served by three pools whose batches cost what an H200 measured. Both policies see what Serve
would show them, and obey the same bounds and delays. Prints a table; draws replicas and queue time over time. Half a
minute a seed.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import heapq
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployments.autoscaling import replicas_for
from deployments.batcher import count_that_fit
from deployments.protocol import Size
from deployments.work import predicted_work
from encoder.budgets import CostTable, PackLimits
from encoder.defs import Modality

RESULTS = Path(__file__).parent / "results"
# Benchmark cells: tokens of a segment, and segments.
IMAGE_CELLS = {"1x224^2": (49, 1), "1x448^2": (196, 1), "1x1024^2": (1024, 1)}
VIDEO_CELLS = {"16x224^2": (49, 16), "video t=8 448^2": (196, 8)}
EAGER_CELLS = {"16x224^2": (49, 16), "video t=32 448^2": (196, 32)}


@dataclass(frozen=True)
class Pool:
    """costs: seconds that the replica predicts by. slower: real seconds over predicted ones, by tokens a segment."""

    name: str
    limits: PackLimits
    costs: CostTable
    slower: tuple[tuple[int, float], ...] = ((1, 1.0),)
    max_queued: int = 256

    def seconds(self, batch: Sequence[Size]) -> float:
        """What the batch really takes: replays are costed without attention and on a cool GPU, so reality is slower."""
        tokens, segments = sum(s.tokens for s in batch), sum(s.segments for s in batch)
        return predicted_work(batch, self.costs, self.limits) * _between(self.slower, tokens / segments)


def _between(points: Sequence[tuple[int, float]], x: float) -> float:
    at = bisect.bisect_left([p for p, _ in points], x)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def measured_pools() -> dict[str, Pool]:
    """The pools with the H200's figures. Only replays were measured with attention: eager runs are taken to be slower
    than predicted by what replays of the same segments are. Images' figures are of single ones, of which a full batch
    is up to a tenth slower."""
    measured = json.loads((RESULTS / "encoder-full-cuda.json").read_text())
    captured = measured["capture"]["empty kernel caches"]["first"]
    graphs, eager = (
        {m: {int(n): ms / 1e3 for n, ms in table.items()} for m, table in captured[key].items()}
        for key in ("costs_ms", "eager_ms")
    )
    real = measured["rows"]["ours as served: GPU time"]
    wide = PackLimits(max_tokens=16384, max_items=8, max_seqs=16384)

    def slower(cells: dict[str, tuple[int, int]], modality: Modality) -> tuple[tuple[int, float], ...]:
        replays = CostTable(graphs[modality])
        predicted = {
            cell: predicted_work([Size(modality, tokens * segments, segments)], replays, wide)
            for cell, (tokens, segments) in cells.items()
        }
        return tuple((cells[cell][0], real[cell]["ms"] / 1e3 / seconds) for cell, seconds in predicted.items())

    def pool(name: str, limits: PackLimits, costs: CostTable, cells: dict[str, tuple[int, int]]) -> Pool:
        return Pool(name, limits, costs, slower(cells, "image" if name == "image" else "video"))

    runs = tuple(sorted(eager["video"].items()))
    return {
        "image": pool("image", PackLimits(16384, 8, 8), CostTable(graphs["image"]), IMAGE_CELLS),
        "video": pool("video", PackLimits(16384, 8, 64), CostTable(graphs["video"]), VIDEO_CELLS),
        "eager": pool("eager", PackLimits(16384, 4, 16384), CostTable({}, runs), EAGER_CELLS),
    }


# --- arrivals ---

Arrival = tuple[float, Size]
Rate = Callable[[float], float]
MIX: dict[str, dict[str, list[tuple[float, Size]]]] = {  # pool: kind: (share, size)
    "image": {
        "usual": [(0.2, Size("image", 49, 1)), (0.2, Size("image", 196, 1)), (0.6, Size("image", 1024, 1))],
        "heavy": [(1.0, Size("image", 1024, 1))],
    },
    "video": {
        "usual": [(0.3, Size("video", 2 * 49, 2)), (0.7, Size("video", 8 * 196, 8))],
        "heavy": [(1.0, Size("video", 8 * 196, 8))],
    },
    "eager": {
        "usual": [(0.5, Size("video", 12 * 49, 12)), (0.5, Size("video", 32 * 196, 32))],
        "heavy": [(1.0, Size("video", 64 * 196, 64))],
    },
}


@dataclass(frozen=True)
class Trace:
    """Requests a second over time, of each pool's usual and heavy mix."""

    name: str
    seconds: float
    usual: dict[str, Rate]
    heavy: dict[str, Rate] = field(default_factory=dict)

    def arrivals(self, pool: str, seed: int) -> list[Arrival]:
        rng = random.Random(f"{self.name} {pool} {seed}")
        both = [(self.usual.get(pool), "usual"), (self.heavy.get(pool), "heavy")]
        return sorted(
            (a for rate, kind in both if rate for a in _poisson(rate, self.seconds, MIX[pool][kind], rng)),
            key=lambda arrival: arrival[0],
        )


def _poisson(rate: Rate, seconds: float, mix: list[tuple[float, Size]], rng: random.Random) -> Iterator[Arrival]:
    """An inhomogeneous Poisson process, by thinning."""
    peak = max(rate(t) for t in range(int(seconds) + 1))
    at = 0.0
    while peak and (at := at + rng.expovariate(peak)) < seconds:
        if rng.random() * peak < rate(at):
            yield at, rng.choices([s for _, s in mix], [w for w, _ in mix])[0]


BASE = {"image": 250.0, "video": 180.0, "eager": 30.0}  # about two busy replicas each


def _scaled(factor: Rate) -> dict[str, Rate]:
    def rate(base: float) -> Rate:
        return lambda t: base * factor(t)

    return {pool: rate(base) for pool, base in BASE.items()}


def _window(rate: float, start: float, end: float) -> Rate:
    return lambda t: rate if start <= t < end else 0.0


def traces() -> list[Trace]:
    steady = _scaled(lambda t: 1.0)
    return [
        Trace("steady", 300, steady),
        Trace("burst", 300, _scaled(lambda t: 3.0 if 100 <= t < 160 else 1.0)),
        Trace("day curve", 450, _scaled(lambda t: 0.7 - 0.6 * math.cos(2 * math.pi * t / 450))),
        Trace("long-video flood", 300, steady, {"video": _window(150, 100, 180), "eager": _window(15, 100, 180)}),
    ]


# --- one pool under one policy ---


@dataclass(frozen=True)
class Seen:
    """Means over the look-back window, summed over the replicas."""

    requests: float
    queued_work: float
    busy: float


Policy = Callable[[Seen], int]


def by_requests(target: float) -> Policy:
    """What Serve does by default: `target_ongoing_requests` a replica."""
    return lambda seen: math.ceil(seen.requests / target - 1e-9)


def by_work(target: float) -> Policy:
    """`QueuedWorkPolicy` with `target_queued` seconds."""
    return lambda seen: replicas_for([seen.queued_work], [seen.busy], target_queued=target, target_busy=0.8)


@dataclass(frozen=True)
class Scaling:
    """Serve's own knobs, for both policies alike, and the seconds that a replica takes to start."""

    min_replicas: int = 1
    initial_replicas: int = 3
    max_replicas: int = 12
    look_back_s: float = 10.0
    record_s: float = 2.0
    push_s: float = 10.0
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 30.0
    start_s: float = 15.0


class Autoscaler:
    """Bounds and delays as Serve applies them: a wish must last for the delay before it counts."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling, self._direction, self._since = scaling, 0, 0.0

    def decide(self, now: float, wanted: int, target: int) -> int:
        s = self._scaling
        wanted = min(max(wanted, s.min_replicas), s.max_replicas)
        direction = (wanted > target) - (wanted < target)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay = s.upscale_delay_s if direction > 0 else s.downscale_delay_s
        if direction and now - self._since >= delay:
            self._direction = 0
            return wanted
        return target


@dataclass
class _Replica:
    born: float
    ready: float
    queue: deque[Arrival] = field(default_factory=deque)
    running: list[Arrival] = field(default_factory=list)
    draining: bool = False
    gone: float | None = None

    @property
    def ongoing(self) -> int:
        return len(self.queue) + len(self.running)


@dataclass
class Outcome:
    """queue_s: (arrival, seconds waited) of every request that was served. replicas: (time, count), one a second."""

    queue_s: list[tuple[float, float]]
    refused: int
    replica_seconds: float
    replicas: list[tuple[float, int]]


def simulate(
    arrivals: Sequence[Arrival], pool: Pool, policy: Policy, seconds: float, scaling: Scaling | None = None
) -> Outcome:
    """Serves the arrivals; each goes to the less loaded of two replicas drawn at random, as Serve routes."""
    scaling = scaling or Scaling()
    rng, autoscaler = random.Random(0), Autoscaler(scaling)
    replicas = [_Replica(0.0, 0.0) for _ in range(scaling.initial_replicas)]
    everyone, target = list(replicas), scaling.initial_replicas
    samples: deque[tuple[float, Seen]] = deque()
    outcome = Outcome([], 0, 0.0, [])
    order = itertools.count()
    events: list[tuple[float, int, str, _Replica | None, Size | None]] = [
        (at, next(order), "arrive", None, size) for at, size in arrivals
    ]
    events += [(float(t), next(order), "tick", None, None) for t in range(int(seconds) + 1)]
    heapq.heapify(events)

    @functools.cache
    def seconds_of(batch: tuple[Size, ...]) -> float:
        return pool.seconds(batch)

    def start(now: float, replica: _Replica) -> None:
        if replica.running or now < replica.ready:
            return
        count = count_that_fit((size for _, size in replica.queue), pool.limits)
        replica.running = [replica.queue.popleft() for _ in range(count)]
        if replica.running:
            outcome.queue_s.extend((at, now - at) for at, _ in replica.running)
            end = now + seconds_of(tuple(size for _, size in replica.running))
            heapq.heappush(events, (end, next(order), "done", replica, None))
        elif replica.draining:
            replica.gone = now

    while events:
        now, _, kind, replica, size = heapq.heappop(events)
        if kind == "arrive":
            assert size is not None
            up = [r for r in replicas if r.ready <= now]
            chosen = min(rng.sample(up, min(2, len(up))), key=lambda r: r.ongoing)
            if len(chosen.queue) >= pool.max_queued:
                outcome.refused += 1
                continue
            chosen.queue.append((now, size))
            start(now, chosen)
        elif kind == "done":
            assert replica is not None
            replica.running = []
            start(now, replica)
        else:
            alive = [r for r in everyone if r.gone is None]
            outcome.replicas.append((now, len(alive)))
            if now % scaling.record_s == 0:
                work = [predicted_work([s for _, s in (*r.running, *r.queue)], pool.costs, pool.limits) for r in alive]
                seen = Seen(sum(r.ongoing for r in alive), sum(work), sum(1.0 for w in work if w))
                samples.append((now, seen))
            pushed = math.floor(now / scaling.push_s) * scaling.push_s
            while samples[0][0] < pushed - scaling.look_back_s:
                samples.popleft()
            shown = [s for at, s in samples if at <= pushed]
            mean = Seen(*(sum(getattr(s, n) for s in shown) / len(shown) for n in ("requests", "queued_work", "busy")))
            target = autoscaler.decide(now, policy(mean), target)
            while len(replicas) < target:
                replicas.append(_Replica(now, now + scaling.start_s))
                everyone.append(replicas[-1])
            while len(replicas) > target:
                # The youngest leaves first, so that one that has not started yet goes before one that serves.
                leaving = replicas.pop()
                leaving.draining = True
                start(now, leaving)
                leaving.gone = now if not leaving.ongoing else leaving.gone
    end = max([seconds, *(at + wait for at, wait in outcome.queue_s[-1:])])
    outcome.replica_seconds = sum((r.gone if r.gone is not None else end) - r.born for r in everyone)
    return outcome


# --- report ---


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else math.nan


GRIDS: dict[str, tuple[Callable[[float], Policy], tuple[float, ...]]] = {
    "requests": (by_requests, (0.75, 1, 1.25, 1.5, 2, 3, 4)),
    "queued work": (by_work, (0.02, 0.05, 0.1, 0.2, 0.4)),
}


def outcomes_of(pool: Pool, policy: Policy, trace: Trace, seeds: Iterable[int]) -> list[Outcome]:
    return [simulate(trace.arrivals(pool.name, seed), pool, policy, trace.seconds) for seed in seeds]


def tuned(name: str, pool: Pool, trace: Trace, seeds: Sequence[int], limit_s: float) -> float:
    """The target with the fewest replica-seconds on `trace` whose p95 queue time is within `limit_s`, or nearest it."""
    make, grid = GRIDS[name]
    tried = []
    for target in grid:
        outcomes = outcomes_of(pool, make(target), trace, seeds)
        p95 = quantile([wait for o in outcomes for _, wait in o.queue_s], 0.95)
        tried.append((max(p95, limit_s), sum(o.replica_seconds for o in outcomes), target))
    return min(tried)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="arrivals are drawn so often; as often again for tuning")
    parser.add_argument(
        "--limit-s", type=float, default=0.1, help="p95 queue time that targets are tuned to, when steady"
    )
    parser.add_argument("--svg", type=Path, help="also draw the first seed's runs there")
    args = parser.parse_args()
    pools, all_traces, seeds = measured_pools(), traces(), range(args.seeds)
    targets = {
        (name, pool_name): tuned(name, pools[pool_name], all_traces[0], [-1 - s for s in seeds], args.limit_s)
        for name in GRIDS
        for pool_name in pools
    }
    for (name, pool_name), target in targets.items():
        print(f"target of {name}, {pool_name} pool: {target:g}", flush=True)
    print(
        "\n| trace | pool | policy | p50 queue, ms | p95 queue, ms | refused | replica-seconds |\n" + "| --- " * 7 + "|"
    )
    runs: dict[tuple[str, str], list[list[Outcome]]] = {}
    for trace in all_traces:
        for pool in pools.values():
            for name, (make, _) in GRIDS.items():
                outcomes = outcomes_of(pool, make(targets[name, pool.name]), trace, seeds)
                runs.setdefault((trace.name, name), []).append(outcomes)
                print(_row(trace.name, pool.name, name, [outcomes]), flush=True)
        for name in GRIDS:
            print(_row(f"**{trace.name}**", "all", name, runs[trace.name, name]))
    print("\n| trace | replica-seconds of queued work over those of requests |\n| --- | --- |")
    for trace in all_traces:
        requests, work = (_replica_seconds(runs[trace.name, name]) for name in GRIDS)
        ratios = [w / r for w, r in zip(work, requests, strict=True)]
        print(f"| {trace.name} | {sum(work) / sum(requests):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")
    if args.svg:
        first = {key: [outcomes[0] for outcomes in pools_outcomes] for key, pools_outcomes in runs.items()}
        args.svg.write_text(draw(first, list(GRIDS)))


def _replica_seconds(runs: Sequence[Sequence[Outcome]]) -> list[float]:
    """Of each seed, over the pools."""
    return [sum(o.replica_seconds for o in of_seed) for of_seed in zip(*runs, strict=True)]


def _row(trace: str, pool: str, policy: str, runs: Sequence[Sequence[Outcome]]) -> str:
    """Of `runs[pool][seed]`: queue times of all requests, and the mean replica-seconds of a seed."""
    outcomes = [outcome for of_pool in runs for outcome in of_pool]
    waits = [wait for o in outcomes for _, wait in o.queue_s]
    refused = sum(o.refused for o in outcomes)
    seconds = _replica_seconds(runs)
    cells = (
        *(f"{quantile(waits, q) * 1e3:.0f}" for q in (0.5, 0.95)),
        f"{refused / (refused + len(waits)):.1%}",
        f"{sum(seconds) / len(seconds):.0f}",
    )
    return "| " + " | ".join((trace, pool, policy, *cells)) + " |"


# --- drawing ---

COLOURS = ("#c44e52", "#4c72b0")
WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 120, 50, 50, 46


def draw(totals: dict[tuple[str, str], list[Outcome]], policies: Sequence[str]) -> str:
    """One column a trace: replicas of all pools above, p95 queue time of all requests in bins of 10 s below."""
    names = list(dict.fromkeys(trace for trace, _ in totals))
    parts = []
    for column, trace in enumerate(names):
        x = LEFT + column * (WIDTH + LEFT)
        parts.append(f'<text x="{x}" y="{TOP - 10}" font-weight="bold">{trace}</text>')
        lines = [
            [_replicas(totals[trace, policy]) for policy in policies],
            [_p95(totals[trace, policy]) for policy in policies],
        ]
        for row, (series, label) in enumerate(zip(lines, ("replicas", "p95 queue, s"), strict=True)):
            parts.append(_panel(x, TOP + row * (HEIGHT + GAP), series, label))
    for i, policy in enumerate(policies):
        x = LEFT + i * 150
        parts.append(f'<rect x="{x}" y="8" width="14" height="4" fill="{COLOURS[i]}"/>')
        parts.append(f'<text x="{x + 20}" y="14">by {policy}</text>')
    size = (LEFT + len(names) * (WIDTH + LEFT), TOP + 2 * (HEIGHT + GAP))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _replicas(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    return [(steps[0][0], sum(n for _, n in steps)) for steps in zip(*(o.replicas for o in outcomes), strict=True)][::5]


def _p95(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    bins: dict[int, list[float]] = {}
    for at, wait in (pair for o in outcomes for pair in o.queue_s):
        bins.setdefault(int(at // 10), []).append(wait)
    return [(10.0 * b + 5, quantile(waits, 0.95)) for b, waits in sorted(bins.items())]


def _panel(x: float, y: float, series: Sequence[Sequence[tuple[float, float]]], label: str) -> str:
    right = max(px for line in series for px, _ in line)
    top = max(max(py for line in series for _, py in line), 1e-9)
    parts = [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{x}" y="{y - 3}" fill="#555">{label}</text>',
        f'<text x="{x - 4}" y="{y + 9}" text-anchor="end">{top:.3g}</text>',
        f'<text x="{x - 4}" y="{y + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{x + WIDTH}" y="{y + HEIGHT + 13}" text-anchor="end">{right:.0f} s</text>',
    ]
    for line, colour in zip(series, COLOURS, strict=True):
        points = " ".join(f"{x + px / right * WIDTH:.1f},{y + HEIGHT - py / top * HEIGHT:.1f}" for px, py in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return "\n".join(parts)


if __name__ == "__main__":
    main()
