"""How `benchmarks.isolation` shares out the cores."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.isolation import Cores


@given(st.sets(st.integers(0, 255), min_size=4, max_size=64).map(sorted))
def test_each_part_has_cores_of_its_own(cores: list[int]) -> None:
    shared = Cores.share(cores)
    parts = [shared.pictures, shared.way_in, shared.decoders, shared.flood]
    assert sorted(core for part in parts for core in part) == cores
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_two_cores_keep_the_pools_apart() -> None:
    assert Cores.share([3, 5]) == Cores(frozenset({3}), frozenset({3}), frozenset({3, 5}), frozenset({5}))


def test_processes_get_the_cores_of_their_part() -> None:
    shared = Cores.share([0, 1, 2, 3])
    names = ("image replica", "ingress", "proxy", "python proxy", "decoders", "eager replica", "controller")
    assert [min(shared.of(name)) for name in names] == [0, 1, 1, 1, 2, 3, 3]
