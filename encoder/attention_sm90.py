"""Compiles and launches `attention_sm90.cu`, the varlen attention of Hopper GPUs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from encoder import sm90
from encoder.attention import TILINGS, Tiling, choose_tiling
from encoder.kernels import TritonVarlen, attention_tiles


def _source(head_dim: int, dtype: torch.dtype, tiling: Tiling) -> str:
    return sm90.source(
        "attention_sm90",
        dtype,
        {
            "D": head_dim,
            "BM": tiling.block_m,
            "BN": tiling.block_n,
            "WGS": tiling.warpgroups,
            "THREADS": sm90.threads(tiling.warpgroups),
            "STAGES": tiling.stages,
        },
        [
            sm90.mma("mma_qk", tiling.block_n, dtype, a_in_registers=False),
            sm90.mma("mma_pv", head_dim, dtype, a_in_registers=True),
        ],
    )


class _Kernel(sm90.Kernel):
    """The compiled code of one tiling, loaded on the current device."""

    def __init__(self, cubin: bytes, head_dim: int, tiling: Tiling) -> None:
        self.block_m, self.block_n = tiling.block_m, tiling.block_n
        tail = head_dim > 64
        stage_bytes = tiling.block_n * (128 + 32 * tail + 128 * (1 + tail))
        super().__init__(
            cubin,
            "varlen_attention",
            sm90.threads(tiling.warpgroups),
            self.block_m * (128 + 32 * tail) + tiling.stages * stage_bytes,
            (*(None,) * 4, *(sm90.POINTER,) * 2, sm90.INT, sm90.FLOAT),
        )


@dataclass(frozen=True)
class _Launch:
    """A kernel and the tiles that it runs over, which the layers of a forward share."""

    kernel: _Kernel
    tiles: torch.Tensor


class HopperVarlen:
    """FlashAttention-3's scheme at the head's own width; see `attention_sm90.cu`. bfloat16 or float16, on the current
    device.

    Raises:
        RuntimeError: the kernels cannot be compiled or loaded here.
    """

    name = "hopper-varlen"
    capturable = True

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        self._head_dim, self._dtype = head_dim, dtype
        cubins = sm90.compile_cubins("attention_sm90", [_source(head_dim, dtype, tiling) for tiling in TILINGS])
        # All of them now, so that what cannot be loaded fails here and not in a request.
        self._kernels = {t: _Kernel(cubin, head_dim, t) for t, cubin in zip(TILINGS, cubins, strict=True)}
        self._portable = TritonVarlen()
        self._maps = functools.lru_cache(maxsize=256)(self._encode_maps)

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> _Launch | torch.Tensor:
        tiling = choose_tiling(rows, len(cu_seqlens) - 1)
        if tiling is None:
            return self._portable.plan(cu_seqlens, max_seqlen, rows)
        kernel = self._kernels[tiling]
        return _Launch(kernel, attention_tiles(cu_seqlens, rows, kernel.block_m))

    def __call__(self, qkv: torch.Tensor, plan: _Launch | torch.Tensor) -> torch.Tensor:
        if isinstance(plan, torch.Tensor):
            return self._portable(qkv, plan)
        rows, _, heads, dim = qkv.shape
        out = torch.empty(rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
        maps = self._maps(qkv.data_ptr(), rows, heads, plan.kernel.block_m, plan.kernel.block_n)
        plan.kernel.launch(
            plan.kernel.config((len(plan.tiles), heads), torch.cuda.current_stream(qkv.device).cuda_stream),
            *maps,
            out.data_ptr(),
            plan.tiles.data_ptr(),
            heads,
            dim**-0.5 * math.log2(math.e),
        )
        return out

    def _encode_maps(self, address: int, rows: int, heads: int, block_m: int, block_n: int) -> list[Any]:
        """Tensor maps of qkv [rows, 3 * heads, head_dim]: query, query tail, key and value, key tail."""
        sizes = (self._head_dim, 3 * heads, rows)
        strides = (self._head_dim * 2, self._head_dim * 6 * heads)
        return [
            sm90.tensor_map(address, self._dtype, sizes, strides, (width, 1, box_rows), 2 * width)
            for width, box_rows in ((64, block_m), (16, block_m), (64, block_n), (16, block_n))
        ]
