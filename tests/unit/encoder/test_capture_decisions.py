"""What a capture decides without a GPU: default budgets, which to time, costs in between, how attention is cut."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder import attention
from encoder.attention import Tiling, choose_attention, choose_tiling
from encoder.budgets import default_token_budgets, interpolate_costs, timed_budgets, timed_eager_sizes


def test_default_budgets_on_a_cpu_are_powers_of_two() -> None:
    assert default_token_budgets("cpu") == [64, 128, 256, 512, 1024]
    assert default_token_budgets("cpu", 32, 100) == [32, 64, 100]


def test_default_budgets_on_cuda_pad_by_an_eighth_at_most() -> None:
    budgets = default_token_budgets("cuda")
    assert (len(budgets), budgets[0], budgets[-1]) == (61, 64, 16384)
    assert [b for b in budgets if 512 <= b <= 1024] == [512, 576, 640, 704, 768, 832, 896, 960, 1024]
    assert all(high - low <= max(low / 8, 16) for low, high in itertools.pairwise(budgets))
    assert default_token_budgets("cuda", 256, 300) == [256, 288, 300]


def test_small_budgets_are_all_timed_and_large_ones_every_fourth() -> None:
    budgets = default_token_budgets("cuda")
    small = [b for b in budgets if b <= 1024]
    assert timed_budgets(budgets) == [*small, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]
    assert timed_budgets([5000]) == [5000]


def test_three_eager_sizes_are_timed() -> None:
    assert [timed_eager_sizes(n) for n in (16_384, 1024, 256, 10)] == [[64, 1024, 16_384], [64, 1024], [64, 256], [10]]


def test_costs_between_timed_budgets_are_linear_and_never_fall() -> None:
    assert interpolate_costs([64, 128, 2048], [2.0, 1.0, 17.0], [32, 64, 128, 1088, 2048]) == {
        32: 1.0,
        64: 2.0,
        128: 2.0,
        1088: 9.0,
        2048: 17.0,
    }


@given(st.sets(st.integers(1, 20_000), min_size=1, max_size=40), st.data())
def test_every_budget_gets_a_cost(budgets: set[int], data: st.DataObject) -> None:
    points = timed_budgets(sorted(budgets))
    measured = data.draw(st.lists(st.floats(0.001, 1), min_size=len(points), max_size=len(points)))
    table = interpolate_costs(points, measured, sorted(budgets))
    assert list(table) == sorted(budgets)
    costs = list(table.values())
    assert costs == sorted(costs)
    assert all(table[point] >= cost for point, cost in zip(points, measured, strict=True))


@pytest.mark.parametrize(
    ("rows", "num_seqs", "tiling"),
    [
        (256, 16, Tiling(64, 1)),
        (1024, 16, Tiling(112, 2)),
        (4096, 16, Tiling(128, 3)),
        (4096, 1, Tiling(128, 3)),
        (3328, 16, None),
        (6656, 128, Tiling(112, 3)),
    ],
)
def test_attention_is_cut_by_rows_and_slots(rows: int, num_seqs: int, tiling: Tiling | None) -> None:
    assert choose_tiling(rows, num_seqs) == tiling


class _Named:
    def __init__(self, *_: Any) -> None:
        pass


class Hopper(_Named):
    pass


class Broken(_Named):
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no such instruction")


class Portable(_Named):
    pass


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "hopper", "chosen"),
    [
        ((9, 0), torch.bfloat16, 72, Hopper, Hopper),
        ((9, 0), torch.float16, 64, Hopper, Hopper),
        ((9, 0), torch.float32, 72, Hopper, Portable),
        ((9, 0), torch.bfloat16, 96, Hopper, Portable),
        ((8, 0), torch.bfloat16, 72, Hopper, Portable),
        ((10, 0), torch.bfloat16, 72, Hopper, Portable),
        ((9, 0), torch.bfloat16, 72, Broken, Portable),
    ],
)
def test_the_attention_of_a_gpu(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    hopper: type,
    chosen: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "has_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "encoder.attention_sm90", SimpleNamespace(HopperVarlen=hopper))
    monkeypatch.setitem(sys.modules, "encoder.kernels", SimpleNamespace(TritonVarlen=Portable))
    assert isinstance(choose_attention(torch.device("cuda"), dtype, head_dim), chosen)
