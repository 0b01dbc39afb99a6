"""The fused operations against plain PyTorch and float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from encoder.attention import choose_attention, runs_hopper_kernels
from encoder.linear import TILINGS, Epilogue, LinearTiling
from encoder.ops import EPS, TorchOps, choose_ops
from encoder.preprocess import patchify
from tests.gpu.conftest import DEVICE, relative_error, worst_row_error

HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32]
SENTINEL = 7.0
# Relative norm of the error: the result rounded once, with room for the hardware's exp and tanh in float32.
BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}
# The most that rounding one element once can do, for rows of few elements.
UNIT_ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
# cuBLAS's fused GELU takes an approximate tanh in every dtype.
TANH_BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 8e-4, torch.float32: 5e-4}


@pytest.fixture(scope="module")
def fused() -> TorchOps:
    from encoder.kernels import TritonOps

    return TritonOps()


@functools.cache
def served(dtype: torch.dtype, head_dim: int = 72) -> TorchOps:
    return choose_ops(DEVICE, dtype, head_dim)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [144, 576, 1024, 1152, 4096, 4608])
@pytest.mark.parametrize("rows", [1, 7, 1024])
@pytest.mark.parametrize("add", [True, False])
def test_add_layer_norm(fused: TorchOps, add: bool, rows: int, cols: int, dtype: torch.dtype) -> None:
    x = randn(rows, cols, dtype=dtype) * 3 + 2
    y = randn(rows, cols, dtype=dtype, seed=1) if add else None
    weight, bias = randn(cols, dtype=dtype, seed=2), randn(cols, dtype=dtype, seed=3)
    added = x.clone() if y is None else x + y
    expected = F.layer_norm(added.double(), (cols,), weight.double(), bias.double(), EPS)
    out = fused.add_layer_norm(x, y, weight, bias)
    assert torch.equal(x, added)
    assert out.dtype == dtype
    assert worst_row_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_a_bad_row_stays_in_it(fused: TorchOps, dtype: torch.dtype) -> None:
    x, weight, bias = randn(8, 1152, dtype=dtype), randn(1152, dtype=dtype, seed=1), randn(1152, dtype=dtype, seed=2)
    clean = fused.add_layer_norm(x.clone(), x, weight, bias)
    x[3], x[7] = float("nan"), float("inf")
    out = fused.add_layer_norm(x.clone(), x, weight, bias)
    kept = [0, 1, 2, 4, 5, 6]
    assert torch.equal(out[kept], clean[kept])
    assert out[3].isnan().all()


def rotated(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """qkv [rows, 3, heads, head_dim] with q and k rotated, in float64."""
    qk, c, s = qkv[:, :2].double(), cos.double()[:, None, None], sin.double()[:, None, None]
    first, second = qk.chunk(2, dim=-1)
    return torch.cat((torch.cat((first * c - second * s, second * c + first * s), dim=-1), qkv[:, 2:].double()), dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 72), (16, 64), (2, 72), (1, 64), (12, 80)])
def test_rotary(fused: TorchOps, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    rows = 77
    qkv = randn(rows, 3, heads, head_dim, dtype=dtype)
    angles = randn(rows, head_dim // 2, seed=1) * 20
    cos, sin = angles.cos(), angles.sin()
    cos[-2:] = float("nan")
    plain, values = qkv.clone(), qkv[:, 2].clone()
    expected = rotated(qkv, cos, sin)[:, :2]
    fused.rotary_(qkv, cos, sin)
    assert torch.equal(qkv[:, 2], values)
    assert relative_error(qkv[:-2, :2], expected[:-2]) < BOUNDS[dtype]
    TorchOps().rotary_(plain, cos, sin)
    assert relative_error(qkv[:-2], plain[:-2]) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 6])
@pytest.mark.parametrize("rows", [1, 77])
def test_add_layer_norm_of_parts(fused: TorchOps, rows: int, parts: int, dtype: torch.dtype) -> None:
    x, y = randn(rows, 1152, dtype=dtype), randn(parts, rows, 1152, seed=1)
    weight, bias = randn(1152, dtype=dtype, seed=2), randn(1152, dtype=dtype, seed=3)
    added = x + y.double().sum(0).to(dtype)
    expected = F.layer_norm(added.double(), (1152,), weight.double(), bias.double(), EPS)
    out = fused.add_layer_norm(x, y, weight, bias)
    # The order of a sum in float32 may decide how it rounds.
    assert relative_error(x, added) < 1e-4
    assert worst_row_error(out, expected) < BOUNDS[dtype]


def needs_hopper(dtype: torch.dtype) -> None:
    if not runs_hopper_kernels(DEVICE, dtype, 72):
        pytest.skip("needs a Hopper GPU")


def hopper_ops(dtype: torch.dtype, head_dim: int = 72) -> Any:
    needs_hopper(dtype)
    from encoder.linear_sm90 import HopperOps

    ops = served(dtype, head_dim)
    assert isinstance(ops, HopperOps)
    return ops


def all_ops(dtype: torch.dtype, fused: TorchOps) -> list[TorchOps]:
    """What may run a dtype on this device."""
    return [TorchOps(), fused] + [o for o in [served(dtype)] if type(o) is not type(fused)]


@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("dtype", HALF)
def test_a_hopper_gpu_gets_the_kernels_written_for_it(dtype: torch.dtype, head_dim: int) -> None:
    needs_hopper(dtype)
    assert choose_attention(DEVICE, dtype, head_dim).name == "hopper-varlen"
    assert served(dtype, head_dim).linears == "hopper-linear"


def live_rows(rows: int) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "live"), [(1, 1), (60, 60), (256, 196), (832, 784), (1024, 1024), (5000, 4100)])
@pytest.mark.parametrize(
    ("inner", "outer"), [(1152, 3456), (1152, 4304), (4304, 1152), (4608, 4608), (1024, 4096), (144, 272)]
)
def test_linear_layers(fused: TorchOps, inner: int, outer: int, rows: int, live: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, inner, dtype=dtype), randn(outer, inner, dtype=dtype, seed=1) * inner**-0.5
    bias, used = randn(outer, dtype=dtype, seed=2), live_rows(live)
    # What is past the live rows must not reach them.
    x[live:] = float("nan")
    product = F.linear(x[:live].double(), weight.double(), bias.double())
    bound = (BOUNDS | {torch.float32: 1e-5})[dtype]
    bounds_of_gelu = {"none": bound, "tanh": TANH_BOUNDS[dtype]}
    for ops in all_ops(dtype, fused):
        laid = ops.lay_out(weight)
        assert torch.equal(laid, weight)
        out = ops.linear(x, laid, bias, used)
        assert worst_row_error(out[:live], product) < bound
        wide = torch.full((rows, 3 * outer), SENTINEL, dtype=dtype, device=DEVICE)
        into = ops.linear(x, laid, bias, used, out=wide[:, outer : 2 * outer])
        assert into.data_ptr() == wide[:, outer:].data_ptr()
        assert worst_row_error(wide[:live, outer : 2 * outer], product) < bound
        assert (wide[:, :outer] == SENTINEL).all()
        assert (wide[:, 2 * outer :] == SENTINEL).all()
        if ops.linears == "hopper-linear":
            assert (wide[live:] == SENTINEL).all()
        for approximate, bound_of_gelu in bounds_of_gelu.items():
            out = ops.linear_gelu(x, laid, bias, used, approximate=approximate)
            assert relative_error(out[:live], F.gelu(product, approximate=approximate)) < bound_of_gelu


@pytest.mark.parametrize(("inner", "outer", "offset"), [(1150, 64, 0), (1152, 50, 0), (1152, 64, 4)])
def test_what_the_hopper_kernel_cannot_load_or_store(inner: int, outer: int, offset: int) -> None:
    dtype = torch.bfloat16
    x, weight = randn(100, inner, dtype=dtype), randn(outer, inner, dtype=dtype, seed=1) * inner**-0.5
    bias, used = randn(outer, dtype=dtype, seed=2), live_rows(100)
    expected = F.linear(x.double(), weight.double(), bias.double())
    ops = served(dtype)
    # As it is, not laid out.
    wide = torch.zeros(100, offset + outer, dtype=dtype, device=DEVICE)
    assert relative_error(ops.linear(x, weight, bias, used, out=wide[:, offset:]), expected) < 3e-3
    assert (
        relative_error(ops.linear_gelu(x, weight, bias, used), F.gelu(expected, approximate="tanh"))
        < TANH_BOUNDS[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "live"), [(1, 1), (64, 64), (256, 196), (832, 784), (5000, 4100)])
@pytest.mark.parametrize("inner", [1152, 4304])
def test_linear_parts_that_a_norm_adds(fused: TorchOps, inner: int, rows: int, live: int, dtype: torch.dtype) -> None:
    cols = 1152
    y, weight = randn(rows, inner, dtype=dtype), randn(cols, inner, dtype=dtype, seed=1) * inner**-0.5
    bias, norm_weight, norm_bias = (randn(cols, dtype=dtype, seed=s) for s in (2, 3, 4))
    added = randn(rows, cols, dtype=dtype, seed=5)
    y[live:] = float("nan")
    expected = added[:live].double() + F.linear(y[:live].double(), weight.double(), bias.double())
    normed = F.layer_norm(expected, (cols,), norm_weight.double(), norm_bias.double(), EPS)
    bound = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}[dtype]
    for ops in all_ops(dtype, fused):
        x = added.clone()
        parts = ops.linear_parts(y, ops.lay_out(weight), bias, live_rows(live))
        out = ops.add_layer_norm(x, parts, norm_weight, norm_bias)
        assert worst_row_error(x[:live], expected) < bound
        assert worst_row_error(out[:live], normed) < bound


def check_launches(
    ops: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, live: int, expected: torch.Tensor, **kind: Any
) -> None:
    """Launches again and again, as what one leaves behind must not disturb the next: each writes all of the live rows,
    with the values `expected`, and no other."""
    partial = kind["epilogue"] == Epilogue.PARTIAL
    bound = 1e-5 if partial else BOUNDS[x.dtype] if len(weight) > 8 else 1.02 * UNIT_ROUNDOFF[x.dtype]
    shape, dtype = (kind["tiling"].splits, len(x), len(weight)), torch.float32 if partial else x.dtype
    out = torch.empty(shape if partial else shape[1:], dtype=dtype, device=DEVICE)
    for _ in range(3):
        out.fill_(SENTINEL)
        assert ops.run(x, weight, bias, live_rows(live), out=out, **kind) is out
        assert (out[..., live:, :] == SENTINEL).all()
        result = out.double().sum(0) if partial else out
        assert live == 0 or worst_row_error(result[:live], expected) < bound


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_of_the_hopper_linear_layers(tiling: LinearTiling, splits: int, dtype: torch.dtype) -> None:
    ops, tiling = hopper_ops(dtype), replace(tiling, splits=splits)
    if splits > 1 and not tiling.may_split:
        pytest.skip("such tiles are not cut")
    for inner, outer in ((1152, 4304), (4304, 1160), *(((72, 8),) if splits == 1 else ())):
        weight, bias = randn(outer, inner, dtype=dtype, seed=1) * inner**-0.5, randn(outer, dtype=dtype, seed=2)
        # One tile, and so many that every block takes several.
        for rows, live in ((300, 0), (1, 1), (777, 700), (9000, 8999)):
            x = randn(rows, inner, dtype=dtype)
            x[live:] = float("nan")
            product = F.linear(x[:live].double(), weight.double(), bias.double())
            values = {
                Epilogue.NONE: product,
                Epilogue.GELU_TANH: F.gelu(product, approximate="tanh"),
                Epilogue.GELU_ERF: F.gelu(product),
            }
            for epilogue, expected in values.items() if splits == 1 else [(Epilogue.PARTIAL, product)]:
                check_launches(ops, x, weight, bias, live, expected, epilogue=epilogue, tiling=tiling)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "live"), [(1, 1), (60, 60), (256, 196), (832, 784), (5000, 4100)])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 72), (16, 64), (12, 80), (2, 72), (1, 64)])
def test_linear_rotary(fused: TorchOps, heads: int, head_dim: int, rows: int, live: int, dtype: torch.dtype) -> None:
    hidden = heads * head_dim
    x, weight = randn(rows, hidden, dtype=dtype), randn(3 * hidden, hidden, dtype=dtype, seed=1) * hidden**-0.5
    bias, angles = randn(3 * hidden, dtype=dtype, seed=2), randn(rows, head_dim // 2, seed=3) * 20
    x[live:], angles[live:] = float("nan"), float("nan")
    cos, sin = angles.cos(), angles.sin()
    qkv = F.linear(x[:live].double(), weight.double(), bias.double()).view(live, 3, heads, head_dim)
    expected = rotated(qkv, cos[:live], sin[:live])
    bound = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}[dtype]
    for ops in (TorchOps(), fused, served(dtype, head_dim)):
        out = ops.linear_rotary(x, ops.lay_out(weight), bias, cos, sin, live_rows(live))
        assert out.shape == (rows, 3, heads, head_dim)
        for part in range(3):
            assert worst_row_error(out[:live, part].flatten(1), expected[:, part].flatten(1)) < bound


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_of_the_hopper_rotary_layer(tiling: LinearTiling, head_dim: int, dtype: torch.dtype) -> None:
    ops = hopper_ops(dtype, head_dim)
    if not tiling.goes_with(Epilogue.ROTARY, head_dim):
        pytest.skip("a tile holds no whole number of heads")
    # The last tile of columns may be partial, and may hold keys and values both.
    for heads, rows, live in ((16, 300, 300), (5, 777, 700), (16, 9000, 8999), (1, 1, 1), (2, 300, 0)):
        outer = 3 * heads * head_dim
        x, weight = randn(rows, 1152, dtype=dtype), randn(outer, 1152, dtype=dtype, seed=1) / 34
        bias, angles = randn(outer, dtype=dtype, seed=2), randn(rows, head_dim // 2, seed=3) * 20
        x[live:], angles[live:] = float("nan"), float("nan")
        cos, sin = angles.cos(), angles.sin()
        qkv = F.linear(x[:live].double(), weight.double(), bias.double()).view(live, 3, heads, head_dim)
        expected = rotated(qkv, cos[:live], sin[:live]).flatten(1)
        check_launches(ops, x, weight, bias, live, expected, epilogue=Epilogue.ROTARY, tiling=tiling, rotary=(cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 3, 32, 32), (1, 3, 64, 96), (1, 3, 224, 224), (2, 3, 32, 256), (5, 3, 96, 160), (16, 3, 64, 32)]
)
@pytest.mark.parametrize("constants", ["half", "clip"])
def test_patchify_bit_for_bit(fused: TorchOps, constants: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mean = torch.full((3,), 127.5) if constants == "half" else torch.tensor([0.48145466, 0.4578275, 0.40821073]) * 255
    std = mean if constants == "half" else torch.tensor([0.26862954, 0.26130258, 0.27577711]) * 255
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = patchify(frames, mean, std).to(dtype)
    # Rows of a larger buffer, as a replay writes them: its neighbours must stay.
    buffer = torch.full((len(expected) + 2, expected.shape[1]), SENTINEL, dtype=dtype, device=DEVICE)
    fused.patchify(frames.to(DEVICE), buffer[1:-1], mean.to(DEVICE), std.to(DEVICE))
    assert torch.equal(buffer[1:-1].cpu(), expected)
    assert (buffer[[0, -1]] == SENTINEL).all()
