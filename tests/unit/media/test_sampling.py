"""Frame choice against transformers' own sampler, and its properties."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.media.sampling import Clock, choose, count_sampled, make_clock, pair_timestamps
from tests.unit.media.reference import PROCESSOR, reference_indices, reference_timestamps

RATES = st.sampled_from([1, 2, 10, 24, 25, 30, 50, 60, 120, Fraction(30000, 1001), Fraction(24000, 1001)]).map(Fraction)


@given(total=st.integers(1, 4000), rate=RATES, fps=st.none() | st.floats(0.01, 200))
def test_constant_rate_takes_the_reference_s_frames(total: int, rate: Fraction, fps: float | None) -> None:
    clock = Clock(range(total), 1 / rate, rate, True)
    indices = choose(clock, count_sampled(clock, fps, None, PROCESSOR))
    assert indices == reference_indices(total, rate, fps)
    times = pair_timestamps([clock.seconds(i) for i in indices], 2)
    np.testing.assert_allclose(times, reference_timestamps(indices, float(rate)), rtol=1e-6, atol=1e-6)


@given(total=st.integers(1, 4000), num_frames=st.integers(1, 5000))
def test_num_frames_takes_the_reference_s_frames(total: int, num_frames: int) -> None:
    clock = Clock(range(total), Fraction(1, 30), Fraction(30), True)
    indices = choose(clock, count_sampled(clock, None, num_frames, PROCESSOR))
    assert indices == reference_indices(total, Fraction(30), None, min(num_frames, total))


@given(gaps=st.lists(st.integers(1, 10**6), min_size=1, max_size=60), count=st.integers(1, 70))
def test_variable_rate_takes_the_nearest_in_time(gaps: list[int], count: int) -> None:
    ticks = [0, *accumulate(gaps)]
    chosen = choose(Clock(ticks, Fraction(1, 90000), Fraction(30), False), count)
    if count >= len(ticks):
        assert chosen == list(range(len(ticks)))
        return
    assert len(chosen) == count
    assert chosen == sorted(chosen)
    for k, index in enumerate(chosen):
        ideal = Fraction(ticks[-1] * k, max(count - 1, 1))
        assert abs(ticks[index] - ideal) == min(abs(t - ideal) for t in ticks)
    assert chosen[0] == 0
    assert count == 1 or chosen[-1] == len(ticks) - 1


@given(total=st.integers(2, 500), rate=RATES, offset=st.integers(-(10**9), 10**9), base=st.sampled_from([1000, 90000]))
def test_rounded_stamps_of_a_constant_rate_are_recognised(total: int, rate: Fraction, offset: int, base: int) -> None:
    stamps = [offset + round(i * base / rate) for i in range(total)]
    clock = make_clock(stamps, Fraction(1, base), rate)
    assert (clock.constant, clock.rate) == (True, rate)
    assert clock.seconds(total - 1) == Fraction(stamps[-1] - offset, base)


def test_a_header_s_rate_that_the_stamps_contradict_is_not_believed() -> None:
    clock = make_clock([i * 40 for i in range(50)], Fraction(1, 1000), Fraction(90))
    assert (clock.constant, clock.rate) == (True, Fraction(25))


@pytest.mark.parametrize("stamps", [[0, 1, None, 3], [0, 2, 1, 3], [0, 1, 1, 2], [None] * 4])
def test_missing_or_unordered_stamps_fall_back_to_the_header_s_rate(stamps: list[int | None]) -> None:
    clock = make_clock(stamps, Fraction(1, 30), Fraction(15))
    assert clock.constant
    assert [clock.seconds(i) for i in range(4)] == [Fraction(i, 15) for i in range(4)]
    assert make_clock(stamps, Fraction(1, 30), None).rate == 24


def test_one_late_frame_makes_a_clip_variable() -> None:
    stamps = [i * 40 for i in range(20)]
    stamps[7] += 5
    assert not make_clock(stamps, Fraction(1, 1000), Fraction(25)).constant


def test_duration_counts_the_last_frame() -> None:
    assert make_clock(list(range(50)), Fraction(1, 25), Fraction(25)).duration == pytest.approx(2.0)
    animation = make_clock([0, 100, 500], Fraction(1, 1000), None, length=600)
    assert animation.rate == Fraction(3 * 1000, 600)


def test_a_lone_frame_is_its_own_pair() -> None:
    assert pair_timestamps([Fraction(0)], 2).tolist() == [0.0]
    assert pair_timestamps([Fraction(0), Fraction(1), Fraction(5)], 2).tolist() == [0.5, 5.0]
