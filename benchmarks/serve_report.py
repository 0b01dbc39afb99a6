"""The Markdown of `benchmarks.serve`, from its decoded JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(data: Mapping[str, Any]) -> str:
    scenarios = data["scenarios"]
    lines = [f"# The service over HTTP, `{data['model']}`, on {data['device']}", ""]
    for number, run in enumerate(data["runs"]):
        if "command" in run:
            found = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            lines.append(
                f"- run {number}: {run['date']}, {run['machine']}, {run['cores']} cores; {found}; {run['proxy']}, "
                f"{run['ingress']} ingress replicas, {run['clients']} client processes; `{run['command']}`"
            )
    lines += ["", "Milliseconds; medians of the repeats (least to most) where there are several.", ""]
    lines += _summary(scenarios)
    lines += _throughput({n: s for n, s in scenarios.items() if "probes" in s or n == "idle"})
    if "overload" in scenarios:
        lines += _overload(scenarios["overload"])
    if "disconnects" in scenarios:
        lines += _disconnects(scenarios["disconnects"])
    lines += _encoder(data["runs"])
    lines += ["", "## What failed", ""]
    lines += [f"- {f['scenario']} (run {f['run']}): `{f['error'][:300]}`" for f in data["failures"]] or ["Nothing."]
    return "\n".join(lines) + "\n"


def _summary(scenarios: Mapping[str, Any]) -> list[str]:
    """The targets and what was measured for each."""
    rows = []
    for name, target in (("photo1024", "85%"), ("photo224x16", "80%, or 80% of the decoders' rate")):
        if "ratio" in scenarios.get(name, {}):
            found = scenarios[name]
            text = f"{_percent(found['ratio'])} of the encoder-only rate; {found['decode_ratio']:.0%} of the decoders'"
            rows.append([f"{name}, throughput", target, text])
    if "photo224" in scenarios:
        rows.append(
            ["photo224, one a request", "1000 images/s", f"{_spread(scenarios['photo224'], 'items_s')} images/s"]
        )
    if "over_replay_ms" in scenarios.get("idle", {}):
        over = scenarios["idle"]["over_replay_ms"]
        rows.append(["idle, over the replay", "p50 7, p99 15", f"p50 {over['p50']:.1f}, p99 {over['p99']:.1f}"])
    if "overload" in scenarios:
        found = scenarios["overload"]
        after, before = found["after"]["latency_ms"], found["unloaded"]["latency_ms"]
        rows.append(["overload, p99 of the accepted", "3x unloaded", f"{found['p99_over_unloaded']:.2f}x"])
        rows.append(["overload, refusals", "at once", _latency(found["overload"]["refusal_ms"])])
        text = f"p50 {after['p50']:.1f}, p99 {after['p99']:.1f} (before: {before['p50']:.1f}, {before['p99']:.1f})"
        rows.append([f"{found['after']['after_s']:.0f} s after the overload", "as before", text])
    if "speedup" in scenarios.get("chat, baseline", {}):
        rows.append(["chat, over the baseline", "5x", f"{scenarios['chat, baseline']['speedup']:.2f}x"])
    if "disconnects" in scenarios:
        found = scenarios["disconnects"]
        files = sum(found["after"]["files"].values()) - sum(found["before"]["files"].values())
        anon = sum(found["after"]["anon_mib"].values()) - sum(found["before"]["anon_mib"].values())
        queued = sum(queue["items"] + queue["bytes"] for queue in found["queues"].values())
        text = f"{files:+d} open files, {anon:+.0f} MiB over all processes, {queued} queued items and bytes"
        rows.append([f"{found['count']} clients leave, three times", "nothing leaks", text])
    return _table(["", "target", "measured"], rows) if rows else []


def _throughput(scenarios: Mapping[str, Any]) -> list[str]:
    if not scenarios:
        return []
    head = ["", "connections", "requests/s", "items/s", "tokens/s", "MB/s in", "MB/s out", "p50", "p95", "p99"]
    head += ["of encoder-only", "busy share", "errors", "answers checked"]
    body, stages, cores = [], [], []
    for name, found in scenarios.items():
        latency, runs = found["median"]["latency_ms"], found["runs"]
        codes = {c: n for run in runs for c, n in run["codes"].items() if c != "200"}
        samples = {k: sum(run["samples"][k] for run in runs) for k in ("equal", "close", "wrong")}
        wrong = samples["wrong"] + sum(run["wrong_length"] for run in runs)
        row = [name, str(found["connections"])]
        row += [_spread(found, key) for key in ("requests_s", "items_s", "tokens_s")]
        row += [_number(found["median"][key]) for key in ("mb_in_s", "mb_out_s")]
        row += [_number(latency.get(q)) for q in ("p50", "p95", "p99")]
        row.append(_percent(found["ratio"]) if "ratio" in found else "")
        row.append(_busy(runs[-1]["pools"]))
        row.append(", ".join(f"{n}x {c}" for c, n in codes.items()) or "0")
        row.append(f"{samples['equal']} equal, {samples['close']} close, {wrong} wrong")
        body.append(row)
        timings = runs[-1]["stages_ms"]
        stages.append([name, *(_number(timings.get(s, {}).get("p50")) for s in STAGES)])
        stages[-1].append(_number(found["median"]["first_byte_ms"].get("p50")))
        used = ", ".join(f"{n} {c:.2f}" for n, c in runs[-1]["cores"].items() if c >= 0.01)
        cores.append([name, used, ", ".join(map(str, runs[-1]["client_cores"]))])
    lines = ["", "## Throughput and latency, closed loop", "", *_table(head, body)]
    lines += ["", "Where the time goes: medians of `Server-Timing`, and the first byte at the client.", ""]
    lines += _table(["", *STAGES, "first byte"], stages)
    lines += ["", "Cores in use.", "", *_table(["", "service", "clients"], cores)]
    return lines


STAGES = ("fetch", "decode", "queue", "encode", "format", "total")


GUESSED = " (a guess: none of the tried rates held)"


def _overload(found: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## Overload, mix {found['mix']}", ""]
    guessed = GUESSED if found["none_held"] else ""
    lines.append(
        f"Closed loop: {found['closed_loop_requests_s']:.1f} requests/s. Sustainable: "
        f"{found['sustainable_requests_s']:.1f}{guessed}. Offered: {found['offered_requests_s']:.1f} for "
        f"{found['overload']['seconds']:.0f} s."
    )
    measured = found["overload"]
    body = [
        ["unloaded", str(found["unloaded"]["latency_ms"]["n"]), "", _latency(found["unloaded"]["latency_ms"]), ""],
        [
            "overload",
            str(measured["latency_ms"]["n"]),
            str(measured["refused"]),
            _latency(measured["latency_ms"]),
            _latency(measured["refusal_ms"]),
        ],
        [
            f"{found['after']['after_s']:.1f} s after",
            str(found["after"]["latency_ms"]["n"]),
            "",
            _latency(found["after"]["latency_ms"]),
            "",
        ],
    ]
    lines += ["", *_table(["", "accepted", "refused", "latency", "refusal"], body)]
    codes = ", ".join(f"{n}x {c}" for c, n in measured["codes"].items())
    lines += ["", f"Answers: {codes}; {measured['unanswered']} unanswered; busy share {_busy(measured['pools'])}."]
    body = [[f"{s['from_s']:.0f} s", str(s["accepted"]), str(s["refused"]), _number(s["p99"])] for s in found["slices"]]
    lines += ["", *_table(["from", "accepted", "refused", "p99"], body)]
    lines += ["", "Memory in MiB, sampled every second; growth: last quarter over second quarter, of own memory.", ""]
    keys = ("rss_first", "rss_peak", "rss_last", "anon_first", "anon_peak", "anon_last", "anon_growth")
    shown = [row for row in found["memory"] if row["rss_peak"] >= 20]
    body = [[f"{row['name']} {row['pid']}", *(_number(row[key]) for key in keys)] for row in shown]
    return lines + _table(["process", *(key.replace("_", ", ") for key in keys)], body)


def _disconnects(found: Mapping[str, Any]) -> list[str]:
    lines = ["", f"## {found['count']} clients that leave, at each of three moments", ""]
    body = [
        [moment, str(m["left"]), f"{m['seconds']:.1f}", ", ".join(f"{n}x {c}" for c, n in m["others"].items())]
        for moment, m in found["moments"].items()
    ]
    lines += _table(["in mid-", "left then", "seconds", "those who stayed"], body)
    names = sorted(found["before"]["files"].keys() | found["after"]["files"].keys())
    body = [
        [
            name,
            *(str(found[when]["files"].get(name, 0)) for when in ("before", "after")),
            *(_number(found[when]["anon_mib"].get(name, 0)) for when in ("before", "after")),
        ]
        for name in names
    ]
    lines += ["", *_table(["", "files before", "after", "own MiB before", "after"], body)]
    queues = "; ".join(f"{name}: {queue}" for name, queue in found["queues"].items())
    return [*lines, "", f"Queues then: {queues}. Answers then: {found['then']['codes']}."]


def _encoder(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for number, run in enumerate(runs):
        if "encoder_only" not in run:
            continue
        found = run["encoder_only"]
        body = [
            [
                name,
                _number(mix["items_s"]),
                _number(mix["tokens_s"]),
                "; ".join(
                    f"{modality} " + ", ".join(f"{n}: {_number(rate['items_s'])}" for n, rate in rates.items())
                    for modality, rates in mix.get("by_batch", {}).items()
                ),
                _number(mix["decode_s"]),
            ]
            for name, mix in found["mixes"].items()
        ]
        lines += ["", f"## The encoder and the decoders alone, run {number}", ""]
        head = ["", "items/s", "tokens/s", "items/s by batch size", f"decoded/s, {found['job']['decoders']} processes"]
        lines += _table(head, body)
        if "single224" in found:
            single = found["single224"]
            text = f"One 224^2 photo: replay {single['replay_ms']:.2f}, host to host {single['host_to_host_ms']:.2f}."
            lines += ["", text]
    return lines


def _busy(pools: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{n} {p['busy_share']:.0%}" for n, p in pools.items() if "busy_share" in p)


def _spread(found: Mapping[str, Any], key: str) -> str:
    values = [run[key] for run in found["runs"]]
    spread = f" ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else ""
    return _number(found["median"][key]) + spread


def _percent(ratio: Mapping[str, float]) -> str:
    spread = f" ({ratio['min']:.0%} to {ratio['max']:.0%})" if ratio["max"] > ratio["min"] else ""
    return f"{ratio['median']:.0%}{spread}"


def _latency(found: Mapping[str, float]) -> str:
    if not found.get("n"):
        return ""
    return ", ".join(f"{q} {_number(found[q])}" for q in ("p50", "p95", "p99", "max"))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]
