"""How linear layers are cut into tiles, and which implementation runs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder import attention, ops
from encoder.linear import (
    MAX_SPLITS,
    STEP,
    TILINGS,
    Epilogue,
    LinearTiling,
    aligned_pitch,
    choose_linear_tiling,
    choose_rotary_tiling,
    loadable,
    tiling_cost,
)
from encoder.ops import TorchOps, choose_ops
from tests.unit.encoder.stubs import UNIMPORTABLE, Broken, Hopper, Portable, replace_module

ROWS = st.integers(1, 100_000)
SIZES = st.integers(1, 700).map(lambda n: 8 * n)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_fits_a_multiprocessor(tiling: LinearTiling) -> None:
    # What a block may have: 227 KiB of shared memory, of which 2 KiB go to alignment and barriers; boxes of 256 rows.
    assert tiling.shared_bytes <= 225 * 1024
    # With room for two on a multiprocessor, others would stay idle.
    assert tiling.shared_bytes > 114 * 1024
    assert tiling.block_m <= 256
    assert tiling.block_n <= 256
    # A matrix of 16 columns leaves a warp at once, and a block of a cluster loads whole groups of 8 rows of weights.
    assert tiling.block_n % 16 == 0
    assert tiling.block_n // tiling.cluster % 8 == 0
    # Accumulators of a thread, of the 232 registers that a consumer gets.
    assert tiling.m64 * tiling.block_n // 2 <= 160
    assert tiling.consumers == 2 or not tiling.pingpong


def test_every_tiling_is_the_best_of_something() -> None:
    layers = [(3456, 1152, False), (1152, 1152, True), (4304, 1152, False), (1152, 4304, True), (4608, 4608, False)]
    layers += [(3072, 1024, False), (1024, 4096, True)]
    rows = [*range(64, 1024, 64), *range(1024, 32_768, 256)]
    chosen = {replace(choose_linear_tiling(r, *layer), splits=1) for r in rows for layer in layers}
    chosen |= {choose_rotary_tiling(r, 3456, 1152, 72) for r in rows}
    assert chosen >= set(TILINGS)


def test_what_a_tiling_goes_with() -> None:
    wide, turns = LinearTiling(2, 144, 2, 4), LinearTiling(2, 144, 2, 6, pingpong=True)
    assert [e.name for e in Epilogue if not wide.goes_with(e, 72)] == []
    assert [e.name for e in Epilogue if not turns.goes_with(e, 72)] == ["PARTIAL"]
    assert (wide.may_split, turns.may_split) == (True, False)
    assert [e.name for e in Epilogue if not wide.goes_with(e, 64)] == ["ROTARY"]


def test_the_grid_is_whole_clusters() -> None:
    tiling = LinearTiling(1, 144, 1, 6, cluster=2)
    # 5 row tiles are 3 clusters; 4304 columns are 30 tiles.
    assert tiling.grid(300, 4304, 1000) == 180
    assert tiling.grid(300, 4304, 133) == 132
    assert replace(tiling, splits=3).grid(1, 8, 1000) == 6


def test_rows_start_where_the_kernel_can_load_them() -> None:
    assert loadable(1 << 20, 1152)
    assert not loadable((1 << 20) + 8, 1152)
    assert not loadable(1 << 20, 1156)
    assert [aligned_pitch(n) for n in (1, 64, 1152, 4304)] == [64, 64, 1152, 4352]


@pytest.mark.parametrize(
    ("rows", "cols", "inner", "split", "expected"),
    [
        (256, 1152, 1152, True, LinearTiling(1, 96, 1, 10, splits=2)),
        (256, 4304, 1152, False, LinearTiling(1, 144, 1, 8, cluster=2)),
        (256, 1152, 4304, True, LinearTiling(1, 144, 1, 8, cluster=2, splits=4)),
        (512, 1152, 1152, True, LinearTiling(1, 96, 1, 10)),
        (832, 3456, 1152, False, LinearTiling(1, 192, 2, 5)),
        (832, 4304, 1152, False, LinearTiling(1, 240, 2, 4)),
        (3136, 4304, 1152, False, LinearTiling(1, 208, 2, 4)),
        (3136, 1152, 4304, True, LinearTiling(1, 240, 2, 4)),
        (4096, 1152, 1152, True, LinearTiling(2, 144, 2, 4)),
        (4096, 1152, 4304, True, LinearTiling(2, 144, 2, 4)),
        (6272, 1152, 1152, True, LinearTiling(2, 144, 2, 6, pingpong=True)),
    ],
)
def test_choices_for_the_shapes_of_the_full_tower(
    rows: int, cols: int, inner: int, split: bool, expected: LinearTiling
) -> None:
    assert choose_linear_tiling(rows, cols, inner, split) == expected


@given(ROWS, SIZES, SIZES, st.booleans())
def test_the_choice_is_the_cheapest_and_only_cut_where_that_may_be(
    rows: int, cols: int, inner: int, may_split: bool
) -> None:
    chosen = choose_linear_tiling(rows, cols, inner, may_split)
    steps = -(-inner // STEP)
    splits = range(1, max(1, min(MAX_SPLITS, steps // 4)) + 1) if may_split else [1]
    others = [replace(t, splits=s) for t in TILINGS for s in splits if s == 1 or not t.pingpong]
    assert tiling_cost(chosen, rows, cols, inner) == min(tiling_cost(t, rows, cols, inner) for t in others)
    assert 1 <= chosen.splits <= (MAX_SPLITS if may_split else 1)
    assert chosen.splits == 1 or steps // chosen.splits >= 4
    assert chosen.splits == 1 or not chosen.pingpong


@given(st.sampled_from(TILINGS), ROWS, ROWS, SIZES, SIZES, st.booleans())
def test_more_rows_never_cost_less(tiling: LinearTiling, a: int, b: int, cols: int, inner: int, rotary: bool) -> None:
    fewer, more = sorted((a, b))
    assert 0 < tiling_cost(tiling, fewer, cols, inner, rotary) <= tiling_cost(tiling, more, cols, inner, rotary)


@given(ROWS, st.integers(1, 32), st.sampled_from([64, 72, 80, 96, 100, 128]))
def test_a_rotary_tile_is_whole_heads(rows: int, heads: int, head_dim: int) -> None:
    hidden = heads * head_dim
    tiling = choose_rotary_tiling(rows, 3 * hidden, hidden, head_dim)
    if not any(t.block_n % head_dim == 0 for t in TILINGS):
        assert tiling is None
    if tiling is not None:
        assert tiling.block_n % head_dim == 0
        assert tiling.splits == 1


def test_rotation_is_apart_where_whole_heads_cut_badly() -> None:
    assert choose_rotary_tiling(832, 3456, 1152, 72) is None
    assert choose_rotary_tiling(3328, 3456, 1152, 72) == LinearTiling(2, 144, 2, 6, pingpong=True)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "hopper", "bindings", "triton", "chosen"),
    [
        ((9, 0), torch.bfloat16, 72, Hopper, True, True, Hopper),
        ((9, 0), torch.float16, 64, Hopper, True, True, Hopper),
        ((9, 0), torch.float32, 72, Hopper, True, True, Portable),
        ((9, 0), torch.bfloat16, 96, Hopper, True, True, Portable),
        ((9, 0), torch.bfloat16, 72, Hopper, False, True, Portable),
        ((9, 0), torch.bfloat16, 72, Broken, True, True, Portable),
        ((9, 0), torch.bfloat16, 72, UNIMPORTABLE, True, True, Portable),
        ((8, 0), torch.bfloat16, 72, Hopper, True, True, Portable),
        ((10, 0), torch.bfloat16, 72, Hopper, True, True, Portable),
        ((9, 0), torch.bfloat16, 72, Hopper, True, False, TorchOps),
    ],
)
def test_the_operations_of_a_gpu(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    hopper: type | None,
    bindings: bool,
    triton: bool,
    chosen: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (attention, ops):
        monkeypatch.setattr(module, "has_triton", lambda device: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(attention, "missing_package", lambda *names: None if bindings else names[0])
    replace_module(monkeypatch, "encoder.linear_sm90", HopperOps=hopper)
    replace_module(monkeypatch, "encoder.kernels", TritonOps=Portable)
    assert type(choose_ops(torch.device("cuda"), dtype, head_dim)) is chosen


def test_the_operations_of_a_cpu() -> None:
    assert type(choose_ops(torch.device("cpu"), torch.bfloat16, 72)) is TorchOps
