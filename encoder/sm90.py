"""Compiles, loads and launches the CUDA kernels written for Hopper GPUs (sm_90a)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc

from encoder.cache import cache_folder

_OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17", b"--use_fast_math")
_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_UNPACK = {
    "bf16": (
        "{ return __uint_as_float(pair << 16); }",
        "{ return __uint_as_float(pair & 0xffff0000u); }",
    ),
    "f16": (
        '{ float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)pair)); return r; }',
        '{ float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)(pair >> 16))); return r; }',
    ),
}
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class CudaError(RuntimeError):
    """A call of the CUDA driver or of its run-time compiler failed."""


def call(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error) != 0:
        raise CudaError(str(error))
    return values[0] if len(values) == 1 else values


def mma(name: str, n: int, dtype: torch.dtype, a_in_registers: bool) -> str:
    """The source of a device function around one wgmma of 64 rows, `n` columns and 16 steps of the contraction."""
    registers = n // 2
    element = _ELEMENTS[dtype]
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


@functools.cache
def _text(file: str) -> str:
    return Path(__file__).with_name(file).read_text()


def source(name: str, dtype: torch.dtype, defines: dict[str, int], functions: Sequence[str]) -> str:
    """The CUDA source of `name` (a `.cu` file beside this one) with what the host sets in front of it."""
    element = _ELEMENTS[dtype]
    low, high = _UNPACK[element]
    return "\n".join(
        [
            "typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16;",
            *(f"#define {key} {value}" for key, value in defines.items()),
            "__device__ __forceinline__ u32 pack(float low, float high) {",
            f'u32 r; asm("cvt.rn.{element}x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }}',
            f"__device__ __forceinline__ float low(u32 pair) {low}",
            f"__device__ __forceinline__ float high(u32 pair) {high}",
            *functions,
            _text("sm90.cuh"),
            _text(f"{name}.cu"),
        ]
    )


def compile_cubin(name: str, code: str) -> bytes:
    """The machine code for sm_90a, kept on disk by the hash of its source. A cache that cannot be read or written costs
    a start its time, no more.

    Raises:
        CudaError: with the compiler's log.
    """
    compiler = [*map(str, call(nvrtc.nvrtcVersion())), *(option.decode() for option in _OPTIONS)]
    key = hashlib.sha256(" ".join([*compiler, code]).encode()).hexdigest()[:24]
    file = f"{name}-{key}.cubin"
    # A user without a home has no cache.
    with contextlib.suppress(OSError, RuntimeError):
        return (cache_folder() / file).read_bytes()
    cubin = _compile(name, code)
    with contextlib.suppress(OSError, RuntimeError):
        _keep(cache_folder() / file, cubin)
    return cubin


def _compile(name: str, code: str) -> bytes:
    program = call(nvrtc.nvrtcCreateProgram(code.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), list(_OPTIONS))
        if int(error) != 0:
            log = b" " * call(nvrtc.nvrtcGetProgramLogSize(program))
            call(nvrtc.nvrtcGetProgramLog(program, log))
            raise CudaError(log.decode(errors="replace"))
        cubin = b" " * call(nvrtc.nvrtcGetCUBINSize(program))
        call(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        call(nvrtc.nvrtcDestroyProgram(program))


def _keep(path: Path, cubin: bytes) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(cubin)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def compile_cubins(name: str, codes: Sequence[str]) -> list[bytes]:
    """`compile_cubin` of several, on all cores that this process may use."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(functools.partial(compile_cubin, name), codes))


def threads(consumers: int) -> int:
    """Of a block: consumer warpgroups, and a producer that is a warpgroup too where it has registers to give up to
    several of them, a warp beside a single one."""
    return 128 * consumers + (128 if consumers > 1 else 32)


class Kernel:
    """The function `entry` of compiled code, loaded on the current device.

    Args:
        shared_bytes: dynamic shared memory of a block. Tiles start at multiples of 1024 bytes, which the dynamic shared
            memory itself may not: 1024 bytes more are asked for.
        types: of the kernel's arguments; None for a tensor map.
    """

    def __init__(self, cubin: bytes, entry: str, threads: int, shared_bytes: int, types: Sequence[Any]) -> None:
        torch.cuda.current_stream()  # makes the CUDA context that loading needs
        self._module = call(driver.cuModuleLoadData(cubin))
        self._function = call(driver.cuModuleGetFunction(self._module, entry.encode()))
        self.threads, self.shared_bytes, self._types = threads, shared_bytes + 1024, tuple(types)
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute(self._function, limit, self.shared_bytes))
        self.config = functools.lru_cache(maxsize=256)(self._config)
        # Bindings that lack a name that a launch needs fail here.
        self.config((1, 1), 0)

    def _config(self, grid: tuple[int, int], stream: int, cluster: int = 1) -> Any:
        """A launch on `stream`, a CUDA stream's handle, that may start while the kernel before it still runs."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = stream
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes = [overlap]
        if cluster > 1:
            together = driver.CUlaunchAttribute()
            together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
            attributes.append(together)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def launch(self, config: Any, *values: Any) -> None:
        call(driver.cuLaunchKernelEx(config, self._function, (values, self._types), 0))


def tensor_map(
    address: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> Any:
    """How the tensor memory accelerator reads a tensor: sizes and box innermost first, in elements; strides of all but
    the innermost dimension, in bytes; swizzle 128 or 32 bytes. What is out of bounds reads as 0."""
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    half = dtype == torch.float16
    return call(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if half else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzle == 128 else swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
