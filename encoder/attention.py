"""Variable-length attention behind one call. Every implementation attends within the segments that `cu_seqlens` bounds,
never reads a key or value outside a segment, and leaves rows past the last bound unspecified."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """`plan` runs once a forward, `__call__` once a layer; both inside the captured callable.

    qkv: [rows, 3, heads, head_dim], rotated. Returns [rows, heads * head_dim] in the same dtype.
    """

    name: str
    capturable: bool

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> Any: ...

    def __call__(self, qkv: torch.Tensor, plan: Any) -> torch.Tensor: ...


class SegmentSdpa:
    """PyTorch's dense attention, one call for each run of equally long segments. Reads the bounds on the host."""

    name = "sdpa"
    capturable = False

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> list[tuple[int, int, int]]:
        """(first row, segments, rows of each) for every run of equally long segments."""
        bounds = cu_seqlens.tolist()
        runs: list[tuple[int, int, int]] = []
        for start, end in itertools.pairwise(bounds):
            if end == start:
                continue
            if runs and runs[-1][2] == end - start:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, end - start)
            else:
                runs.append((start, 1, end - start))
        return runs

    def __call__(self, qkv: torch.Tensor, plan: list[tuple[int, int, int]]) -> torch.Tensor:
        rows, _, heads, head_dim = qkv.shape
        out = qkv.new_empty(rows, heads, head_dim)
        for start, count, length in plan:
            end = start + count * length
            q, k, v = qkv[start:end].view(count, length, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
            o = F.scaled_dot_product_attention(q, k, v)
            out[start:end].view(count, length, heads, head_dim).copy_(o.transpose(1, 2))
        return out.view(rows, heads * head_dim)


class FlashVarlen:
    """FlashAttention-2 as PyTorch ships it, in half precision. `max_seqlen` must cover the longest segment."""

    name = "flash-attn-2"
    capturable = True

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> tuple[torch.Tensor, int]:
        return cu_seqlens, max_seqlen

    def __call__(self, qkv: torch.Tensor, plan: tuple[torch.Tensor, int]) -> torch.Tensor:
        cu_seqlens, max_seqlen = plan
        q, k, v = qkv.unbind(1)
        o = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, False, False
        )[0]
        return o.flatten(1)


class FlashAttention4:
    """FlashAttention-4 of the optional package `flash-attn-4`: bfloat16 or float16, heads of a multiple of 8 up to 128.

    Raises:
        Exception: whatever the package does where it or its compiler cannot be used.
    """

    name = "flash-attn-4"
    capturable = True

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        self._attend = flash_attn_varlen_func
        # Compiles the kernel now, so that a compiler that fails does so here and not in a capture.
        qkv = torch.ones(128, 3, 1, head_dim, dtype=dtype, device=device)
        qkv[100:] = float("nan")
        bounds = torch.tensor([0, 100], dtype=torch.int32, device=device)
        if not bool(((self(qkv, self.plan(bounds, 128, 128))[:100] - 1).abs() < 0.01).all()):
            raise RuntimeError("flash-attn-4 gives wrong values here")

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        """The bounds, the longest segment, and bool [rows, 1, 1]: the rows past the last bound."""
        past = torch.arange(rows, device=cu_seqlens.device) >= cu_seqlens[-1]
        return cu_seqlens, max_seqlen, past[:, None, None]

    def __call__(self, qkv: torch.Tensor, plan: tuple[torch.Tensor, int, torch.Tensor]) -> torch.Tensor:
        cu_seqlens, max_seqlen, past = plan
        # A segment's last tile also loads the values of the rows behind it and weighs them 0, and 0 x NaN is NaN.
        qkv[:, 2].masked_fill_(past, 0)
        q, k, v = qkv.unbind(1)
        o = self._attend(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen
        )
        # Its releases differ in whether the logsumexp comes with the output.
        return (o[0] if isinstance(o, tuple) else o).flatten(1)


@dataclass(frozen=True)
class Tiling:
    """How `attention_sm90` cuts work: keys in a tile, consumer warpgroups of 64 rows, tiles of K and V in flight."""

    block_n: int
    warpgroups: int
    stages: int = 2

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups


TILINGS = (Tiling(64, 1), Tiling(256, 1, 1), Tiling(64, 2), Tiling(112, 2), Tiling(112, 3), Tiling(128, 3))


def choose_tiling(rows: int, num_seqs: int) -> Tiling | None:
    """The one of `TILINGS` for a launch over `rows` rows in up to `num_seqs` segments, as measured on an H200; None
    where the portable kernel is faster.

    Few rows want many small blocks; from 129 to 256 one tile holds all keys of any segment, for what counts there is
    how many steps wait for each other. A few segments of under 256 rows each leave most of a large block idle. Many
    segments are a video's frames, for which a tile of 112 keys wastes less than one of 128.
    """
    if rows <= 128:
        return Tiling(64, 1)
    if rows <= 256:
        return Tiling(256, 1, 1)
    if rows <= 512:
        return Tiling(64, 2)
    if rows <= 1024:
        return Tiling(112, 2)
    if num_seqs > 32:
        return Tiling(112, 3)
    return Tiling(128, 3) if rows >= 256 * num_seqs else None


def has_triton(device: torch.device) -> bool:
    """Whether the project's own kernels can run on `device`."""
    return (
        device.type == "cuda"
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def missing_package(*names: str) -> str | None:
    """The first of the dotted module names, outer ones first, that is not installed; None if all are."""
    return next((name for name in names if importlib.util.find_spec(name) is None), None)


def runs_hopper_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels written for Hopper GPUs may be tried on `device` with `dtype` and heads of `head_dim`."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 72, 80)
        and has_triton(device)
        and torch.cuda.get_device_capability(device)[0] == 9
        and missing_package("cuda", "cuda.bindings") is None
    )


def choose_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    """The fastest implementation that runs on `device`, which must be the current one, with `dtype`.

    FlashAttention-4 comes second to our own kernel: for a segment of 4096 rows at head_dim 72, an H200 ran that one at
    466 TFLOP/s and FlashAttention-4 at 408. So it serves where ours does not run: above all on newer GPUs.
    """
    if device.type != "cuda":
        return SegmentSdpa()
    half = dtype in (torch.bfloat16, torch.float16)
    capability = torch.cuda.get_device_capability(device)
    triton = has_triton(device)
    if runs_hopper_kernels(device, dtype, head_dim):
        try:
            from encoder.attention_sm90 import HopperVarlen

            return HopperVarlen(head_dim, dtype)
        except Exception as error:
            # Bindings, a driver or a run-time compiler that do not take the kernels are no reason not to serve.
            logger.warning("the Hopper attention kernel cannot be used: %r", error)
    if (
        half
        and head_dim % 8 == 0
        and head_dim <= 128
        and capability >= (9, 0)
        and missing_package("flash_attn", "flash_attn.cute") is None
    ):
        try:
            return FlashAttention4(head_dim, dtype, device)
        except Exception as error:
            # An optional package that is broken, or that does not know this GPU, is none either.
            logger.warning("flash-attn-4 cannot be used: %r", error)
    if triton:
        from encoder.kernels import TritonVarlen

        return TritonVarlen()
    return FlashVarlen() if half and head_dim % 8 == 0 else SegmentSdpa()
