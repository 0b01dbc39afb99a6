"""Compiles and launches `linear_sm90.cu`, the linear layers of Hopper GPUs."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from encoder import sm90
from encoder.kernels import TritonOps
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
)

_TYPES = (None, None, *(sm90.POINTER,) * 4, sm90.INT, sm90.POINTER, *(sm90.INT,) * 5)


def _compile(dtype: torch.dtype, head_dim: int, tiling: LinearTiling, epilogue: Epilogue) -> bytes:
    code = sm90.source(
        "linear_sm90",
        dtype,
        {
            "MI": tiling.m64,
            "BN": tiling.block_n,
            "CONSUMERS": tiling.consumers,
            "PINGPONG": int(tiling.pingpong),
            "CLUSTER": tiling.cluster,
            "STAGES": tiling.stages,
            "EPILOGUE": int(epilogue),
            **({"D": head_dim} if epilogue == Epilogue.ROTARY else {}),
        },
        [sm90.mma("mma", tiling.block_n, dtype, a_in_registers=False)],
    )
    return sm90.compile_cubin("linear_sm90", code)


class HopperOps(TritonOps):
    """`TritonOps` with linear layers of our own, which skip rows past the live ones and, unlike cuBLAS's, start while
    the kernel before them drains. bfloat16 or float16.

    Raises:
        RuntimeError: the kernels cannot be compiled or loaded here.
    """

    linears = "hopper-linear"

    def __init__(self, dtype: torch.dtype, device: torch.device, head_dim: int) -> None:
        super().__init__()
        torch.cuda.current_stream(device)  # makes the CUDA context that loading needs
        self._dtype, self._head_dim = dtype, head_dim
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._map = functools.lru_cache(maxsize=4096)(self._encode_map)
        kinds = [(t, e) for t in TILINGS for e in Epilogue if t.goes_with(e, head_dim)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            cubins = list(pool.map(lambda kind: _compile(dtype, head_dim, *kind), kinds))
        # All of them now, so that what cannot be loaded fails here and not in a capture.
        self._kernels: dict[tuple[LinearTiling, Epilogue], sm90.Kernel] = {}
        for (tiling, epilogue), cubin in zip(kinds, cubins, strict=True):
            kernel = sm90.Kernel(cubin, "linear", sm90.threads(tiling.consumers), tiling.shared_bytes, _TYPES)
            for splits in range(1, MAX_SPLITS + 1) if epilogue == Epilogue.PARTIAL else [1]:
                self._kernels[replace(tiling, splits=splits), epilogue] = kernel

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """The same values in rows that start at multiples of 128 bytes: others make every load touch two lines."""
        if weight.stride(0) % STEP == 0:
            return weight
        rows, cols = weight.shape
        return _aligned(rows, cols, weight).copy_(weight)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        live: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _takes(x, weight, out):
            return super().linear(x, weight, bias, live, out)
        return self.run(x, weight, bias, live, Epilogue.NONE, out)

    def linear_gelu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, live: torch.Tensor, approximate: str = "tanh"
    ) -> torch.Tensor:
        if not _takes(x, weight):
            return super().linear_gelu(x, weight, bias, live, approximate)
        return self.run(x, weight, bias, live, Epilogue.GELU_TANH if approximate == "tanh" else Epilogue.GELU_ERF)

    def linear_rotary(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        live: torch.Tensor,
    ) -> torch.Tensor:
        head_dim = 2 * cos.shape[1]
        tiling = choose_rotary_tiling(len(x), *weight.shape, head_dim)
        if tiling is None or head_dim != self._head_dim or not _takes(x, weight):
            return super().linear_rotary(x, weight, bias, cos, sin, live)
        return self.run(x, weight, bias, live, Epilogue.ROTARY, tiling=tiling, rotary=(cos, sin)).view(
            len(x), 3, -1, head_dim
        )

    def add_linear_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor,
        live: torch.Tensor,
    ) -> torch.Tensor:
        if _takes(y, weight):
            tiling = choose_linear_tiling(len(y), *weight.shape, may_split=True)
            if tiling.splits > 1:
                added = self.run(y, weight, bias, live, Epilogue.PARTIAL, tiling=tiling)
                return self.add_layer_norm(x, added, norm_weight, norm_bias)
        return super().add_linear_norm(x, y, weight, bias, norm_weight, norm_bias, live)

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        live: torch.Tensor,
        epilogue: Epilogue,
        out: torch.Tensor | None = None,
        tiling: LinearTiling | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[rows, out], or float32 [splits, rows, out] of partial sums.

        Args:
            tiling: with no more splits than the contraction has steps; more than one for partial sums only.
            rotary: cos and sin, for that epilogue.
        """
        (rows, inner), cols = x.shape, len(weight)
        tiling = tiling or choose_linear_tiling(rows, cols, inner)
        if epilogue == Epilogue.PARTIAL:
            out = torch.empty(tiling.splits, rows, cols, dtype=torch.float32, device=x.device)
        elif out is None:
            # What comes out of a GELU is read by nothing but the next linear layer.
            aligned = epilogue in (Epilogue.GELU_TANH, Epilogue.GELU_ERF)
            out = _aligned(rows, cols, x) if aligned else torch.empty(rows, cols, dtype=x.dtype, device=x.device)
        kernel = self._kernels[tiling, epilogue]
        kernel.launch(
            kernel.config(
                (tiling.grid(rows, cols, self._blocks), 1),
                torch.cuda.current_stream(x.device).cuda_stream,
                tiling.cluster,
            ),
            self._map(x.data_ptr(), rows, inner, x.stride(0), tiling.block_m),
            self._map(weight.data_ptr(), cols, inner, weight.stride(0), tiling.block_n // tiling.cluster),
            out.data_ptr(),
            bias.data_ptr(),
            *((table.data_ptr() for table in rotary) if rotary else (0, 0)),
            # The keys' heads follow the queries', the values' come last.
            cols // 3 * 2,
            live.data_ptr(),
            rows,
            cols,
            out.stride(-2),
            -(-inner // STEP),
            tiling.splits,
        )
        return out

    def _encode_map(self, address: int, rows: int, cols: int, pitch: int, box_rows: int) -> Any:
        return sm90.tensor_map(address, self._dtype, (cols, rows), (pitch * 2,), (STEP, box_rows), 128)


def _aligned(rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised [rows, cols] whose rows start at multiples of 128 bytes."""
    return torch.empty(rows, aligned_pitch(cols), dtype=like.dtype, device=like.device)[:, :cols]


def _takes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> bool:
    """Whether the kernel can load these operands and store their product, into `out` if given."""
    tensors = [x, weight] if out is None else [x, weight, out]
    return len(weight) % 8 == 0 and all(t.stride(1) == 1 and loadable(t.data_ptr(), t.stride(0)) for t in tensors)
