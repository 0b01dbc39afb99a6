"""What the soak concludes from its samples and attempts, and how its clients judge an answer."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.checked import Answer, Attempt, CheckedLoad, Outcome
from benchmarks.soak import Sample, growth, report, slope, together


@given(st.floats(-5, 5), st.floats(-1e3, 1e3), st.integers(0, 19))
def test_an_odd_point_does_not_move_the_slope(rise: float, start: float, odd: int) -> None:
    points = [(float(x), start + rise * x, 300.0) for x in range(20)]
    assert slope(points) == pytest.approx(rise, abs=1e-6)
    points[odd] = (float(odd), 1e9, 300.0)
    assert slope(points) == pytest.approx(rise, abs=1e-6)


def samples(start: int, per_s: float, seconds: int = 600) -> list[Sample]:
    return [
        Sample(s, {"ingress": start // 2, "proxy": start // 2 + int(per_s * s)}, {"ingress": s, "proxy": s}, 100, 9)
        for s in range(0, seconds, 10)
    ]


def load(outcomes: list[tuple[Outcome, str]]) -> CheckedLoad:
    made = CheckedLoad("http://127.0.0.1:1", [], {}, clients=0)
    made.attempts = [Attempt("a", float(i), 0.1, outcome, detail) for i, (outcome, detail) in enumerate(outcomes)]
    return made


def test_growth_is_told_over_the_run() -> None:
    told = growth([(s.seconds, sum(s.memory.values()), 300.0) for s in samples(1000, 1.0)], 600)
    assert told["over_the_run"] == pytest.approx(600)
    assert told["median"] == pytest.approx(1000 + 370)
    assert together([told, {"median": 630.0, "over_the_run": 0.0}]) == pytest.approx(
        {"median": 2000.0, "over_the_run": 600.0, "part": 0.3}
    )


@pytest.mark.parametrize("leak_per_s", [0.0, 0.1])
def test_warming_up_after_a_kill_is_not_growth(leak_per_s: float) -> None:
    """A process grows by 100 in the 100 s after each start, and was last killed long before the end."""
    starts, points = [0, 150, 400, 700], []
    for now in range(0, 1200, 5):
        age = now - max(start for start in starts if start <= now)
        points.append((float(now), 300.0 + min(age, 100) + leak_per_s * now, float(age)))
    assert growth(points, 1200)["over_the_run"] == pytest.approx(leak_per_s * 1200, abs=3)


def test_only_what_is_wrong_fails() -> None:
    good = load([("right", "200"), ("retry", "503"), ("right", "200")])
    assert report(good, [], samples(10_000, 1.0), 5, 600, True)["failures"] == []
    grown = report(good, [], samples(1000, 1.0), 5, 600, True)["failures"]
    assert [f.split(" grew")[0] for f in grown] == ["memory"]
    for outcome in ("wrong", "failed", "hang"):
        bad = load([("right", "200"), (outcome, "200")])
        assert report(bad, [], samples(10_000, 0.0), 5, 600, True)["failures"] == [f"1 attempts ended {outcome}"]
    assert report(good, [], [], 5, 600, False)["failures"] == [
        "the service was not well at the end",
        "only 0 samples of memory",
    ]


def encoded(values: bytes, metadata: str) -> httpx.Response:
    header = {"0.embeddings": {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}
    text = json.dumps({"__metadata__": {"items": metadata}, **header}).encode()
    return httpx.Response(200, content=len(text).to_bytes(8, "little") + text + values)


def test_answers_are_the_same_if_their_tensors_are() -> None:
    right = Answer.of(encoded(b"12345678", "budget 64"))
    assert Answer.of(encoded(b"12345678", "budget 128")) == right
    assert Answer.of(encoded(b"12345679", "budget 64")) != right
    error = httpx.Response(415, json={"error": {"code": "unsupported_media", "message": "a"}})
    assert Answer.of(error) == Answer(415, b"unsupported_media")


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (encoded(b"1234", "x"), "right"),
        (encoded(b"1235", "x"), "wrong"),
        (httpx.Response(503, json={"error": {"code": "unavailable"}}), "retry"),
        (httpx.Response(502, text="Bad Gateway"), "retry"),
        (httpx.Response(500, text="Internal Server Error"), "failed"),
        (httpx.Response(400, json={"error": {"code": "undecodable_media"}}), "failed"),
        (httpx.Response(200, text="<html>"), "failed"),
    ],
)
def test_judging(response: httpx.Response, outcome: Outcome) -> None:
    assert CheckedLoad._judge(response, Answer.of(encoded(b"1234", "y")))[0] == outcome
