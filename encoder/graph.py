"""One captured graph, and the static memory that graphs share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from encoder.defs import Stop


class StaticBuffers:
    """Memory of fixed address by name. A smaller request gets the leading part of what a larger one allocated, so
    graphs that never run at the same time share it: capture the largest first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape`; zeros when first allocated.

        Raises:
            ValueError: a larger tensor than the one that `name` already stands for.
        """
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None:
            flat = self._flat[name, dtype] = torch.zeros(size, dtype=dtype, device=self.device)
        if flat.numel() < size:
            raise ValueError(f"static buffer {name!r} holds {flat.numel()} elements, not {size}: capture largest first")
        return flat[:size].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._flat.values())

    def clear(self) -> None:
        self._flat.clear()


class CapturedGraph(Protocol):
    """Replays one callable over its static buffers."""

    backend: str

    def replay(self, stop: Stop | None = None) -> None: ...


class CpuStaticGraph:
    """The stand-in on a CPU: the same callable over the same static buffers, run anew at each replay.

    Args:
        run: gets the `stop` of its replay.
    """

    backend = "cpu-static"

    def __init__(self, run: Callable[[Stop | None], None]) -> None:
        self._run = run

    def replay(self, stop: Stop | None = None) -> None:
        self._run(stop)


class CudaGraph:
    """A CUDA graph of `run`, captured on `stream` into the memory pool `pool` after `warmup` (or `run`) ran there."""

    backend = "cuda-graph"

    def __init__(
        self, run: Callable[[], None], pool: Any, stream: torch.cuda.Stream, warmup: Callable[[], None] | None = None
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            (warmup or run)()
            stream.synchronize()
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def replay(self, stop: Stop | None = None) -> None:
        """Enqueues the whole graph; it is never stopped."""
        self._graph.replay()
