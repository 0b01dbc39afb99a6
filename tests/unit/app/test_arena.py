"""The shared memory of an ingress replica and who owns what of it."""

from __future__ import annotations

import gc
import os
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.arena import KEPT_BYTES, Arena, FreeList

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE)), max_size=60), st.randoms())
def test_places_never_overlap_and_all_come_back(steps: list[tuple[bool, int]], random: object) -> None:
    free, taken = FreeList(16 * PAGE), dict[int, int]()
    for take, size in steps:
        if take:
            start = free.take(size)
            if start is None:
                wanted = max(-(-size // PAGE), 1) * PAGE
                assert all(room < wanted for _, room in free.holes)
            else:
                taken[start] = size
        elif taken:
            start = random.choice(sorted(taken))  # type: ignore[attr-defined]
            free.give_back(start, taken.pop(start))
        used = sorted((start, start + max(-(-size // PAGE), 1) * PAGE) for start, size in taken.items())
        holes = [(start, start + room) for start, room in free.holes]
        whole = sorted(used + holes)
        assert whole[0][0] == 0
        assert whole[-1][1] == 16 * PAGE
        assert all(end == start for (_, end), (start, _) in pairwise(whole))
        assert all(end < start for (_, end), (start, _) in pairwise(holes))
    for start, size in taken.items():
        free.give_back(start, size)
    assert free.holes == [(0, 16 * PAGE)]


def test_a_place_is_free_once_its_last_view_is_gone() -> None:
    arena = Arena(16 * PAGE)
    first, second = arena.take(5000), arena.take(100)
    assert first is not None
    assert second is not None
    first[:] = 1
    second[:] = 2
    assert (arena.start_of(first), arena.start_of(second)) == (0, 2 * PAGE)
    view = first.view(np.uint16)[:10].reshape(2, 5)[::-1]
    assert arena.in_use == 3 * PAGE
    del first
    gc.collect()
    assert arena.in_use == 3 * PAGE
    assert view.tolist() == [[257] * 5] * 2
    del view
    assert arena.in_use == PAGE
    again = arena.take(1)
    assert again is not None
    assert arena.start_of(again) == 0
    assert second.tolist() == [2] * 100
    assert arena.take(16 * PAGE) is None


def test_what_is_from_elsewhere_has_no_place() -> None:
    arena = Arena(16 * PAGE)
    assert arena.start_of(np.zeros(9, np.uint8)) is None
    mine = arena.take(100)
    assert mine is not None
    assert arena.start_of(mine.reshape(10, 10).T) is None


def resident(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_what_is_not_in_use_goes_back_to_the_system() -> None:
    arena = Arena(KEPT_BYTES + 16 * PAGE)
    low, first, second = arena.take(KEPT_BYTES), arena.take(8 * PAGE), arena.take(PAGE)
    assert low is not None
    assert first is not None
    assert second is not None
    low[: 2 * PAGE], first[:], second[:] = 1, 2, 3
    arena.trim()
    assert resident(arena) == 11 * PAGE
    del first
    arena.trim()
    assert resident(arena) == 3 * PAGE
    assert second.tolist() == [3] * PAGE
    del low, second
    arena.trim()
    assert resident(arena) == 2 * PAGE  # kept
    whole = arena.take(KEPT_BYTES + 9 * PAGE)
    assert whole is not None
    assert whole[KEPT_BYTES:].max() == 0
    whole[KEPT_BYTES:] = 4
    del whole
    arena.trim()
    assert resident(arena) == 11 * PAGE  # has just been in use
    arena.trim()
    assert resident(arena) == 2 * PAGE
    assert not arena.grown


def test_a_steady_load_finds_its_pages_and_a_peak_goes_back() -> None:
    arena = Arena(KEPT_BYTES + 64 * PAGE)
    low = arena.take(KEPT_BYTES)
    assert low is not None

    def use(pages: int, value: int) -> int:
        """The least byte that was there before."""
        some = arena.take(pages * PAGE)
        assert some is not None
        least = int(some.min())
        some[:] = value
        return least

    assert use(40, 1) == 0
    arena.trim()
    for value in (2, 3, 4):
        assert resident(arena) == (40 if value == 2 else 12) * PAGE
        assert use(12, value) == value - 1
        assert use(8, value) == value
        arena.trim()
    assert resident(arena) == 12 * PAGE
    arena.trim()
    assert resident(arena) == 0
    assert use(12, 5) == 0
