"""Each attention against the textbook formula in float64, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from encoder.attention import Attention, FlashAttention4, FlashVarlen, choose_attention, missing_package
from encoder.graph import CudaGraph
from tests.gpu.conftest import DEVICE, bounds_of, relative_error, worst_row_error

HEADS = 16
HALF = (torch.bfloat16, torch.float16)
KINDS = [
    *((kind, dtype) for kind in ("served", "triton", "flash") for dtype in HALF),
    *((kind, torch.float32) for kind in ("served", "triton")),
]
# Relative norm of the error: that of the output's rounding, about twice over.
BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 1e-5}
LAYOUTS: dict[str, list[int]] = {
    "4": [4],
    "60": [60],
    "196": [196],
    "784": [784],
    "4096": [4096],
    "1": [1],
    "1s": [1, 1, 1, 2, 3],
    "4s": [4] * 40,
    "196s": [196] * 16,
    "784s": [784] * 8,
    "around the tiles": [63, 64, 65, 127, 128, 129, 15, 16, 17, 191, 192, 193, 111, 112, 113],
    "mixed": [4, 60, 1024, 196, 8, 784, 12, 256],
    "large between small": [4, 4, 2000, 4, 4],
}


def make_attention(kind: str, dtype: torch.dtype, head_dim: int) -> Attention:
    if kind == "flash":
        return FlashVarlen()
    if kind == "triton":
        from encoder.kernels import TritonVarlen

        return TritonVarlen()
    return choose_attention(DEVICE, dtype, head_dim)


def make_qkv(rows: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, 3, HEADS, head_dim, generator=generator, device=DEVICE).to(dtype)


def textbook(qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    outputs = []
    for part in qkv[: sum(lengths)].split(list(lengths)):
        q, k, v = part.double().permute(1, 2, 0, 3)
        outputs.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)
    return torch.cat([o.transpose(0, 1).flatten(1) for o in outputs])


def check(out: torch.Tensor, qkv: torch.Tensor, lengths: Sequence[int]) -> None:
    expected = textbook(qkv, lengths)
    assert out.dtype == qkv.dtype
    assert relative_error(out[: sum(lengths)], expected) < BOUNDS[qkv.dtype]
    assert worst_row_error(out[: sum(lengths)], expected) < 4 * BOUNDS[qkv.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_values(kind: str, dtype: torch.dtype, head_dim: int, layout: str) -> None:
    """Exactly full; and with empty slots and rows of NaN after the last segment, as a padded graph has them."""
    lengths = LAYOUTS[layout]
    used = sum(lengths)
    for empty, padding in ((0, 0), (3, 0), (100, 4), (1, 300)):
        attention = make_attention(kind, dtype, head_dim)
        qkv = make_qkv(used + padding, head_dim, dtype)
        qkv[used:] = float("nan")
        bounds = bounds_of(lengths, empty)
        check(attention(qkv, attention.plan(bounds, len(qkv), len(qkv))), qkv, lengths)


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_segment_does_not_reach_its_neighbours(kind: str, dtype: torch.dtype, head_dim: int, rubbish: float) -> None:
    attention = make_attention(kind, dtype, head_dim)
    for lengths in ([4, 8, 4], [60, 196, 60], [196, 4, 784], [1000, 130, 1]):
        bounds, (first, second, _) = bounds_of(lengths, 5), lengths
        qkv = make_qkv(sum(lengths) + 16, head_dim, dtype)
        clean = attention(qkv, attention.plan(bounds, len(qkv), len(qkv))).clone()
        qkv[first : first + second] = rubbish
        qkv[sum(lengths) :] = rubbish
        out = attention(qkv, attention.plan(bounds, len(qkv), len(qkv)))
        kept = [*range(first), *range(first + second, sum(lengths))]
        assert torch.equal(out[kept], clean[kept])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scale", [1e-3, 8.0])
def test_small_and_large_scores(dtype: torch.dtype, scale: float) -> None:
    """Nearly equal weights, and softmax that all but picks one key."""
    lengths = [196, 60, 784]
    attention = choose_attention(DEVICE, dtype, 72)
    qkv = make_qkv(sum(lengths), 72, dtype)
    qkv[:, :2] *= scale
    expected = textbook(qkv, lengths)
    out = attention(qkv, attention.plan(bounds_of(lengths), len(qkv), len(qkv)))
    assert relative_error(out, expected) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_one_captured_graph_serves_every_layout(kind: str, dtype: torch.dtype, head_dim: int) -> None:
    rows, slots = 1024, 32
    attention = make_attention(kind, dtype, head_dim)
    qkv, bounds = make_qkv(rows, head_dim, dtype), bounds_of([rows], slots - 1)
    results: list[torch.Tensor] = []

    def run() -> None:
        results.append(attention(qkv, attention.plan(bounds, rows, rows)))

    graph = CudaGraph(run, torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    layouts: list[list[int]] = [[4], [rows], [60] * 16, [32] * 32, [196, 4, 784], [1000], [4], [1] * 32, [512, 512]]
    for seed, lengths in enumerate(layouts):
        qkv.copy_(make_qkv(rows, head_dim, dtype, seed))
        qkv[sum(lengths) :] = float("nan")
        bounds.copy_(bounds_of(lengths, slots - len(lengths)))
        results[-1].fill_(float("nan"))
        graph.replay()
        check(results[-1], qkv, lengths)


@pytest.mark.skipif(
    missing_package("flash_attn", "flash_attn.cute") is not None, reason="needs the optional package flash-attn-4"
)
def test_flash_attention_4() -> None:
    """Eagerly, and one captured graph for every layout, with rows of NaN after the last segment."""
    attention, rows, slots = FlashAttention4(72, torch.bfloat16, DEVICE), 4608, 48
    qkv, bounds = make_qkv(rows, 72, torch.bfloat16), bounds_of([rows], slots - 1)
    results: list[torch.Tensor] = []

    def run() -> None:
        results.append(attention(qkv, attention.plan(bounds, rows, rows)))

    graph = CudaGraph(run, torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    for seed, lengths in enumerate(layout for layout in LAYOUTS.values() if sum(layout) <= rows):
        qkv.copy_(make_qkv(rows, 72, torch.bfloat16, seed))
        qkv[sum(lengths) :] = float("nan")
        check(attention(qkv, attention.plan(bounds_of(lengths), rows, rows)), qkv, lengths)
        qkv[sum(lengths) :] = float("nan")
        bounds.copy_(bounds_of(lengths, slots - len(lengths)))
        results[-1].fill_(float("nan"))
        graph.replay()
        check(results[-1], qkv, lengths)
