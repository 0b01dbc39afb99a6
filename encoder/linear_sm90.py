"""Compiles and launches `linear_sm90.cu`, the linear layers of Hopper GPUs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from encoder import sm90
from encoder.kernels import TritonOps
from encoder.linear import (
    MAX_SPLITS,
    OUT_PITCH,
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


def _source(dtype: torch.dtype, head_dim: int, tiling: LinearTiling, epilogue: Epilogue) -> str:
    return sm90.source(
        "linear_sm90",
        dtype,
        {
            **{kind.name: int(kind) for kind in Epilogue},
            "EPILOGUE": int(epilogue),
            "MI": tiling.m64,
            "BM": tiling.block_m,
            "BN": tiling.block_n,
            "BK": STEP,
            "CONSUMERS": tiling.consumers,
            "PINGPONG": int(tiling.pingpong),
            "CLUSTER": tiling.cluster,
            "STAGES": tiling.stages,
            "THREADS": sm90.threads(tiling.consumers),
            "OUT_PITCH": OUT_PITCH,
            **({"D": head_dim} if epilogue == Epilogue.ROTARY else {}),
        },
        [sm90.mma("mma", tiling.block_n, dtype, a_in_registers=False)],
    )


class HopperOps(TritonOps):
    """`TritonOps` with linear layers of our own, which skip rows past the live ones and, unlike cuBLAS's, start while
    the kernel before them drains. bfloat16 or float16, on the current device.

    Raises:
        RuntimeError: the kernels cannot be compiled or loaded here.
    """

    linears = "hopper-linear"

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        super().__init__()
        self._dtype, self._head_dim = dtype, head_dim
        self._blocks = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._map = functools.lru_cache(maxsize=4096)(self._encode_map)
        kinds = [(t, e) for t in TILINGS for e in Epilogue if t.goes_with(e, head_dim)]
        cubins = sm90.compile_cubins("linear_sm90", [_source(dtype, head_dim, *kind) for kind in kinds])
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

    def linear_parts(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, live: torch.Tensor
    ) -> torch.Tensor:
        if _takes(x, weight):
            tiling = choose_linear_tiling(len(x), *weight.shape, may_split=True)
            if tiling.splits > 1:
                return self.run(x, weight, bias, live, Epilogue.PARTIAL, tiling=tiling)
        return super().linear_parts(x, weight, bias, live)

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
        """x @ weight.T + bias and the epilogue: [rows, out], or float32 [splits, rows, out] of partial sums.

        Args:
            x, weight, bias: [rows, in], [out, in], [out].
            live: int32 [1], the rows that count; results past them are left as they are.
            out: to write into; made if None.
            tiling: one of `TILINGS` that goes with the epilogue, with no more splits than the contraction has steps;
                more than one for partial sums only. Chosen if None.
            rotary: cos and sin, float32 [rows, head_dim / 2], for that epilogue.

        Raises:
            KeyError: there is no such tiling.
        """
        (rows, inner), cols = x.shape, len(weight)
        tiling = tiling or choose_linear_tiling(rows, cols, inner)
        kernel = self._kernels[tiling, epilogue]
        if out is None:
            if epilogue == Epilogue.PARTIAL:
                out = torch.empty(tiling.splits, rows, cols, dtype=torch.float32, device=x.device)
            elif epilogue in (Epilogue.GELU_TANH, Epilogue.GELU_ERF):
                # Read by nothing but the next linear layer.
                out = _aligned(rows, cols, x)
            else:
                out = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
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
