"""Measures the service over HTTP: throughput beside the encoder's own rate, latency, overload, clients that leave.

    python -m benchmarks.serve [--model full|tiny] [--scenarios photo1024,idle,...] [--quick] [--out DIR]

Starts the service itself with `serve run`, on settings that the options below change. Writes
DIR/serve-<model>-<device>.json after every scenario, so that a run that is ended keeps what it had, and the Markdown
made from it. A scenario that is run again replaces itself in the file; the others stay. Ratios are within one run: the
encoder-only rate is measured first, by the same runner with the same settings in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks import processes
from benchmarks.full_checkpoint import write_full_checkpoint
from benchmarks.load import CLOSENESS, Address, Closed, Open, Records, Target, leave_many, run_load
from benchmarks.mixes import Media, Mix, make_mix
from benchmarks.serve_report import markdown
from benchmarks.service import ROOT, Service
from encoder.cache import cache_folder

# What each scenario sends; the empty ones depend on the options.
MIXES = {
    "idle": "photo224",
    "photo1024": "photo1024",
    "photo224": "photo224",
    "photo224x16": "photo224x16",
    "video": "video",
    "overload": "",
    "disconnects": "",
    "chat": "chat",
}
# Connections that are tried; the best one is measured.
CONNECTIONS = {
    "cuda": {
        "photo1024": (8, 16, 32, 64),
        "photo224": (32, 64, 128, 192),
        "photo224x16": (4, 8, 16, 32),
        "video": (8, 16, 32),
        "chat": (16, 32, 64, 128),
    },
    "cpu": {"photo1024": (2, 4), "photo224": (4, 8, 16), "photo224x16": (1, 2), "video": (2, 4), "chat": (4, 8)},
}
# On a GPU, on a CPU.
QUICK_CONNECTIONS = {
    "photo1024": (16, 4),
    "photo224": (64, 8),
    "photo224x16": (8, 2),
    "video": (16, 4),
    "chat": (32, 4),
}
# Seconds after an overload at which latency is to be normal again.
RECOVERY_S = 5.0


class Report:
    """The JSON file: runs by their number, and scenarios, each with the number of the run that measured it."""

    def __init__(self, path: Path, model: str, device: str, run: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"model": model, "device": device, "runs": [], "scenarios": {}, "failures": []}
        if path.is_file():
            before = json.loads(path.read_text())
            if (before["model"], before["device"]) == (model, device):
                self.data = before
        self.run = run
        self.data["runs"].append(run)
        self.number = len(self.data["runs"]) - 1

    def put(self, name: str, found: dict[str, Any]) -> None:
        self.data["scenarios"][name] = {"run": self.number, **found}
        self.data["failures"] = [f for f in self.data["failures"] if f["scenario"] != name]
        self.write()

    def write(self) -> None:
        # Runs that no scenario comes from any more say nothing.
        used = {s["run"] for s in self.data["scenarios"].values()} | {self.number}
        self.data["failures"] = [f for f in self.data["failures"] if f["run"] in used]
        for number, run in enumerate(self.data["runs"]):
            if number not in used:
                self.data["runs"][number] = {"replaced": run.get("date")}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(markdown(self.data))

    @contextlib.contextmanager
    def part(self, name: str) -> Any:
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            failure = {"scenario": name, "error": repr(error)[:2000], "trace": traceback.format_exc()[-3000:]}
            self.data["failures"].append({"run": self.number, **failure})
            print(f"FAILED {name}: {error!r}", file=sys.stderr, flush=True)
        finally:
            self.write()
            print(f"[{time.monotonic() - started:7.1f} s] {name}", file=sys.stderr, flush=True)


# --- one measurement ---


def quantiles(seconds: np.ndarray) -> dict[str, float]:
    """Milliseconds."""
    if not len(seconds):
        return {"n": 0}
    p50, p95, p99 = (float(v) for v in np.percentile(seconds, [50, 95, 99]) * 1e3)
    return {"p50": p50, "p95": p95, "p99": p99, "max": float(seconds.max() * 1e3), "n": len(seconds)}


def evaluate(records: Records, target: Target, open_loop: bool) -> dict[str, Any]:
    """Rates and latencies of the window that counts.

    Rates are of answers that ended in it. Latencies are of those in a closed loop, and of the requests that were due
    in it in an open one.
    """
    seconds = records.finish - records.begin
    ended = (records.end >= records.begin) & (records.end < records.finish)
    due = (records.start >= records.begin) & (records.start < records.finish) if open_loop else ended
    good = records.status == 200
    refused = (records.status == 503) | (records.status == 429)
    done = records.index[ended & good]
    items = np.array([request.items for request in target.requests])
    tokens = np.array([answer.tokens for answer in target.answers])
    sent = np.array([len(request.body) for request in target.requests])
    latency = records.end - records.start
    return {
        "seconds": seconds,
        "requests_s": len(done) / seconds,
        "items_s": float(items[done].sum() / seconds),
        "tokens_s": float(tokens[done].sum() / seconds),
        "mb_in_s": float(sent[done].sum() / seconds / 1e6),
        "mb_out_s": float(records.received[ended & good].sum() / seconds / 1e6),
        "latency_ms": quantiles(latency[due & good]),
        "first_byte_ms": quantiles((records.first - records.start)[due & good]),
        "refusal_ms": quantiles(latency[due & refused]),
        "due": int(due.sum()),
        "refused": int((due & refused).sum()),
        "broken": int((due & (records.status == 0)).sum()),
        "unanswered": int((records.status == -1).sum()),
        "codes": dict(records.codes),
        "wrong_length": records.wrong_length,
        "samples": {
            "equal": sum(e == 0 for e in records.errors),
            "close": sum(0 < e <= CLOSENESS for e in records.errors),
            "wrong": sum(e > CLOSENESS for e in records.errors),
            "worst": max((e for e in records.errors if e <= CLOSENESS), default=0.0),
        },
        "stages_ms": {
            name: {"p50": float(np.percentile(v, 50)), "p99": float(np.percentile(v, 99))}
            for name, v in records.stages.items()
            if len(v)
        },
        "client_cores": [round(share, 2) for share in records.cpu_shares],
    }


class Meter:
    """Runs loads against one service and puts beside them what the service's processes and pools did meanwhile."""

    def __init__(self, service: Service, clients: int) -> None:
        self.service, self.clients = service, clients
        host, _, port = service.url.removeprefix("http://").partition(":")
        self.address: Address = (host, int(port))

    def target(self, mix: Mix) -> Target:
        return Target(self.address, mix.requests, mix.order).prime()

    def measure(
        self, target: Target, plan: Closed | Open, watch: processes.MemoryWatch | None = None
    ) -> dict[str, Any]:
        found, _ = self.measure_all(target, plan, watch)
        return found

    def measure_all(
        self, target: Target, plan: Closed | Open, watch: processes.MemoryWatch | None = None
    ) -> tuple[dict[str, Any], Records]:
        marks: dict[str, Any] = {}

        def at(moment: str) -> None:
            pids = self.service.processes()
            if moment in ("begin", "end"):
                marks[moment] = (time.monotonic(), processes.measure(pids), self.pools())
            if watch is not None:
                watch.sample(pids)

        records = run_load(target, plan, self.clients, at)
        found = evaluate(records, target, isinstance(plan, Open))
        (begin, costs, pools), (end, later_costs, later_pools) = marks["begin"], marks["end"]
        found["cores"] = processes.cores(costs, later_costs, end - begin)
        found["pools"] = pool_shares(pools, later_pools)
        return found, records

    def pools(self) -> tuple[float, dict[str, Any]] | None:
        """The moment that `/v1/pools` tells of, and the pools by name; None if there is no such answer."""
        started = time.monotonic()
        try:
            answer = httpx.get(f"{self.service.url}/v1/pools", timeout=5)
            pools = {pool["name"]: pool for pool in answer.raise_for_status().json()["pools"]}
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        return (started + time.monotonic()) / 2, pools

    def settle(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Waits until nothing is queued anywhere, and a little longer; the queues as they are then."""
        deadline = time.monotonic() + timeout_s
        while True:
            read = self.pools()
            queues = {name: pool["queue"] for name, pool in read[1].items()} if read else {}
            if queues and not any(q["items"] or q["bytes"] for q in queues.values()):
                time.sleep(2)
                return queues
            if time.monotonic() > deadline:
                return queues
            time.sleep(0.5)


def pool_shares(
    before: tuple[float, dict[str, Any]] | None, after: tuple[float, dict[str, Any]] | None
) -> dict[str, dict[str, float]]:
    """What each pool did between two readings: items from graphs and not, and the share of time its device was busy."""
    if before is None or after is None:
        return {}
    found = {}
    for name, pool in after[1].items():
        old, seconds = before[1].get(name), after[0] - before[0]
        if old is None:
            continue
        entry = {"hits": pool["hits"] - old["hits"], "misses": pool["misses"] - old["misses"]}
        if pool.get("busy_s") is not None:
            entry["busy_share"] = (pool["busy_s"] - old["busy_s"]) / seconds
        if any(entry.values()):
            found[name] = entry
    return found


# --- the scenarios ---


class Scenarios:
    def __init__(
        self, meter: Meter, options: argparse.Namespace, mix_of: Callable[[str], Mix], ceilings: dict[str, Any]
    ) -> None:
        self.meter, self.options, self.mix_of, self.ceilings = meter, options, mix_of, ceilings
        self._targets: dict[str, Target] = {}

    def target(self, mix: str) -> Target:
        if mix not in self._targets:
            self._targets[mix] = self.meter.target(self.mix_of(mix))
        return self._targets[mix]

    def run(self, name: str) -> dict[str, Any]:
        if name == "idle":
            return self.idle()
        if name == "overload":
            return self.overload(self.options.mixes["overload"])
        if name == "disconnects":
            return self.disconnects()
        return self.throughput(self.options.mixes[name])

    def throughput(self, mix: str) -> dict[str, Any]:
        """The best of a few numbers of connections, measured again and again."""
        options, target = self.options, self.target(mix)
        # The first load also warms up what grows with it: decoders, connections, memory.
        self.meter.measure(target, Closed(options.connections[mix][0], min(2.0, options.probe_seconds)))
        probes = {}
        for connections in options.connections[mix]:
            probes[connections] = self.meter.measure(target, Closed(connections, options.probe_seconds))
        best = max(probes, key=lambda c: probes[c]["items_s"])
        runs = [self.meter.measure(target, Closed(best, options.seconds)) for _ in range(options.repeats)]
        found = {
            "mix": mix,
            "connections": best,
            "probes": {c: {"items_s": p["items_s"], "p50": p["latency_ms"].get("p50")} for c, p in probes.items()},
            "runs": runs,
            "median": medians(runs),
        }
        if ceiling := self.ceilings.get("mixes", {}).get(mix):
            rates = [run["items_s"] / ceiling["items_s"] for run in runs]
            found["encoder_only"] = ceiling
            found["ratio"] = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
            found["decode_ratio"] = statistics.median(run["items_s"] for run in runs) / ceiling["decode_s"]
        return found

    def idle(self) -> dict[str, Any]:
        """One connection, one small photo at a time."""
        target, options = self.target("photo224"), self.options
        runs = [self.meter.measure(target, Closed(1, options.seconds)) for _ in range(options.repeats)]
        found: dict[str, Any] = {"mix": "photo224", "connections": 1, "runs": runs, "median": medians(runs)}
        if single := self.ceilings.get("single224"):
            latency = found["median"]["latency_ms"]
            found["single"] = single
            found["over_replay_ms"] = {q: latency[q] - single["replay_ms"] for q in ("p50", "p99")}
        return found

    def overload(self, mix: str) -> dict[str, Any]:
        """Twice the sustainable rate for a while, and the latency before, meanwhile and afterwards."""
        options, target = self.options, self.target(mix)
        unloaded = self.meter.measure(target, Closed(1, options.unloaded_seconds))
        connections = options.connections[mix][-1]
        capacity = self.meter.measure(target, Closed(connections, options.probe_seconds))["requests_s"]
        tried, sustainable = [], capacity * 0.3
        for share in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
            rate = capacity * share
            probe = self.meter.measure(target, Open(rate, 2 * options.probe_seconds))
            holds = holds_up(probe, unloaded["latency_ms"]["p50"])
            tried.append(
                {"rate": rate, "holds": holds, **{k: probe[k] for k in ("requests_s", "refused", "latency_ms")}}
            )
            self.meter.settle()
            if holds:
                sustainable = rate
                break
        self.meter.settle()
        watch = processes.MemoryWatch()
        plan = Open(2 * sustainable, options.overload_seconds, warm_s=2.0)
        found, records = self.meter.measure_all(target, plan, watch)
        over = records.finish
        rest = RECOVERY_S - (time.perf_counter() - over)
        time.sleep(max(0.0, rest))
        after_s = time.perf_counter() - over
        after = self.meter.measure(target, Closed(1, options.unloaded_seconds, warm_s=0.2))
        good = records.status == 200
        slices = []
        for begin in np.arange(records.begin, records.finish, 10.0):
            chosen = (records.start >= begin) & (records.start < begin + 10.0)
            slices.append(
                {
                    "from_s": float(begin - records.begin),
                    "accepted": int((chosen & good).sum()),
                    "refused": int((chosen & ~good).sum()),
                    "p99": quantiles((records.end - records.start)[chosen & good]).get("p99"),
                }
            )
        p99 = unloaded["latency_ms"]["p99"]
        return {
            "mix": mix,
            "unloaded": unloaded,
            "closed_loop_requests_s": capacity,
            "tried": tried,
            "sustainable_requests_s": sustainable,
            "none_held": not any(probe["holds"] for probe in tried),
            "offered_requests_s": 2 * sustainable,
            "overload": found,
            "slices": slices,
            "memory": watch.report(),
            "p99_over_unloaded": found["latency_ms"].get("p99", float("inf")) / p99,
            "after": {"after_s": after_s, **{k: after[k] for k in ("latency_ms", "codes", "stages_ms")}},
        }

    def disconnects(self) -> dict[str, Any]:
        """Clients that leave in the middle of things, beside others that stay."""
        options, mix = self.options, self.options.mixes["disconnects"]
        target, background = self.target(mix), self.options.connections[mix][0]
        self.leave(target, "download", max(20, options.disconnects // 10), background)
        self.meter.settle()
        before = self.state()
        moments = {}
        for moment in ("upload", "queue", "download"):
            started = time.monotonic()
            left, stayed = self.leave(target, moment, options.disconnects, background)
            moments[moment] = {"left": left, "seconds": time.monotonic() - started, "others": stayed}
        queues = self.meter.settle()
        time.sleep(RECOVERY_S)
        after = self.state()
        check = self.meter.measure(target, Closed(background, options.probe_seconds))
        return {
            "mix": mix,
            "count": options.disconnects,
            "moments": moments,
            "queues": queues,
            "before": before,
            "after": after,
            "then": {k: check[k] for k in ("items_s", "codes", "latency_ms", "samples", "wrong_length")},
        }

    def leave(self, target: Target, moment: str, count: int, background: int) -> tuple[int, dict[str, int]]:
        """How many left at that moment, and what the others were answered meanwhile."""
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(
            target=lambda: sender.send(leave_many(self.meter.address, target.requests, moment, count))
        )
        child.start()
        stayed: dict[str, int] = {}
        while child.is_alive() and not receiver.poll():
            for code, number in run_load(target, Closed(background, 2.0, warm_s=0.0), 1).codes.items():
                stayed[code] = stayed.get(code, 0) + number
        left = receiver.recv()
        child.join()
        return left, stayed

    def state(self) -> dict[str, Any]:
        """Open files and MiB of own memory by what the processes are, and bytes in Ray's object store."""
        files: dict[str, int] = {}
        memory: dict[str, float] = {}
        for cost in processes.measure(self.meter.service.processes()).values():
            files[cost.name] = files.get(cost.name, 0) + cost.files
            memory[cost.name] = round(memory.get(cost.name, 0.0) + cost.anon / 2**20, 1)
        return {"files": files, "anon_mib": memory}


def holds_up(found: Mapping[str, Any], unloaded_ms: float) -> bool:
    """Whether the service kept up with an open loop: next to none refused, none lost, and no queue that grew."""
    lost, done = found["broken"] + found["unanswered"], found["requests_s"] * found["seconds"]
    under_way = found["due"] / found["seconds"] * unloaded_ms / 1e3
    return not lost and found["refused"] <= 0.005 * found["due"] and done >= 0.95 * found["due"] - under_way


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure that the runs share, one level deep."""
    names = ("requests_s", "items_s", "tokens_s", "mb_in_s", "mb_out_s")
    found: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in names}
    for name in ("latency_ms", "first_byte_ms"):
        keys = set.intersection(*(set(run[name]) for run in runs))
        found[name] = {key: statistics.median(run[name][key] for run in runs) for key in sorted(keys)}
    return found


# --- settings of the service ---


def service_change(options: argparse.Namespace, folder: str) -> Callable[[dict[str, Any]], None]:
    """What `--ingress`, `--set` and the others change in serve_config.yaml."""

    def change(config: dict[str, Any]) -> None:
        application = config["applications"][0]
        args = application["args"]
        args["model"], args["device"] = folder, options.device
        args["image"]["max_batch_size"] = args["video"]["max_batch_size"] = 16 if options.device == "cuda" else 8
        args["limits"]["decode_processes"] = options.decode_processes
        for path, value in options.set:
            place(args, path, value)
        deployments = {deployment["name"]: deployment for deployment in application["deployments"]}
        deployments["Ingress"]["num_replicas"] = options.ingress
        if options.device == "cuda":
            for name, share in zip(("ImageGraph", "VideoGraph", "Eager"), options.gpu_shares, strict=True):
                deployments[name]["ray_actor_options"]["num_gpus"] = share
        for path, value in options.set_deployment:
            place(deployments, path, value)

    return change


def place(tree: dict[str, Any], path: str, value: Any) -> None:
    """Sets `a.b.c` in nested mappings."""
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value


def baseline_change(folder: str, device: str) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["applications"] = [
            {
                "name": "baseline",
                "route_prefix": "/",
                "import_path": "benchmarks.baseline:build",
                "args": {"model": folder, "device": device},
            }
        ]

    return change


def service_args(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """`args:` as the service will have them."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    service_change(options, folder)(config)
    return config["applications"][0]["args"]


def encoder_ceilings(options: argparse.Namespace, folder: str, mixes: Sequence[str]) -> dict[str, Any]:
    job = {
        "args": service_args(options, folder),
        "mixes": list(mixes),
        "video": options.video,
        "clips": options.clips,
        "scale": options.scale,
        "seconds": 0.7 if options.quick else 1.5,
        "decoders": options.cores,
    }
    # A replica has as many threads as Ray gives it: one for a fraction of a core.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "benchmarks.encoder_rate"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the encoder alone failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "ray", "av", "pillow", "uvicorn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def gpu_name() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _override(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not path=value")
    return path, yaml.safe_load(value)


def without_out(arguments: Sequence[str]) -> list[str]:
    """The arguments but for the folder that results go to, which changes no figure."""
    return [a for i, a in enumerate(arguments) if "--out" not in (a.partition("=")[0], *arguments[max(i - 1, 0) : i])]


def parse_arguments() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("tiny", "full"), default="tiny", help="full: Qwen3-VL-8B's tower with random weights")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    add("--scenarios", default=",".join(MIXES), help=f"of {','.join(MIXES)}; default: all")
    add("--quick", action="store_true", help="one repeat, short, few files: to see that it works and for a first idea")
    add("--repeats", type=int, help="default 3, quick 1")
    add("--seconds", type=float, help="of each measurement; default 8, quick 4")
    add("--probe-seconds", type=float, help="of each number of connections tried; default 3, quick 2")
    add(
        "--unloaded-seconds",
        type=float,
        help="of the unloaded latency before and after an overload; default 12, quick 4",
    )
    add("--overload-seconds", type=float, help="default 120, quick 15")
    add("--overload-mix", choices=sorted({m for m in MIXES.values() if m}), default="chat")
    add("--disconnects", type=int, help="clients that leave at each of three moments; default 1000, quick 60")
    add("--connections", type=_override, action="append", default=[], metavar="MIX=[N, ...]", help="to be tried")
    add(
        "--ingress",
        type=int,
        default=max(1, cores // 4),
        help="replicas of the ingress; default: a quarter of the cores",
    )
    add("--decode-processes", type=int, help="of each ingress replica; default: half the cores over all")
    add(
        "--gpu-shares",
        type=lambda t: [float(v) for v in t.split(",")],
        default=[0.4, 0.3, 0.3],
        metavar="IMAGE,VIDEO,EAGER",
    )
    add(
        "--set",
        type=_override,
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="in args, as image.max_tokens=8192",
    )
    add("--set-deployment", type=_override, action="append", default=[], metavar="NAME.PATH=VALUE")
    add("--env", type=_override, action="append", default=[], metavar="NAME=VALUE", help="of the service")
    add("--python-proxy", action="store_true", help="Serve's own proxy in place of HAProxy")
    add("--clients", type=int, default=max(1, min(4, cores // 4)), help="processes of the load generator")
    add("--no-clips", dest="clips", action="store_false", help="videos are animations: where PyAV is missing")
    add("--no-baseline", dest="baseline", action="store_false")
    add("--no-encoder", dest="encoder", action="store_false", help="leave the encoder-only rates out")
    add("--start-seconds", type=float, default=300, help="that the service may take to start")
    add("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.cores = cores
    options.gpu = gpu_name()
    options.device = options.device or ("cuda" if options.gpu else "cpu")
    quick = options.quick
    defaults = {
        "repeats": (3, 1),
        "seconds": (8.0, 4.0),
        "probe_seconds": (3.0, 2.0),
        "unloaded_seconds": (12.0, 4.0),
        "overload_seconds": (120.0, 15.0),
        "disconnects": (1000, 60),
        "decode_processes": (max(1, cores // (2 * options.ingress)),) * 2,
    }
    for name, (full, short) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, short if quick else full)
    connections = dict(CONNECTIONS[options.device])
    if quick:
        connections = {mix: (c[options.device == "cpu"],) for mix, c in QUICK_CONNECTIONS.items()}
    options.connections = {**connections, **{mix: tuple(values) for mix, values in options.connections}}
    # A large answer is what one leaves in the middle of; a CPU takes too long to make it.
    leaving = "photo1024" if options.device == "cuda" else "photo224"
    options.mixes = {**MIXES, "overload": options.overload_mix, "disconnects": leaving}
    options.video = (448, 8) if options.model == "full" else (320, 4)
    options.scale = 0.2 if quick or options.device == "cpu" else 1.0
    options.scenarios = options.scenarios.split(",")
    if unknown := set(options.scenarios) - set(MIXES):
        parser.error(f"no scenario is called {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    # A run that is ended from outside leaves no service behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options = parse_arguments()
    if options.model == "full":
        folder = str(write_full_checkpoint(cache_folder() / "full-8b-v1"))
    else:
        from encoder.checkpoint import resolve_checkpoint

        folder = str(resolve_checkpoint("tiny"))
    run: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.serve", *without_out(sys.argv[1:])]),
        "machine": options.gpu or f"CPU, {platform.machine()}",
        "cores": options.cores,
        "versions": versions(),
        "args": service_args(options, folder),
        "ingress": options.ingress,
        "clients": options.clients,
        "proxy": "Serve's own" if options.python_proxy else "HAProxy",
    }
    report = Report(options.out / f"serve-{options.model}-{options.device}.json", options.model, options.device, run)
    media = Media(options.video, options.clips)
    mixes: dict[str, Mix] = {}

    def mix_of(name: str) -> Mix:
        if name not in mixes:
            mixes[name] = make_mix(name, media, options.scale)
        return mixes[name]

    wanted = {options.mixes[name] for name in options.scenarios}
    ceilings: dict[str, Any] = {}
    if options.encoder:
        with report.part("encoder only"):
            ceilings = run["encoder_only"] = encoder_ceilings(options, folder, sorted(wanted))
    for name in sorted(wanted):
        mix_of(name)
    environment = {name: str(value) for name, value in options.env}
    with report.part("service"):
        with start(service_change(options, folder), options, environment) as service:
            run["start_seconds"] = service.start_seconds
            meter = Meter(service, options.clients)
            scenarios = Scenarios(meter, options, mix_of, ceilings)
            for name in options.scenarios:
                with report.part(name):
                    report.put(name, scenarios.run(name))
            run["pss_mib"] = {n: round(b / 2**20, 1) for n, b in processes.pss_bytes(service.processes()).items()}
    if "chat" in options.scenarios and options.baseline:
        with report.part("baseline"):
            with start(baseline_change(folder, options.device), options, {}) as service:
                theirs = Scenarios(Meter(service, options.clients), options, mix_of, {}).throughput("chat")
            ours = report.data["scenarios"].get("chat")
            if ours and ours["run"] == report.number:
                theirs["speedup"] = ours["median"]["items_s"] / theirs["median"]["items_s"]
            report.put("chat, baseline", theirs)
    report.write()
    print(markdown(report.data))


def start(
    change: Callable[[dict[str, Any]], None], options: argparse.Namespace, environment: dict[str, str]
) -> Service:
    return Service(
        change,
        environment,
        timeout_s=options.start_seconds,
        haproxy=not options.python_proxy,
        dashboard=False,
    )


if __name__ == "__main__":
    main()
