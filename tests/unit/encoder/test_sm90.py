"""How kernels for Hopper GPUs are compiled and kept, with a compiler that only counts."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import encoder


class Compiler:
    """Stands in for `cuda.bindings.nvrtc`: a source's machine code is the source, and one with "error" has none."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.version = (13, 0)

    def nvrtcVersion(self) -> tuple[int, ...]:
        return (0, *self.version)

    def nvrtcCreateProgram(self, code: bytes, *_: Any) -> tuple[int, bytes]:
        return 0, code

    def nvrtcCompileProgram(self, program: bytes, *_: Any) -> tuple[int]:
        self.compiled.append(program.decode())
        return (6 if b"error" in program else 0,)

    def nvrtcGetProgramLogSize(self, program: bytes) -> tuple[int, int]:
        return 0, len(b"line 1: " + program)

    def nvrtcGetProgramLog(self, program: bytes, into: bytes) -> tuple[int]:
        return self._fill(into, b"line 1: " + program)

    def nvrtcGetCUBINSize(self, program: bytes) -> tuple[int, int]:
        return 0, len(program)

    def nvrtcGetCUBIN(self, program: bytes, into: bytes) -> tuple[int]:
        return self._fill(into, program)

    def nvrtcDestroyProgram(self, program: bytes) -> tuple[int]:
        return (0,)

    def _fill(self, into: bytes, data: bytes) -> tuple[int]:
        ctypes.memmove(into, data, len(data))
        return (0,)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def sm90(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver, bindings.nvrtc = SimpleNamespace(), compiler
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "encoder.sm90", raising=False)
    monkeypatch.delattr(encoder, "sm90", raising=False)
    yield importlib.import_module("encoder.sm90")
    # The module over the stand-in must not stay; what was there before comes back.
    del sys.modules["encoder.sm90"], vars(encoder)["sm90"]


def test_a_kernel_is_compiled_once_for_each_source_and_compiler(sm90: Any, compiler: Compiler, tmp_path: Path) -> None:
    assert [sm90.compile_cubin("linear", code) for code in ("first", "second", "first")] == [
        b"first",
        b"second",
        b"first",
    ]
    assert compiler.compiled == ["first", "second"]
    kept = list((tmp_path / "foveal").iterdir())
    assert sorted(path.read_bytes() for path in kept) == [b"first", b"second"]
    assert all(path.name.startswith("linear-") and path.suffix == ".cubin" for path in kept)
    compiler.version = (13, 1)
    sm90.compile_cubin("linear", "first")
    assert compiler.compiled == ["first", "second", "first"]


def test_several_kernels_come_in_the_order_of_their_sources(sm90: Any, compiler: Compiler) -> None:
    codes = [f"source {i}" for i in range(40)]
    assert sm90.compile_cubins("linear", codes) == [code.encode() for code in codes]
    assert sorted(compiler.compiled) == sorted(codes)


def test_what_is_kept_may_be_read_by_whom_the_umask_lets(sm90: Any, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        sm90.compile_cubin("linear", "source")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "foveal").iterdir()] == [0o640]


def test_a_cache_that_cannot_be_read_is_a_miss(sm90: Any, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    sm90.compile_cubin("linear", "source")

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert sm90.compile_cubin("linear", "source") == b"source"
    assert compiler.compiled == ["source", "source"]


def test_a_cache_that_cannot_be_written_is_none(sm90: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert sm90.compile_cubin("linear", "source") == b"source"


def test_a_user_without_a_home_has_no_cache(sm90: Any, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert [sm90.compile_cubin("linear", "source") for _ in range(2)] == [b"source"] * 2
    assert compiler.compiled == ["source", "source"]


def test_a_full_disk_leaves_no_scratch_file(sm90: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write_half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "no space left", str(path))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    assert sm90.compile_cubin("linear", "source") == b"source"
    assert list((tmp_path / "foveal").iterdir()) == []


def test_a_source_that_does_not_compile_raises_with_the_log(sm90: Any, tmp_path: Path) -> None:
    with pytest.raises(sm90.CudaError, match="line 1: error here"):
        sm90.compile_cubin("linear", "error here")
    assert not (tmp_path / "foveal").exists()
