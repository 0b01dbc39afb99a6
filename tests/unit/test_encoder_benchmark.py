"""How the benchmark of the tower takes turns, and what it reports from a run on a CPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import encoder
from benchmarks.encoder import ROUNDS, Benchmark, Clock, Column, Report, Timed, interleave, markdown, turns

# So short that every row gets the fewest repetitions.
CLOCK = Clock(torch.device("cpu"), 0.0)
CALLS = 2
IMAGE = Column("an image", "image", 1, (1, 3, 64, 64))
VIDEO = Column("a long video", "video", 1, (32, 3, 64, 64))
TWICE = "ours as served, 2 videos of t=8"


def test_every_row_has_a_turn_in_each_round_and_another_starts_it() -> None:
    assert turns(3, 4) == [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]
    assert turns(0, 4) == []


def test_rows_take_turns_and_one_that_fails_drops_out() -> None:
    log: list[str] = []
    failed: list[str] = []

    @contextlib.contextmanager
    def guard(name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            failed.append(name)

    def timed(name: str, calls: float = float("inf")) -> Timed:
        def run() -> None:
            log.append(name)
            if log.count(name) > calls:
                raise RuntimeError

        return Timed(name, run, lambda: log.append(f"ahead of {name}"), {})

    # A row is called once before the turns, so that one of these fails there and the other in its second turn.
    times = interleave([timed("a"), timed("never", 0), timed("b"), timed("once", 1 + CALLS)], CLOCK, guard)
    assert {name: len(found) for name, found in times.items()} == {"a": ROUNDS * CALLS, "b": ROUNDS * CALLS}
    assert failed == ["never", "once"]
    first = log[log.index("once") + 1 :][: 3 * (1 + CALLS)]
    assert first == [call for name in ("a", "b", "once") for call in (f"ahead of {name}", *[name] * CALLS)]


@pytest.mark.parametrize(
    ("ahead", "run", "wait"),
    [
        # Seconds of the host, and of host and device. A device that is done with the host has nothing to do meanwhile.
        ((0.002, 0.002), (0.002, 0.002), 0.001 + 2 * 0.002 * (1 + CALLS)),
        ((0.002, 0.050), (0.0, 0.050), 0.001 + 2 * 0.002),
        ((0.0, 0.005), (0.002, 0.005), 0.001 + 2 * 0.002 + CALLS * (2 * 0.002 - 0.003)),
        ((0.001, 0.050), (0.001, 0.050), 0.001 + 2 * 0.001),
        ((0.060, 0.060), (0.060, 0.060), 0.2),
    ],
)
def test_the_wait_covers_twice_the_hosts_time(
    ahead: tuple[float, float], run: tuple[float, float], wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = {"ahead": ahead, "run": run}
    monkeypatch.setattr(Clock, "_once", lambda clock, call: takes[call()])
    assert CLOCK.plan(lambda: "run", lambda: "ahead") == (CALLS, pytest.approx(wait))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report of a short run in which one row cannot be captured for the video."""
    capture = encoder.capture_batch

    def failing(ours: Any, column: Column, frames: Any, attention: Any, ops: Any, *room: Any) -> Any:
        if column is VIDEO and isinstance(ops, encoder.TorchNormsAndGelu):
            raise RuntimeError("no room")
        return capture(ours, column, frames, attention, ops, *room)

    monkeypatch.setattr(encoder, "capture_batch", failing)
    columns = [IMAGE, VIDEO]
    head = {"model": "tiny", "device": "CPU", "versions": {}, "date": "", "command": "", "dtype": "float32"}
    report = Report(tmp_path / "report.json", head, columns)
    with torch.no_grad():
        Benchmark("tiny", CLOCK, report, columns).run(quick=True, compile_seconds=0)
    found: dict[str, Any] = json.loads(report.path.read_text())
    return found


def test_the_report_of_a_run(run: dict[str, Any]) -> None:
    rows = run["rows"]
    vllm = "as vLLM does it: sdpa, torch norms and GELU, power-of-two budget, 64 slots"
    graphs = [
        "plain graph, exact shape, sdpa",
        "fused graph, exact shape, sdpa",
        "the same in a power-of-two budget, sdpa",
        vllm,
        "ours, exact shape, sdpa, torch",
        "ours in a power-of-two budget, sdpa, torch",
    ]
    absent = [f"fused graph, exact shape, {name}" for name in ("cudnn-dense", "flash-attn-4", "triton-varlen")]
    served = [f"{row}: {what}" for row in ("ours as served", TWICE) for what in ("GPU time", "its replay alone")]
    assert [name for name in rows if not name.endswith("host to host")] == [
        "floor",
        "transformers eager, sdpa",
        "transformers eager, packed attention",
        "transformers compiled, best mode",
        graphs[0],
        *absent,
        *graphs[1:],
        *served,
    ]
    assert [name for name in rows if name.endswith("host to host")] == [
        "ours as served: wall, host to host",
        f"{TWICE}: wall, host to host",
    ]
    for name in (*graphs, *served):
        expected = {IMAGE.name, VIDEO.name} - (
            {IMAGE.name} if TWICE in name else {VIDEO.name} if name == vllm else set()
        )
        assert rows[name].keys() == expected, name
        assert {cell["n"] for cell in rows[name].values()} == {ROUNDS * CALLS}, name
    assert all(max(cell["errors"]) < 1e-5 for name in graphs for cell in rows[name].values())
    assert [f["part"] for f in run["failures"]] == [f"{vllm}, {VIDEO.name}"]
    assert run["served"]["ours as served"].keys() == {IMAGE.name, VIDEO.name}
    assert run["served"][TWICE].keys() == {VIDEO.name}
    assert all("pipelined" in details for cells in run["served"].values() for details in cells.values())
    assert "## ours as served: the cells" in markdown(run)
