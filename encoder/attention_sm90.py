"""Compiles and launches `attention_sm90.cu`, the varlen attention of Hopper GPUs."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from encoder.attention import Tiling, choose_tiling
from encoder.kernels import TritonVarlen, attention_tiles

_SOURCE = Path(__file__).with_name("attention_sm90.cu")


class CudaError(RuntimeError):
    """A call of the CUDA driver or of its run-time compiler failed."""


def _call(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise CudaError(str(error))
    return values[0] if len(values) == 1 else values


def _mma(name: str, n: int, element: str, a_in_registers: bool) -> str:
    """A device function around one wgmma of 64 rows, `n` columns and 16 steps of the contraction."""
    registers = n // 2
    outputs = ", ".join(f"%{i}" for i in range(registers))
    constraints = ", ".join(f'"+f"(d[{i}])' for i in range(registers))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {{{outputs}}}"
    head = f"__device__ __forceinline__ void {name}(float (&d)[{registers}]"
    if a_in_registers:
        a = ", ".join(f"%{registers + i}" for i in range(4))
        return (
            f"{head}, u32 a, u32 b, u32 c, u32 e, u64 m) {{\n"
            f'asm volatile("{instruction}, {{{a}}}, %{registers + 4}, 1, 1, 1, 1;\\n"'
            f' : {constraints} : "r"(a), "r"(b), "r"(c), "r"(e), "l"(m));\n}}'
        )
    return (
        f"{head}, u64 a, u64 b, int add) {{\n"
        f'asm volatile("{{.reg .pred p;\\nsetp.ne.b32 p, %{registers + 2}, 0;\\n'
        f'{instruction}, %{registers}, %{registers + 1}, p, 1, 1, 0, 0;\\n}}"'
        f' : {constraints} : "l"(a), "l"(b), "r"(add));\n}}'
    )


def source(head_dim: int, tiling: Tiling, element: str) -> str:
    """The CUDA source for one configuration; `element` is "bf16" or "f16"."""
    return "\n".join(
        [
            "typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16;",
            "#define NEG_INF __int_as_float(0xff800000)",
            f"#define D {head_dim}",
            f"#define BN {tiling.block_n}",
            f"#define WGS {tiling.warpgroups}",
            f"#define STAGES {tiling.stages}",
            "__device__ __forceinline__ u32 pack(float low, float high) {",
            f'u32 r; asm("cvt.rn.{element}x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }}',
            _mma("mma_qk", tiling.block_n, element, a_in_registers=False),
            _mma("mma_pv", head_dim, element, a_in_registers=True),
            _SOURCE.read_text(),
        ]
    )


def compile_cubin(code: str) -> bytes:
    """The machine code for sm_90a, kept on disk by the hash of its source.

    Raises:
        CudaError: with the compiler's log.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foveal"
    version = "-".join(map(str, _call(nvrtc.nvrtcVersion())))
    path = cache / f"attention-{hashlib.sha256((version + code).encode()).hexdigest()[:24]}.cubin"
    if path.is_file():
        return path.read_bytes()
    program = _call(nvrtc.nvrtcCreateProgram(code.encode(), b"attention_sm90.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--use_fast_math"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error) != 0:
        log = b" " * _call(nvrtc.nvrtcGetProgramLogSize(program))
        _call(nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(log.decode(errors="replace"))
    cubin = b" " * _call(nvrtc.nvrtcGetCUBINSize(program))
    _call(nvrtc.nvrtcGetCUBIN(program, cubin))
    cache.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(cubin)
    scratch.replace(path)
    return cubin


class _Kernel:
    """One tiling, compiled and loaded on the current device."""

    def __init__(self, head_dim: int, dtype: torch.dtype, tiling: Tiling) -> None:
        element = "bf16" if dtype == torch.bfloat16 else "f16"
        cubin = compile_cubin(source(head_dim, tiling, element))
        self._module = _call(driver.cuModuleLoadData(cubin))
        self.function = _call(driver.cuModuleGetFunction(self._module, b"varlen_attention"))
        self.block_m, self.block_n = 64 * tiling.warpgroups, tiling.block_n
        self.threads = 128 * tiling.warpgroups + (128 if tiling.warpgroups > 1 else 32)
        tail = head_dim > 64
        stage_bytes = tiling.block_n * (128 + 32 * tail + 128 * (1 + tail))
        # Tiles start at multiples of 1024 bytes, which the dynamic shared memory itself may not.
        self.shared_bytes = self.block_m * (128 + 32 * tail) + tiling.stages * stage_bytes + 1024
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver.cuFuncSetAttribute(self.function, limit, self.shared_bytes))


_TYPES = (*(None,) * 4, *(ctypes.c_void_p,) * 2, ctypes.c_int, ctypes.c_float)


class _Launch:
    """A kernel, the tiles that it runs over, and its launch configuration, which the layers of a forward share."""

    def __init__(self, kernel: _Kernel, tiles: torch.Tensor) -> None:
        self.kernel, self.tiles = kernel, tiles
        self._config: Any = None

    def config(self, heads: int) -> Any:
        if self._config is None:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = len(self.tiles), heads, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = self.kernel.threads, 1, 1
            config.sharedMemBytes = self.kernel.shared_bytes
            config.hStream = torch.cuda.current_stream(self.tiles.device).cuda_stream
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [overlap], 1
            self._config = config
        return self._config


class HopperVarlen:
    """FlashAttention-3's scheme at the head's own width; see `attention_sm90.cu`. bfloat16 or float16.

    Raises:
        RuntimeError: the kernel cannot be compiled or loaded here.
    """

    name = "hopper-varlen"
    capturable = True

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        torch.cuda.current_stream()  # makes the CUDA context that the driver calls below need
        self._head_dim, self._dtype = head_dim, dtype
        self._kernels = functools.cache(lambda tiling: _Kernel(head_dim, dtype, tiling))
        self._portable = TritonVarlen()
        self._kernels(Tiling(128, 3))
        self._maps = functools.lru_cache(maxsize=256)(self._encode_maps)

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> _Launch | torch.Tensor:
        tiling = choose_tiling(rows, len(cu_seqlens) - 1)
        if tiling is None:
            return self._portable.plan(cu_seqlens, max_seqlen, rows)
        kernel = self._kernels(tiling)
        return _Launch(kernel, attention_tiles(cu_seqlens, rows, kernel.block_m))

    def __call__(self, qkv: torch.Tensor, plan: _Launch | torch.Tensor) -> torch.Tensor:
        if isinstance(plan, torch.Tensor):
            return self._portable(qkv, plan)
        rows, _, heads, dim = qkv.shape
        out = torch.empty(rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
        maps = self._maps(qkv.data_ptr(), rows, heads, plan.kernel.block_m, plan.kernel.block_n)
        values = (*maps, out.data_ptr(), plan.tiles.data_ptr(), heads, dim**-0.5 * math.log2(math.e))
        _call(driver.cuLaunchKernelEx(plan.config(heads), plan.kernel.function, (values, _TYPES), 0))
        return out

    def _encode_maps(self, address: int, rows: int, heads: int, block_m: int, block_n: int) -> list[Any]:
        """Tensor maps of qkv [rows, 3 * heads, head_dim]: query, query tail, key and value, key tail."""
        kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
        half = self._dtype == torch.float16
        maps = []
        for width, box_rows in ((64, block_m), (16, block_m), (64, block_n), (16, block_n)):
            encoded = driver.cuTensorMapEncodeTiled(
                kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if half else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                address,
                [driver.cuuint64_t(size) for size in (self._head_dim, 3 * heads, rows)],
                [driver.cuuint64_t(stride) for stride in (self._head_dim * 2, self._head_dim * 6 * heads)],
                [driver.cuuint32_t(size) for size in (width, 1, box_rows)],
                [driver.cuuint32_t(1)] * 3,
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzles.CU_TENSOR_MAP_SWIZZLE_128B if width == 64 else swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
            maps.append(_call(encoded))
        return maps
