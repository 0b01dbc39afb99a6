"""Segment attention against the textbook formula, segment by segment in double precision."""

from __future__ import annotations

import pytest
import torch

from encoder.attention import SegmentSdpa, choose_attention
from tests.unit.encoder.conftest import CPU


def textbook(qkv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    outputs = []
    for q, k, v in (part.double().unbind(1) for part in qkv[: sum(lengths)].split(lengths)):
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    return torch.cat(outputs)


def attend(qkv: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    attention = SegmentSdpa()
    return attention(qkv, attention.plan(torch.tensor(bounds, dtype=torch.int32), 0, len(qkv)))


def bounds_of(lengths: list[int], padding: int) -> list[int]:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return bounds + bounds[-1:] * padding


@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("lengths", [[16], [4, 4, 4], [4, 8, 8, 4], [1], [3, 5, 5, 5, 64, 1]])
@pytest.mark.parametrize("padding", [0, 3])
def test_values(lengths: list[int], padding: int, head_dim: int) -> None:
    qkv = torch.randn(sum(lengths) + padding, 3, 2, head_dim, generator=torch.Generator().manual_seed(1))
    out = attend(qkv, bounds_of(lengths, padding))
    assert out.shape == (sum(lengths) + padding, 2 * head_dim)
    torch.testing.assert_close(out[: sum(lengths)].double(), textbook(qkv, lengths), rtol=1e-5, atol=1e-6)


def test_rows_past_the_last_bound_are_not_read() -> None:
    lengths = [4, 8]
    qkv = torch.randn(20, 3, 2, 72)
    clean = attend(qkv, bounds_of(lengths, 5))[:12]
    qkv[12:] = float("nan")
    assert torch.equal(attend(qkv, bounds_of(lengths, 5))[:12], clean)


def test_a_segment_does_not_reach_its_neighbour() -> None:
    qkv = torch.randn(12, 3, 2, 64)
    clean = attend(qkv, [0, 4, 12])
    qkv[4:] = float("nan")
    poisoned = attend(qkv, [0, 4, 12])
    assert torch.equal(poisoned[:4], clean[:4])
    assert poisoned[4:].isnan().all()


@pytest.mark.parametrize(
    ("bounds", "runs"),
    [
        ([0, 4, 8, 12], [(0, 3, 4)]),
        ([0, 4, 12, 20, 24, 24, 24], [(0, 1, 4), (4, 2, 8), (20, 1, 4)]),
        ([0, 0, 0], []),
    ],
)
def test_equal_neighbours_run_together(bounds: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert SegmentSdpa().plan(torch.tensor(bounds), 0, 24) == runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_gets_sdpa(dtype: torch.dtype) -> None:
    attention = choose_attention(CPU, dtype, 72)
    assert (attention.name, attention.capturable) == ("sdpa", False)
