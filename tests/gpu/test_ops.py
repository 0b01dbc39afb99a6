"""The fused operations against plain PyTorch and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from encoder.ops import EPS, Ops, TorchOps
from encoder.preprocess import patchify
from tests.gpu.conftest import DEVICE, relative_error, worst_row_error

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Relative norm of the error: the result rounded once, with room for the hardware's exp and tanh in float32.
BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}


@pytest.fixture(scope="module")
def fused() -> Ops:
    from encoder.kernels import TritonOps

    return TritonOps()


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [144, 576, 1024, 1152, 4096, 4608])
@pytest.mark.parametrize("rows", [1, 7, 1024])
@pytest.mark.parametrize("add", [True, False])
def test_add_layer_norm(fused: Ops, add: bool, rows: int, cols: int, dtype: torch.dtype) -> None:
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
def test_layer_norm_of_a_bad_row_stays_in_it(fused: Ops, dtype: torch.dtype) -> None:
    x, weight, bias = randn(8, 1152, dtype=dtype), randn(1152, dtype=dtype, seed=1), randn(1152, dtype=dtype, seed=2)
    clean = fused.add_layer_norm(x.clone(), x, weight, bias)
    x[3], x[7] = float("nan"), float("inf")
    out = fused.add_layer_norm(x.clone(), x, weight, bias)
    kept = [0, 1, 2, 4, 5, 6]
    assert torch.equal(out[kept], clean[kept])
    assert out[3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 72), (16, 64), (2, 72), (1, 64), (12, 80)])
def test_rotary(fused: Ops, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    rows = 77
    qkv = randn(rows, 3, heads, head_dim, dtype=dtype)
    angles = randn(rows, head_dim // 2, seed=1) * 20
    cos, sin = angles.cos(), angles.sin()
    cos[-2:] = float("nan")
    wide = qkv.double()
    first, second = wide[:, :2].chunk(2, dim=-1)
    c, s = cos.double()[:, None, None], sin.double()[:, None, None]
    expected = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    values = qkv[:, 2].clone()
    fused.rotary_(qkv, cos, sin)
    assert torch.equal(qkv[:, 2], values)
    assert relative_error(qkv[:-2, :2], expected[:-2]) < BOUNDS[dtype]
    plain = wide.to(dtype)
    TorchOps().rotary_(plain, cos, sin)
    assert relative_error(qkv[:-2], plain[:-2]) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 60, 196, 1024])
@pytest.mark.parametrize(("inner", "outer"), [(1152, 4304), (1024, 4096), (144, 272)])
def test_linear_gelu(fused: Ops, inner: int, outer: int, rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, inner, dtype=dtype), randn(outer, inner, dtype=dtype, seed=1) * inner**-0.5
    bias = randn(outer, dtype=dtype, seed=2)
    expected = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    bound = {torch.bfloat16: 5e-3, torch.float16: 8e-4, torch.float32: 5e-4}[dtype]
    for ops in (fused, TorchOps()):
        assert relative_error(ops.linear_gelu(x, weight, bias), expected) < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 3, 32, 32), (1, 3, 64, 96), (1, 3, 224, 224), (2, 3, 32, 256), (5, 3, 96, 160), (16, 3, 64, 32)]
)
@pytest.mark.parametrize("constants", ["half", "clip"])
def test_patchify_bit_for_bit(fused: Ops, constants: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mean = torch.full((3,), 127.5) if constants == "half" else torch.tensor([0.48145466, 0.4578275, 0.40821073]) * 255
    std = mean if constants == "half" else torch.tensor([0.26862954, 0.26130258, 0.27577711]) * 255
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = patchify(frames, mean, std).to(dtype)
    # Rows of a larger buffer, as a replay writes them: its neighbours must stay.
    buffer = torch.full((len(expected) + 2, expected.shape[1]), 7.0, dtype=dtype, device=DEVICE)
    fused.patchify(frames.to(DEVICE), buffer[1:-1], mean.to(DEVICE), std.to(DEVICE))
    assert torch.equal(buffer[1:-1].cpu(), expected)
    assert (buffer[[0, -1]] == 7.0).all()
