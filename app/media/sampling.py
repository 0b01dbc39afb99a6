"""Which frames of a clip are taken, and when they are shown. Pure functions over presentation time stamps."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from configs.processor import ProcessorConfig

# What the reference assumes for a clip that does not tell its rate.
DEFAULT_RATE = Fraction(24)
# Matroska rounds to it, and a file that passed through Matroska keeps the rounding.
_TOLERANCE = Fraction(1, 1000)


@dataclass(frozen=True)
class Clock:
    """When each frame of a clip is shown.

    ticks: ascending, from 0 at the first shown frame, in units of `time_base` seconds.
    rate: frames per second.
    constant: the frames lie on an even grid, so that index and time say the same.
    """

    ticks: Sequence[int]
    time_base: Fraction
    rate: Fraction
    constant: bool

    def seconds(self, index: int) -> Fraction:
        return self.ticks[index] * self.time_base

    @property
    def duration(self) -> float:
        """Seconds until the last frame ends."""
        return float(self.seconds(-1) + 1 / self.rate)


def make_clock(
    stamps: Sequence[int | None], time_base: Fraction, header_rate: Fraction | None, length: int | None = None
) -> Clock:
    """A clip's clock from its frames' presentation time stamps, in shown order, in units of `time_base` seconds.

    - Stamps that are missing or do not ascend are not believed: the header's rate (else 24) rules.
    - Stamps within a tick or a millisecond of the header's even grid: constant, at the header's rate.
    - Within that of the even grid from first to last frame: constant, at the measured rate.
    - Else variable. `length`, ticks until the last frame ends, gives the mean rate where a format tells it.
    """
    total = len(stamps)
    header_rate = header_rate if header_rate is not None and header_rate > 0 else None
    known = [s for s in stamps if s is not None]
    if total < 2 or len(known) < total or any(a >= b for a, b in itertools.pairwise(known)):
        rate = header_rate or DEFAULT_RATE
        if total == 1 and length:
            rate = 1 / (length * time_base)
        return Clock(range(total), 1 / rate, rate, True)
    ticks = [s - known[0] for s in known]
    tolerance = max(Fraction(1), _TOLERANCE / time_base)
    measured = Fraction(total, length) / time_base if length else Fraction(total - 1, ticks[-1]) / time_base
    for candidate in (header_rate, measured):
        if candidate is not None and _on_grid(ticks, 1 / (candidate * time_base), tolerance):
            return Clock(ticks, time_base, candidate, True)
    return Clock(ticks, time_base, measured, False)


def _on_grid(ticks: list[int], step: Fraction, tolerance: Fraction) -> bool:
    numerator, denominator = step.numerator, step.denominator
    limit = tolerance * denominator
    return all(abs(t * denominator - i * numerator) <= limit for i, t in enumerate(ticks))


def count_sampled(clock: Clock, fps: float | None, num_frames: int | None, processor: ProcessorConfig) -> int:
    """How many frames to take: `sample_frames` of transformers' Qwen3-VL video processor.

    `num_frames` above what the clip has means every frame.
    """
    total = len(clock.ticks)
    if num_frames is not None:
        return min(num_frames, total)
    wanted = int(min(total / float(clock.rate) * (processor.fps if fps is None else fps), total))
    return min(max(wanted, processor.min_frames), processor.max_frames, total)


def choose(clock: Clock, count: int) -> list[int]:
    """Indices of `count` frames.

    Constant rate: the reference's, evenly spaced by index and rounded to even. Variable rate: the frames shown
    nearest to an even grid in time from the first frame to the last; the earlier one at a tie.
    """
    total = len(clock.ticks)
    if count >= total:
        return list(range(total))
    if clock.constant:
        return np.linspace(0, total - 1, count).round().astype(int).tolist()
    if count == 1:
        return [0]
    return [_nearest(clock.ticks, Fraction(clock.ticks[-1] * k, count - 1)) for k in range(count)]


def _nearest(ticks: Sequence[int], when: Fraction) -> int:
    """Index of the tick nearest to `when`; the earlier at a tie."""
    right = min(bisect_left(ticks, when), len(ticks) - 1)
    left = max(right - 1, 0)
    return left if when - ticks[left] <= ticks[right] - when else right


def pair_timestamps(times: Sequence[Fraction], temporal: int) -> np.ndarray:
    """float32 [t]: the mean of the first and last time of each `temporal` frames; an odd last frame counts twice."""
    padded = [*times, *[times[-1]] * (-len(times) % temporal)]
    return np.array(
        [float(padded[i] + padded[i + temporal - 1]) / 2 for i in range(0, len(padded), temporal)], dtype=np.float32
    )
