"""Frames in, embeddings out: what a replica holds. Upload, replay and copy-out of successive batches overlap."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encoder.checkpoint import load_vision_encoder
from encoder.defs import EncodeOutput, EncodeRequest, ItemOutput, Modality, Stop
from encoder.frames import check_frames, frames_grid
from encoder.manager import EncoderCudaGraphManager
from encoder.qwen3_vl import Qwen3VLVisionEncoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PendingBatch:
    """A batch under way. `result` may be called from another thread than `submit`."""

    def __init__(
        self,
        outputs: Sequence[ItemOutput | Exception],
        rows: Sequence[torch.Tensor | None],
        norms: torch.Tensor,
        span: tuple[torch.cuda.Event, torch.cuda.Event] | None,
        done: torch.cuda.Event | None,
        seconds: float,
    ) -> None:
        self._outputs, self._rows, self._norms = outputs, rows, norms
        self._span, self._done, self._seconds = span, done, seconds

    def result(self) -> list[EncodeOutput | Exception]:
        """Blocks until the embeddings are on the host. A bad item is an exception in its own place.

        Raises:
            RuntimeError: the device failed; every later call will fail too.
        """
        if self._done is not None:
            self._done.synchronize()
        has_nan = iter(self._norms.isnan().tolist())
        results: list[EncodeOutput | Exception] = []
        for output, rows in zip(self._outputs, self._rows, strict=True):
            if isinstance(output, Exception):
                results.append(output)
            else:
                assert rows is not None
                array = _to_numpy(rows)
                results.append(EncodeOutput(array, output.execution, output.reason, output.budget, next(has_nan)))
        return results

    @property
    def busy_seconds(self) -> float:
        """Seconds that the device worked on this batch; valid after `result`."""
        return self._span[0].elapsed_time(self._span[1]) / 1e3 if self._span else self._seconds


class EncoderRunner:
    """One tower on one device. `submit` belongs to one thread; at most `max_in_flight` batches should be pending."""

    def __init__(self, encoder: Qwen3VLVisionEncoder, manager: EncoderCudaGraphManager) -> None:
        self.encoder, self.manager = encoder, manager
        self.dtype = str(encoder.dtype).removeprefix("torch.")
        self.device = str(encoder.device)
        self.backend = manager.backend
        self.attention, self.linears = encoder.attention.name, encoder.ops.linears
        self.width, self.main_width = encoder.config.width, encoder.config.out_hidden_size
        self._cuda = encoder.device.type == "cuda"
        self.max_in_flight = 2 if self._cuda else 1
        if self._cuda:
            self._upload, self._compute, self._copy_out = (torch.cuda.Stream(encoder.device) for _ in range(3))

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        token_budgets: Mapping[str, Sequence[int]],
        max_batch_size: int,
        t_capture: int = 8,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> EncoderRunner:
        """Loads the tower and captures its graphs; `token_budgets` {} gives a runner without graphs.

        Raises:
            CheckpointError, ValueError, MemoryError: see `load_vision_encoder` and `EncoderCudaGraphManager`.
        """
        resolved = torch.device(resolve_device(device))
        if resolved.type == "cuda":
            # Kernels are compiled and loaded for the current device; which one that is must not change later.
            resolved = torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
            torch.cuda.set_device(resolved)
        encoder = load_vision_encoder(
            folder,
            resolved,
            DTYPES[resolve_dtype(dtype, resolved.type)],
            t_capture=t_capture,
            image_mean=image_mean,
            image_std=image_std,
        )
        manager = EncoderCudaGraphManager(encoder, token_budgets, max_batch_size, resolved, encoder.dtype)
        manager.capture()
        return cls(encoder, manager)

    @torch.inference_mode()
    def submit(
        self,
        modality: Modality,
        requests: Sequence[EncodeRequest],
        stop: Stop | None = None,
        *,
        eager: bool = False,
    ) -> PendingBatch:
        """Starts a batch. On CUDA it returns once everything is enqueued, on a CPU when the batch is done.

        Args:
            eager: run without graphs.
            stop: asked before each block of what does not run as a CUDA graph, by the calling thread: so be it cheap.

        Raises:
            Stopped: `stop` gave True. The batch has no results, and the runner is ready for the next one.
        """
        faults = [_check(modality, r) for r in requests]
        good = [i for i, fault in enumerate(faults) if fault is None]
        outputs: list[ItemOutput | Exception] = [fault or RuntimeError("not run") for fault in faults]
        started = time.perf_counter()
        if not self._cuda:
            return self._submit(modality, requests, good, outputs, None, started, stop, eager)
        with torch.cuda.stream(self._compute):
            span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            return self._submit(modality, requests, good, outputs, span, started, stop, eager)

    def _submit(
        self,
        modality: Modality,
        requests: Sequence[EncodeRequest],
        good: list[int],
        outputs: list[ItemOutput | Exception],
        span: tuple[torch.cuda.Event, torch.cuda.Event] | None,
        started: float,
        stop: Stop | None,
        eager: bool,
    ) -> PendingBatch:
        rows: list[torch.Tensor | None] = [None] * len(requests)
        norms = torch.zeros(0)
        if good:
            frames = self._to_device([requests[i].frames for i in good])
            if span:
                span[0].record(self._compute)
            results = self.manager.execute_items(
                {
                    "pixel_values_videos" if modality == "video" else "pixel_values": frames,
                    f"{modality}_grid_thw": [frames_grid(requests[i].frames.shape) for i in good],
                },
                [self.main_width if requests[i].main_only else self.width for i in good],
                stop,
                eager=eager,
            )
            for i, result in zip(good, results, strict=True):
                outputs[i] = result
                rows[i] = result.embeddings
                if requests[i].pooling == "mean":
                    rows[i] = result.embeddings.float().mean(0, keepdim=True).to(result.embeddings.dtype)
            # A norm is NaN if any of its values is; float32 holds the norm of any other.
            norms = torch.stack(torch._foreach_norm([row for row in rows if row is not None], 2, torch.float32))
        if span is None:
            return PendingBatch(outputs, rows, norms, None, None, time.perf_counter() - started)
        if not good:
            span[0].record(self._compute)
        span[1].record(self._compute)
        done = torch.cuda.Event(blocking=True)
        self._copy_out.wait_stream(self._compute)
        with torch.cuda.stream(self._copy_out):
            if good:
                on_host = self._to_host([*(row for row in rows if row is not None), norms])
                for i, row in zip(good, on_host, strict=False):
                    rows[i] = row
                norms = on_host[-1]
            done.record(self._copy_out)
        return PendingBatch(outputs, rows, norms, span, done, 0.0)

    def _to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in pinned memory, on the current stream; neighbours in memory go in one copy."""
        copies: list[torch.Tensor] = []
        for run in adjacent_runs([(t.untyped_storage().data_ptr(), t.data_ptr(), t.nbytes) for t in tensors]):
            source = tensors[run[0]]
            whole = source.as_strided((sum(tensors[i].numel() for i in run),), (1,))
            host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            host.copy_(whole, non_blocking=True)
            source.record_stream(self._copy_out)
            parts = host.split([tensors[i].numel() for i in run])
            copies += [part.view(tensors[i].shape) for i, part in zip(run, parts, strict=True)]
        return copies

    def _to_device(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        if not self._cuda:
            return [torch.from_numpy(np.array(a)) for a in arrays]
        staging = torch.empty(sum(a.nbytes for a in arrays), dtype=torch.uint8, pin_memory=True)
        host, offset = staging.numpy(), 0
        for array in arrays:
            host[offset : offset + array.nbytes].reshape(array.shape)[...] = array
            offset += array.nbytes
        with torch.cuda.stream(self._upload):
            flat = staging.to(self.encoder.device, non_blocking=True)
        self._compute.wait_stream(self._upload)
        flat.record_stream(self._compute)
        frames, offset = [], 0
        for array in arrays:
            frames.append(flat[offset : offset + array.nbytes].view(array.shape))
            offset += array.nbytes
        return frames

    def stats(self) -> dict[str, Any]:
        """Counters and what is captured; see `EncoderCudaGraphManager.stats`."""
        return self.manager.stats()


def adjacent_runs(places: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Indices of `places` (allocation, address, bytes), in order, cut where one does not begin where the last ended."""
    runs: list[list[int]] = []
    for i, (allocation, address, _) in enumerate(places):
        before = places[i - 1] if i else None
        if before is not None and (allocation, address) == (before[0], before[1] + before[2]):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def resolve_device(device: str) -> str:
    """ "auto" becomes "cuda" where there is a GPU, else "cpu"."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def resolve_dtype(dtype: str, device_type: str) -> str:
    """ "auto" becomes bfloat16 on a GPU and float32 on a CPU."""
    return ("bfloat16" if device_type == "cuda" else "float32") if dtype == "auto" else dtype


def _check(modality: Modality, request: EncodeRequest) -> Exception | None:
    frames = request.frames
    try:
        check_frames(frames.shape, str(frames.dtype))
    except ValueError as error:
        return error
    if modality == "image" and frames.shape[0] != 1:
        return ValueError(f"an image has one frame, got {frames.shape[0]}")
    return None


def _to_numpy(rows: torch.Tensor) -> np.ndarray:
    return rows.view(torch.uint16).numpy() if rows.dtype == torch.bfloat16 else rows.numpy()
