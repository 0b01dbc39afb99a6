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


@dataclass(frozen=True)
class Tiling:
    """How `attention_sm90` cuts work: keys in a tile, consumer warpgroups of 64 rows, tiles of K and V in flight."""

    block_n: int
    warpgroups: int
    stages: int = 2


def choose_tiling(rows: int, num_seqs: int) -> Tiling | None:
    """The tiling for a launch over `rows` rows in up to `num_seqs` segments, as measured on an H200; None where the
    portable kernel is faster.

    Few rows want many small blocks. A few segments of under 256 rows each leave most of a large block idle. Many
    segments are a video's frames, for which a tile of 112 keys wastes less than one of 128.
    """
    if rows <= 512:
        return Tiling(64, 1)
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


def choose_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    """The fastest implementation that runs on `device` with `dtype`."""
    half = dtype in (torch.bfloat16, torch.float16)
    if has_triton(device):
        if (
            half
            and head_dim in (64, 72, 80)
            and torch.cuda.get_device_capability(device)[0] == 9
            and importlib.util.find_spec("cuda") is not None
            and importlib.util.find_spec("cuda.bindings") is not None
        ):
            from encoder.attention_sm90 import HopperVarlen

            try:
                return HopperVarlen(head_dim, dtype)
            except RuntimeError as error:
                # A driver or run-time compiler that does not take the kernel is no reason not to serve.
                logger.warning("the Hopper attention kernel cannot be used: %s", error)
        from encoder.kernels import TritonVarlen

        return TritonVarlen()
    if device.type == "cuda" and half and head_dim % 8 == 0:
        return FlashVarlen()
    return SegmentSdpa()
