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
from encoder.attention import (
    TILINGS,
    FlashAttention4,
    FlashVarlen,
    SegmentSdpa,
    Tiling,
    choose_attention,
    choose_tiling,
    missing_package,
)
from encoder.budgets import default_token_budgets, interpolate_costs, timed_budgets, timed_eager_sizes
from tests.unit.encoder.stubs import UNIMPORTABLE, Broken, Hopper, Portable, Stub, replace_module


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
        (64, 16, Tiling(64, 1)),
        (256, 16, Tiling(256, 1, 1)),
        (512, 16, Tiling(64, 2)),
        (1024, 16, Tiling(112, 2)),
        (4096, 16, Tiling(128, 3)),
        (4096, 1, Tiling(128, 3)),
        (3328, 16, None),
        (6656, 128, Tiling(112, 3)),
    ],
)
def test_attention_is_cut_by_rows_and_slots(rows: int, num_seqs: int, tiling: Tiling | None) -> None:
    assert choose_tiling(rows, num_seqs) == tiling


def test_the_tilings_of_attention_are_those_that_are_chosen() -> None:
    # The kernels of these are compiled when a tower is loaded, and no others.
    chosen = {choose_tiling(rows, seqs) for rows in range(4, 66_000, 36) for seqs in (1, 8, 16, 33, 128)}
    assert chosen - {None} == set(TILINGS)


CUDA = frozenset({"cuda", "cuda.bindings"})
FLASH = frozenset({"flash_attn", "flash_attn.cute"})


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "hopper", "packages", "chosen"),
    [
        ((9, 0), torch.bfloat16, 72, Hopper, CUDA, Hopper),
        ((9, 0), torch.float16, 64, Hopper, CUDA, Hopper),
        ((9, 0), torch.float32, 72, Hopper, CUDA, Portable),
        ((9, 0), torch.bfloat16, 96, Hopper, CUDA, Portable),
        ((8, 0), torch.bfloat16, 72, Hopper, CUDA, Portable),
        ((10, 0), torch.bfloat16, 72, Hopper, CUDA, Portable),
        ((9, 0), torch.bfloat16, 72, Broken, CUDA, Portable),
        ((9, 0), torch.bfloat16, 72, UNIMPORTABLE, CUDA, Portable),
        ((9, 0), torch.bfloat16, 72, Hopper, {"cuda"}, Portable),
        # flash-attn-4 serves where the kernel for Hopper does not run.
        ((9, 0), torch.bfloat16, 72, Hopper, CUDA | FLASH, Hopper),
        ((9, 0), torch.bfloat16, 72, Broken, CUDA | FLASH, FlashAttention4),
        ((9, 0), torch.bfloat16, 96, Hopper, CUDA | FLASH, FlashAttention4),
        ((10, 0), torch.bfloat16, 72, Hopper, CUDA | FLASH, FlashAttention4),
        ((12, 0), torch.float16, 64, Hopper, FLASH, FlashAttention4),
        ((10, 0), torch.float32, 72, Hopper, FLASH, Portable),
        ((10, 0), torch.bfloat16, 76, Hopper, FLASH, Portable),
        ((10, 0), torch.bfloat16, 160, Hopper, FLASH, Portable),
        ((8, 9), torch.bfloat16, 72, Hopper, FLASH, Portable),
        ((10, 0), torch.bfloat16, 72, Hopper, {"flash_attn"}, Portable),
    ],
)
def test_the_attention_of_a_gpu(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    hopper: type | None,
    packages: set[str],
    chosen: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "has_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object() if name in packages else None)
    monkeypatch.setattr(attention, "FlashAttention4", type("FlashAttention4", (Stub,), {}))
    replace_module(monkeypatch, "encoder.attention_sm90", HopperVarlen=hopper)
    replace_module(monkeypatch, "encoder.kernels", TritonVarlen=Portable)
    assert type(choose_attention(torch.device("cuda"), dtype, head_dim)).__name__ == chosen.__name__


def test_a_broken_flash_attn_4_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_triton", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(attention, "missing_package", lambda *names: None)
    monkeypatch.setattr(attention, "FlashAttention4", Broken)
    assert isinstance(choose_attention(torch.device("cuda"), torch.bfloat16, 72), FlashVarlen)


def test_missing_packages_are_named_outer_first() -> None:
    assert missing_package("torch", "torch.nn") is None
    assert missing_package("no_such_package", "no_such_package.part") == "no_such_package"
    assert missing_package("torch", "torch.no_such_part") == "torch.no_such_part"


class TestFlashAttention4:
    """The adapter over a module of the package's signature that attends segment by segment, reading past their ends."""

    @pytest.fixture(params=[False, True], ids=["output", "output and logsumexp"])
    def attend(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def flash_attn_varlen_func(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: None = None, cu_seqlens_q: Any = None, **options: Any
        ) -> Any:
            assert q.shape == k.shape == v.shape
            calls.append(options)
            assert options["cu_seqlens_k"] is cu_seqlens_q
            out = torch.full(q.shape, float("nan"))
            for start, end in itertools.pairwise(cu_seqlens_q.tolist()):
                scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:]) / q.shape[-1] ** 0.5
                scores[:, :, end - start :] = -torch.inf
                # The last tile reaches past the segment, as the package's does: a value there is weighed, if by zero.
                out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:])
            return (out, None) if request.param else out

        module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=module))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
        return calls

    @pytest.mark.parametrize("head_dim", [64, 72])
    def test_values_beside_padding_of_nan(self, attend: list[dict[str, Any]], head_dim: int) -> None:
        adapter = FlashAttention4(head_dim, torch.float32, torch.device("cpu"))
        lengths, padding = [4, 9, 1], 6
        used = sum(lengths)
        qkv = torch.randn(used + padding, 3, 2, head_dim, generator=torch.Generator().manual_seed(0))
        qkv[used:] = float("nan")
        bounds = torch.tensor([0, 4, 13, 14, 14, 14], dtype=torch.int32)
        reference = SegmentSdpa()
        expected = reference(qkv[:used], reference.plan(bounds, 0, used))
        out = adapter(qkv, adapter.plan(bounds, 20, len(qkv)))
        assert out.shape == (used + padding, 2 * head_dim)
        torch.testing.assert_close(out[:used], expected, rtol=1e-5, atol=1e-6)
        assert {name: attend[-1][name] for name in ("max_seqlen_q", "max_seqlen_k")} == {
            "max_seqlen_q": 20,
            "max_seqlen_k": 20,
        }

    def test_wrong_values_are_noticed(self, attend: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, **_: v * float("nan"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", wrong)
        with pytest.raises(RuntimeError, match="wrong values"):
            FlashAttention4(72, torch.float32, torch.device("cpu"))
