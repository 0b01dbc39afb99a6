"""Measures the vision tower: `transformers`, our graphs at the exact shape, and what a replica serves, side by side.

python -m benchmarks.encoder [--model full|tiny] [--quick] [--compile SECONDS] [--out DIR]

Writes DIR/encoder-<model>-<device>.json and the Markdown made from it, and prints the Markdown. A part that fails is
listed in both and leaves the others alone.

GPU times are CUDA event pairs around each repetition: median, 10th and 90th percentile. Graphs and what is served on
the device take turns, column by column, all timed alike: back to back, with the host's enqueueing hidden. The rows of
`transformers` are timed apart, back to back: where launching takes longer than computing, the host shows. The weights
of the full tower are many times the L2 cache, so each replay reads them from memory; served rows rotate over several
inputs as well. A row whose package is not installed says so.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.full_checkpoint import VISION
from encoder.attention import Attention, FlashAttention4, FlashVarlen, SegmentSdpa, has_triton, missing_package
from encoder.budgets import default_token_budgets
from encoder.config import VisionConfig
from encoder.defs import EncodeRequest, Modality, Stop
from encoder.frames import frames_grid
from encoder.graph import CapturedGraph, CpuStaticGraph, CudaGraph
from encoder.manager import EncoderCudaGraphManager
from encoder.ops import TorchOps
from encoder.preprocess import patchify
from encoder.qwen3_vl import Qwen3VLVisionEncoder
from encoder.runner import EncoderRunner

TOWERS: dict[str, dict[str, Any]] = {
    "full": VISION,
    "tiny": {
        "depth": 4,
        "hidden_size": 144,
        "num_heads": 2,
        "intermediate_size": 272,
        "out_hidden_size": 96,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0, 1, 2],
    },
}
MAX_BATCH_SIZE = 16
ROTATED = 4
ROUNDS = 6  # in which the rows of a column take turns
SLOTS = 64  # segments that the graph of the "as vLLM does it" row has room for
COMPILED = "transformers compiled, best mode"
PACKED = "flash_torch_varlen"
EAGER = {"transformers eager, sdpa": "sdpa", "transformers eager, packed attention": PACKED}
SERVED = "ours as served"
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Column:
    """`items` inputs of uint8 frames of `shape` [T, 3, H, W] in one batch."""

    name: str
    modality: Modality
    items: int
    shape: tuple[int, int, int, int]

    @property
    def grids(self) -> list[Grid]:
        return [frames_grid(self.shape)] * self.items

    @property
    def patches(self) -> int:
        return sum(t * h * w for t, h, w in self.grids)

    @property
    def tokens(self) -> int:
        return self.patches // 4

    @property
    def frames_per_segment(self) -> tuple[int, int]:
        """Segments in the batch, and the patches of each."""
        t, h, w = self.grids[0]
        return t * self.items, h * w

    def frames(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 256, self.shape, dtype=np.uint8) for _ in range(self.items)]


def columns_of(model: str) -> list[Column]:
    small, middle, large, long = (224, 448, 1024, 32) if model == "full" else (64, 96, 192, 16)
    return [
        Column(f"1x{small}^2", "image", 1, (1, 3, small, small)),
        Column(f"1x{middle}^2", "image", 1, (1, 3, middle, middle)),
        Column(f"1x{large}^2", "image", 1, (1, 3, large, large)),
        Column(f"16x{small}^2", "image", 16, (1, 3, small, small)),
        Column(f"video t=8 {middle}^2", "video", 1, (16, 3, middle, middle)),
        Column(f"video t={long} {middle}^2", "video", 1, (2 * long, 3, middle, middle)),
    ]


# --- time ---


@dataclass(frozen=True)
class Clock:
    """How long each cell is measured, and on what."""

    device: torch.device
    seconds: float

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def repeats(self, run: Callable[[], object], warm: int) -> int:
        """Repetitions that fill the time, after `warm` calls."""
        for _ in range(warm):
            run()
        self.synchronize()
        return self._fitting(self._once(run)[1])

    def busy(self, run: Callable[[], object], warm: int = 3) -> dict[str, float]:
        """Milliseconds of device time, repetitions back to back; a host that enqueues more slowly shows."""
        return summary(self.turn(run, self.repeats(run, warm)))

    def wall(self, run: Callable[[], object], warm: int = 3) -> dict[str, float]:
        """Milliseconds from an idle device until it is idle again."""
        return summary([self._once(run)[1] * 1e3 for _ in range(self.repeats(run, warm))])

    def turn(
        self, run: Callable[[], object], calls: int, ahead: Callable[[], object] | None = None, wait: float = 0.0
    ) -> list[float]:
        """Milliseconds of device time of `calls` calls back to back, after an untimed one; on a CPU wall time.

        Args:
            ahead: the untimed call; None: `run`.
            wait: seconds that the device waits first, while the host enqueues.
        """
        if not self.cuda:
            (ahead or run)()
            return [self._once(run)[1] * 1e3 for _ in range(calls)]
        # 2 GHz is above the clock of any GPU, so the wait is no shorter.
        torch.cuda._sleep(int(wait * 2e9))
        (ahead or run)()
        marks = []
        for _ in range(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) for start, end in marks]

    def plan(self, run: Callable[[], object], ahead: Callable[[], object]) -> tuple[int, float]:
        """Calls of a turn, a share of the repetitions that fill the time, and the wait that hides their enqueueing."""
        ahead()
        self.synchronize()
        before, _ = self._once(ahead)
        host, whole = self._once(run)
        calls = -(-self._fitting(whole) // ROUNDS)
        host = max(host, before)
        # The host may take twice as long as now. The device needs a lead of the untimed call, and for each timed one of
        # what it does not work on meanwhile.
        return calls, min(1e-3 + 2 * host + calls * max(2 * host - (whole - host), 0), 0.2)

    def _once(self, run: Callable[[], object]) -> tuple[float, float]:
        """Seconds until the host is done, and until an idle device is idle again."""
        started = time.perf_counter()
        run()
        host = time.perf_counter() - started
        self.synchronize()
        return host, time.perf_counter() - started

    def _fitting(self, seconds: float) -> int:
        return int(min(max(self.seconds / seconds, 7), 200))


@dataclass(frozen=True)
class Timed:
    """What a row runs in one column. ahead: the untimed call of a turn; cell: what is reported beside the times."""

    name: str
    run: Callable[[], object]
    ahead: Callable[[], object]
    cell: dict[str, Any]


def turns(rows: int, rounds: int) -> list[int]:
    """The row of each turn: in every round each row once, in each round starting one further on."""
    return [(first + i) % rows for first in range(rounds) for i in range(rows)]


def interleave(
    rows: Sequence[Timed], clock: Clock, guard: Callable[[str], contextlib.AbstractContextManager[None]]
) -> dict[str, list[float]]:
    """Milliseconds of every repetition by row, all rows in turns and with the same wait; a row that fails drops out."""
    times: dict[str, list[float]] = {}
    calls, wait = {}, 0.0
    for row in rows:
        with guard(row.name):
            calls[row.name], needed = clock.plan(row.run, row.ahead)
            wait, times[row.name] = max(wait, needed), []
    for index in turns(len(rows), ROUNDS):
        row = rows[index]
        found = times.pop(row.name, None)
        if found is not None:
            with guard(row.name):
                times[row.name] = found + clock.turn(row.run, calls[row.name], row.ahead, wait)
    return times


def summary(values: Sequence[float]) -> dict[str, float]:
    p10, median, p90 = (float(v) for v in np.percentile(values, [10, 50, 90]))
    return {"ms": median, "p10": p10, "p90": p90, "n": len(values)}


# --- the reference ---


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers`' attention interface over PyTorch's own packed attention. q, k, v: [1, heads, rows, head_dim]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling)
        assert isinstance(out, torch.Tensor)
    else:
        segments = SegmentSdpa()
        plan = segments.plan(cu_seq_lens_q, max_length_q, len(q))
        out = segments(torch.stack((q, k, v), 1), plan).view(q.shape)
    return out[None], None


def build_reference(vision_config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """`transformers`' tower of `vision_config` with seeded random weights that `dtype` can hold."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    torch.manual_seed(0)
    with device:
        tower = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**vision_config), attn_implementation="sdpa")
        for parameter in tower.parameters():
            if parameter.ndim == 1:
                # Biases start at 0 and norms at 1, which would hide an error in either.
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return cast_reference(tower.eval().requires_grad_(False), dtype)


def cast_reference(tower: Any, dtype: torch.dtype) -> Any:
    frequencies = tower.rotary_pos_emb.inv_freq.float()
    tower = tower.to(dtype)
    # The rotary angles are computed in float32 whatever the weights are.
    tower.rotary_pos_emb.inv_freq = frequencies
    return tower


def reference_levels(tower: Any, patches: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
    """[main, deepstack 0, ...], each [tokens, out_hidden_size]."""
    output = tower(patches.to(tower.dtype), grid_thw=grids)
    return [output.pooler_output, *output.deepstack_features]


def reference_metadata(grids: torch.Tensor, side: int) -> dict[str, Any]:
    """What the reference's forward would compute from the grids, to pass in."""
    from transformers import vision_utils

    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grids, num_grid_per_side=side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    return {
        "interp_indices": indices,
        "interp_weights": weights,
        "position_ids": vision_utils.get_vision_position_ids(grids, 2),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
        "max_seqlen": int((grids[:, 1] * grids[:, 2]).max()),
    }


def level_errors(levels: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[float]:
    """Relative norm of the difference, a value a level. NaN anywhere gives NaN."""
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(levels, expected, strict=True)]


# --- our tower ---


def build_encoder(
    vision_config: dict[str, Any],
    state: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    t_capture: int = 8,
) -> Qwen3VLVisionEncoder:
    """Our tower over the weights in `state`, which it shares where they are of that device, dtype and layout."""
    with torch.device("meta"):
        encoder = Qwen3VLVisionEncoder(VisionConfig.from_dict(vision_config), t_capture=t_capture)
    encoder.load_state_dict(state, assign=True)
    return encoder.finalize(device, dtype)


class CudnnDense:
    """cuDNN's dense attention over segments of one length, as an exact-shape graph may have."""

    name = "cudnn-dense"
    capturable = True

    def plan(self, cu_seqlens: torch.Tensor, max_seqlen: int, rows: int) -> int:
        if rows % max_seqlen:
            raise ValueError(f"{rows} rows are no whole number of segments of {max_seqlen}")
        return max_seqlen

    def __call__(self, qkv: torch.Tensor, plan: int) -> torch.Tensor:
        rows, _, heads, dim = qkv.shape
        q, k, v = qkv.view(rows // plan, plan, 3, heads, dim).permute(2, 0, 3, 1, 4)
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False, 0.0, False, False, scale=dim**-0.5
        )[0]
        return out.transpose(1, 2).reshape(rows, heads * dim)


class TorchNormsAndGelu(TorchOps):
    """PyTorch's own norms and GELU, and the rotary kernel of `ops`."""

    def __init__(self, ops: TorchOps) -> None:
        self._ops = ops

    def rotary_(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._ops.rotary_(qkv, cos, sin)


@dataclass
class BatchGraph:
    """A graph of one batch. `output` is [budget, width]; its leading rows are the batch's."""

    graph: CapturedGraph
    output: torch.Tensor
    keep: tuple[Any, ...]

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True)
class GraphRow:
    """A row of graphs, each of its column's batch. budget: from the tokens; None: the exact shape."""

    name: str
    attention: Attention
    ops: TorchOps
    budget: Callable[[int], int] | None = None
    slots: Callable[[Column], int] | None = None


@dataclass(frozen=True)
class Served:
    """Rows of what a replica does with the batches of `columns`. pieces: each item is cut into so many of equal length
    in time."""

    name: str
    runner: EncoderRunner
    columns: Sequence[Column]
    pieces: int = 1

    def batches(self, column: Column) -> list[list[np.ndarray]]:
        return [
            [piece for frames in column.frames(seed) for piece in np.split(frames, self.pieces)]
            for seed in range(ROTATED)
        ]


def power_of_two(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def manager_slots(column: Column) -> int:
    """Segments that a manager's graph of the column's modality has room for."""
    return MAX_BATCH_SIZE * (8 if column.modality == "video" else 1)


def capture_batch(
    encoder: Qwen3VLVisionEncoder,
    column: Column,
    frames: Sequence[torch.Tensor],
    attention: Attention,
    ops: TorchOps,
    budget: int | None = None,
    slots: int | None = None,
) -> BatchGraph:
    """Captures a graph that already holds the batch of `column`.

    Args:
        budget: tokens that the graph has room for, any layout of them; None: the batch's own shape, no padding and the
            tightest longest segment.
        slots: segments that it has room for, a multiple of the items' temporal patches; None: the batch's.
    """
    served, encoder.attention, encoder.ops = (encoder.attention, encoder.ops), attention, ops
    segments, length = column.frames_per_segment
    t_capture, encoder.t_capture = encoder.t_capture, column.grids[0][0]
    try:
        batch, rows = batch_of(column, frames), (budget or column.tokens) * 4
        pixels = torch.zeros(rows, 1536, dtype=encoder.dtype, device=encoder.device)
        encoder.write_encoder_cudagraph_input(batch, pixels)
        items = (slots or segments) // encoder.t_capture
        filled = encoder.prepare_encoder_cudagraph_replay_buffers(batch, rows // 4, items).buffers
        buffers = {}
        for name, value in filled.items():
            if value is not None:
                buffers[name] = value.to(encoder.device)
                if value.is_floating_point():
                    buffers[name] = torch.zeros(rows, *value.shape[1:], dtype=value.dtype, device=encoder.device)
                    buffers[name][: len(value)] = value
        buffers["max_seqlen"] = torch.tensor(rows if budget else length, dtype=torch.int32)
        output = torch.empty(rows // 4, encoder.config.width, dtype=encoder.dtype, device=encoder.device)

        def run(stop: Stop | None = None) -> None:
            encoder.encoder_cudagraph_forward(pixels, buffers, output, stop)

        graph: CapturedGraph
        if encoder.device.type == "cuda":
            graph = CudaGraph(run, torch.cuda.graph_pool_handle(), torch.cuda.Stream(encoder.device))
        else:
            # The stand-in runs the callable anew, so it keeps what this graph was made with.
            graph = CpuStaticGraph(_bound(encoder, attention, ops, run))
        return BatchGraph(graph, output, (pixels, buffers))
    finally:
        encoder.attention, encoder.ops = served
        encoder.t_capture = t_capture


def _bound(
    encoder: Qwen3VLVisionEncoder, attention: Attention, ops: TorchOps, run: Callable[[Stop | None], None]
) -> Callable[[Stop | None], None]:
    def bound(stop: Stop | None) -> None:
        served, encoder.attention, encoder.ops = (encoder.attention, encoder.ops), attention, ops
        try:
            run(stop)
        finally:
            encoder.attention, encoder.ops = served

    return bound


def batch_of(column: Column, frames: Sequence[torch.Tensor]) -> dict[str, Any]:
    key = "pixel_values_videos" if column.modality == "video" else "pixel_values"
    grids = [frames_grid(tuple(f.shape)) for f in frames]
    return {key: list(frames), f"{column.modality}_grid_thw": grids}


def split_levels(rows: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(rows.chunk(count, dim=1))


def make_manager(
    model: str, encoder: Qwen3VLVisionEncoder, modalities: Sequence[Modality] = ("image", "video")
) -> EncoderCudaGraphManager:
    budgets = default_token_budgets(encoder.device.type)
    return EncoderCudaGraphManager(
        encoder, dict.fromkeys(modalities, budgets), MAX_BATCH_SIZE, encoder.device, encoder.dtype
    )


# --- the floor ---


def flops_of(config: VisionConfig, column: Column) -> float:
    """Multiplications and additions of one forward."""
    patches, hidden = column.patches, config.hidden_size
    segments, length = column.frames_per_segment
    layer = 2 * patches * (4 * hidden * hidden + 2 * hidden * config.intermediate_size)
    layer += 4 * hidden * segments * length**2
    levels, merged = 1 + len(config.deepstack_visual_indexes), 4 * hidden
    mergers = levels * 2 * column.tokens * (merged * merged + merged * config.out_hidden_size)
    return float(config.depth * layer + mergers + 2 * patches * 1536 * hidden)


def weight_bytes(encoder: Qwen3VLVisionEncoder) -> int:
    """Bytes that every forward reads: all weights but the position table."""
    return sum(p.numel() * p.element_size() for n, p in encoder.named_parameters() if not n.startswith("pos_embed"))


def measure_ceilings(clock: Clock, dtype: torch.dtype) -> dict[str, Any]:
    """The rate of a square matrix product, and of a copy (bytes read and written), of random values."""
    side, size = (8192, 2**30) if clock.cuda else (512, 2**22)
    pairs = [[torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2)] for _ in range(3)]
    out = torch.empty_like(pairs[0][0])
    turn = itertools.cycle(pairs)
    product = clock.busy(lambda: torch.mm(*next(turn), out=out), warm=6)
    source = torch.randn(size, device=clock.device)
    target = torch.empty_like(source)
    copied = clock.busy(lambda: target.copy_(source))
    return {
        "matmul_side": side,
        "matmul": product,
        "matmul_tflops": 2 * side**3 / product["ms"] / 1e9,
        "copy": copied,
        "copy_gbs": 2 * 4 * size / copied["ms"] / 1e6,
    }


# --- the run ---


class Report:
    """What was measured so far; written after every part, so that a crash keeps the rest."""

    def __init__(self, path: Path, head: dict[str, Any], columns: Sequence[Column]) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            **head,
            "columns": [c.name for c in columns],
            "rows": {},
            "served": {},
            "errors": {},
            "absent": {},
            "failures": [],
            "seconds": {},
        }

    def place(self, *rows: str) -> None:
        """Gives the rows their places in the table, next in order."""
        for row in rows:
            self.data["rows"].setdefault(row, {})

    def cell(self, row: str, column: Column, timing: dict[str, Any]) -> None:
        self.place(row)
        self.data["rows"][row][column.name] = timing

    def absent(self, row: str, reason: str) -> None:
        self.place(row)
        self.data["absent"][row] = reason

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Lists a failure and goes on."""
        try:
            yield
        except Exception as error:
            trace = traceback.format_exc()
            self.data["failures"].append({"part": name, "error": repr(error)[:500], "trace": trace[-3000:]})
            print(f"FAILED {name}: {error!r}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """As `guard`; takes the time, frees memory and writes the report."""
        started = time.perf_counter()
        try:
            with self.guard(name):
                yield
        finally:
            self.data["seconds"][name] = round(time.perf_counter() - started, 2)
            print(f"[{self.data['seconds'][name]:7.2f} s] {name}", file=sys.stderr, flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")


class Benchmark:
    def __init__(self, model: str, clock: Clock, report: Report, columns: Sequence[Column]) -> None:
        self.model, self.clock, self.report, self.columns = model, clock, report, columns
        self.device = clock.device
        self.dtype = torch.bfloat16 if clock.cuda else torch.float32
        self.theirs = build_reference(TOWERS[model], self.device, self.dtype)
        self.ours = build_encoder(TOWERS[model], self.theirs.state_dict(), self.device, self.dtype)
        self.levels = 1 + len(self.ours.config.deepstack_visual_indexes)
        self.inputs = {c: [torch.from_numpy(f).to(self.device) for f in c.frames()] for c in columns}
        self.grids = {c: torch.tensor(c.grids, device=self.device) for c in columns}
        self.expected: dict[Column, list[torch.Tensor]] = {}

    def patches(self, column: Column) -> torch.Tensor:
        half = torch.full((3,), 127.5, device=self.device)
        return torch.cat([patchify(frames, half, half) for frames in self.inputs[column]])

    def floor(self) -> None:
        found = self.report.data["ceilings"] = measure_ceilings(self.clock, self.dtype)
        read = weight_bytes(self.ours) / found["copy_gbs"] / 1e6
        for column in self.columns:
            computed = flops_of(self.ours.config, column) / found["matmul_tflops"] / 1e9
            self.report.cell("floor", column, {"ms": max(computed, read), "flops_ms": computed, "weights_ms": read})

    def reference_values(self) -> None:
        exact = cast_reference(copy.deepcopy(self.theirs), torch.float32)
        for column in self.columns:
            patches, grids = self.patches(column), self.grids[column]
            self.expected[column] = reference_levels(exact, patches, grids)
            errors = self.report.data["errors"].setdefault(column.name, {})
            for name, implementation in (("transformers, sdpa", "sdpa"), ("transformers, packed attention", PACKED)):
                self.theirs.config._attn_implementation = implementation
                errors[name] = level_errors(reference_levels(self.theirs, patches, grids), self.expected[column])
        self.theirs.config._attn_implementation = "sdpa"

    def reference_eager(self) -> None:
        for name, implementation in EAGER.items():
            self.theirs.config._attn_implementation = implementation
            for column in self.columns:
                patches, grids = self.patches(column).to(self.dtype), self.grids[column]
                timing = self.clock.busy(lambda p=patches, g=grids: self.theirs(p, grid_thw=g))  # type: ignore[misc]
                self.report.cell(name, column, timing)
        self.theirs.config._attn_implementation = "sdpa"

    def reference_compiled(self, seconds: float) -> None:
        """In a process of its own, which is ended when the time is used up; the cells that it finished count."""
        if not seconds:
            self.report.absent(COMPILED, "measured only with --compile")
            return
        with tempfile.TemporaryDirectory() as folder:
            lines, log = Path(folder) / "cells", Path(folder) / "log"
            command = [sys.executable, "-m", "benchmarks.encoder", "--model", self.model]
            command += ["--compiled-on", str(self.device), "--seconds-a-cell", str(self.clock.seconds)]
            with lines.open("w") as out, log.open("w") as errors:
                try:
                    subprocess.run(command, stdout=out, stderr=errors, timeout=seconds, check=True)
                    reason = "failed"
                except subprocess.TimeoutExpired:
                    reason = f"not done within {seconds:g} s"
                except subprocess.CalledProcessError as error:
                    reason = f"exit code {error.returncode}: {' '.join(log.read_text()[-600:].split())}"
            cells = self.report.data["rows"][COMPILED]
            for line in lines.read_text().splitlines():
                cell = json.loads(line)
                if "error" in cell:
                    self.report.data["failures"].append({"part": f"{COMPILED}, {cell['column']}", **cell})
                elif cell["timing"]["ms"] < cells.get(cell["column"], {"ms": float("inf")})["ms"]:
                    cells[cell["column"]] = {**cell["timing"], "mode": cell["mode"]}
            if len(cells) < len(self.columns):
                self.report.absent(COMPILED, reason)
            else:
                del self.report.data["absent"][COMPILED]

    def capture(self, row: GraphRow, column: Column) -> list[Timed]:
        """The row's graph of the column's batch, checked; none if it failed."""
        with self.report.part(f"{row.name}, {column.name}"):
            room = row.budget(column.tokens) if row.budget else None
            segments = row.slots(column) if row.slots else None
            graph = capture_batch(self.ours, column, self.inputs[column], row.attention, row.ops, room, segments)
            graph.output.fill_(float("nan"))
            graph.replay()
            self.clock.synchronize()
            errors = self._errors(column, graph.output[: column.tokens])
            cell = {"errors": errors, "budget": room or column.tokens}
            return [Timed(row.name, graph.replay, graph.replay, cell)]
        return []

    def _errors(self, column: Column, rows: torch.Tensor) -> list[float] | None:
        if column not in self.expected:
            return None
        return level_errors(split_levels(rows, self.levels), self.expected[column])

    def check_served(self, served: Served, column: Column, batches: Sequence[list[np.ndarray]]) -> list[Timed]:
        """What the manager does with the column's batches on the device, and its replay alone if it is one; none if
        that failed."""
        with self.report.part(f"{served.name}, {column.name}"):
            manager = served.runner.manager
            placed = [batch_of(column, [torch.from_numpy(f).to(self.device) for f in batch]) for batch in batches]
            before = manager.stats()
            outputs = manager.execute_items(placed[0])
            after = manager.stats()
            replays = after["replays"] - before["replays"]
            used = after["used_tokens"] - before["used_tokens"]
            turn = itertools.cycle(placed)

            def run() -> None:
                manager.execute_items(next(turn))

            details = {
                "budgets": sorted({o.budget for o in outputs if o.budget is not None}),
                "replays": replays,
                "reasons": sorted({o.reason for o in outputs if o.reason is not None}),
                "padding": (after["budget_tokens"] - before["budget_tokens"]) / used if used else None,
                "errors": self._errors(column, torch.cat([o.embeddings for o in outputs])),
                "from_idle": self.clock.wall(run),
            }
            self.report.data["served"].setdefault(served.name, {})[column.name] = details
            timed = [Timed(f"{served.name}: GPU time", run, run, {})]
            if replays == 1:
                graph = manager.budget_graphs[column.modality][details["budgets"][0]].graph
                # The untimed call leaves the batch's metadata in the buffers.
                timed.append(Timed(f"{served.name}: its replay alone", graph.replay, run, {}))
            return timed
        return []

    def measure(self, column: Column, rows: Sequence[GraphRow], served: Sequence[Served]) -> None:
        """A column: all its graphs are captured and timed in turns with what is served, and freed."""
        timed = [made for row in rows for made in self.capture(row, column)]
        checked = []
        for each in served:
            batches = each.batches(column)
            made = self.check_served(each, column, batches)
            timed += made
            if made:
                checked.append((each, batches))
        with self.report.part(f"timing, {column.name}"):
            cells = {row.name: row.cell for row in timed}
            times = interleave(timed, self.clock, lambda row: self.report.guard(f"{row}, {column.name}"))
            for row, found in times.items():
                self.report.cell(row, column, {**summary(found), **cells[row]})
            # The part then frees the graphs.
            timed.clear()
        for each, batches in checked:
            with self.report.part(f"{each.name}: wall, host to host, {column.name}"):
                self._served_from_host(each, column, batches)

    def _served_from_host(self, served: Served, column: Column, batches: Sequence[list[np.ndarray]]) -> None:
        row, runner = served.name, served.runner
        requests = itertools.cycle([[EncodeRequest(frames) for frames in batch] for batch in batches])
        submitted: list[float] = []

        def one() -> None:
            started = time.perf_counter()
            pending = runner.submit(column.modality, next(requests))
            submitted.append((time.perf_counter() - started) * 1e3)
            for output in pending.result():
                if isinstance(output, Exception):
                    raise output

        self.report.cell(f"{row}: wall, host to host", column, self.clock.wall(one))
        details = self.report.data["served"][row][column.name]
        details["submit"] = summary(submitted[4:])

        flight: deque[Any] = deque()
        ends: list[float] = []
        for _ in range(self.clock.repeats(one, 1) + 2 * runner.max_in_flight):
            flight.append(runner.submit(column.modality, next(requests)))
            if len(flight) == runner.max_in_flight:
                flight.popleft().result()
                ends.append(time.perf_counter())
        while flight:
            flight.popleft().result()
        steady = ends[runner.max_in_flight :]
        details["pipelined"] = summary([(b - a) * 1e3 for a, b in itertools.pairwise(steady)])
        details["in_flight"] = runner.max_in_flight

    def metadata(self, manager: EncoderCudaGraphManager) -> None:
        """Time to fill a graph's metadata buffers, with the position tables kept and dropped."""
        found = self.report.data["metadata_fill"] = {}
        for column in self.columns:
            t = column.grids[0][0]
            graphs = manager.budget_graphs[column.modality]
            budget = next((b for b in sorted(graphs) if b >= column.tokens), None)
            if budget is None or t > self.ours.get_encoder_cudagraph_max_item_seqs(column.modality):
                continue
            graph, batch = graphs[budget], batch_of(column, self.inputs[column])

            def fill(graph: Any = graph, batch: Any = batch, budget: int = budget) -> None:
                replay = self.ours.prepare_encoder_cudagraph_replay_buffers(batch, budget, MAX_BATCH_SIZE)
                for name, value in replay.buffers.items():
                    if value is not None:
                        target = graph.buffers[name]
                        (target[: len(value)] if value.ndim else target).copy_(value, non_blocking=True)

            def uncached(fill: Callable[[], None] = fill) -> None:
                self.ours._positions.clear()
                fill()

            found[column.name] = {"cached": self.clock.wall(fill), "uncached": self.clock.wall(uncached)}

    def graph_rows(self) -> list[GraphRow]:
        """The rows of graphs that are made for one batch, ours last, each in its place in the report."""
        rows: list[GraphRow] = []

        def add(row: GraphRow) -> None:
            self.report.place(row.name)
            rows.append(row)

        ours, own, device = self.ours.attention, self.ours.ops, self.device
        ops: TorchOps = TorchOps()
        flash: Attention = FlashVarlen() if self.clock.cuda else SegmentSdpa()
        add(GraphRow(f"plain graph, exact shape, {flash.name}", flash, ops))
        if has_triton(device):
            from encoder.kernels import TritonOps

            # Fused elementwise kernels around the library's linear layers.
            ops = TritonOps()
        exact = "fused graph, exact shape"
        if self.clock.cuda:
            add(GraphRow(f"{exact}, cudnn-dense", CudnnDense(), ops))
        else:
            self.report.absent(f"{exact}, cudnn-dense", "needs CUDA")
        four = f"{exact}, flash-attn-4"
        lacking = missing_package("flash_attn", "flash_attn.cute")
        if not self.clock.cuda or lacking:
            self.report.absent(
                four, f"the package flash-attn-4 (module {lacking}) is not installed" if lacking else "needs CUDA"
            )
        else:
            self.report.place(four)
            with self.report.part("load flash-attn-4"):
                add(GraphRow(four, FlashAttention4(self.ours.config.head_dim, self.dtype, device), ops))
        if has_triton(device):
            from encoder.kernels import TritonVarlen

            if ours.name != TritonVarlen.name:
                add(GraphRow(f"{exact}, {TritonVarlen.name}", TritonVarlen(), ops))
        else:
            self.report.absent(f"{exact}, triton-varlen", "needs Triton and CUDA")
        add(GraphRow(f"{exact}, {flash.name}", flash, ops))
        add(GraphRow(f"the same in a power-of-two budget, {flash.name}", flash, ops, power_of_two, manager_slots))
        add(
            GraphRow(
                f"as vLLM does it: {flash.name}, torch norms and GELU, power-of-two budget, {SLOTS} slots",
                flash,
                TorchNormsAndGelu(ops),
                power_of_two,
                lambda column: SLOTS,
            )
        )
        if own.linears != ops.linears:
            add(GraphRow(f"{exact}, {ours.name}", ours, ops))
        add(GraphRow(f"ours, exact shape, {ours.name}, {own.linears}", ours, own))
        add(
            GraphRow(
                f"ours in a power-of-two budget, {ours.name}, {own.linears}", ours, own, power_of_two, manager_slots
            )
        )
        return rows

    def managers(self) -> list[Served]:
        """The served rows, each in its place in the report, of managers that are captured."""
        served: list[Served] = []
        short = [c for c in self.columns if c.grids[0][0] <= self.ours.t_capture]
        pieces = {c: c.grids[0][0] // self.ours.t_capture for c in self.columns if c not in short}
        cut = {c: f"{SERVED}, {count} videos of t={self.ours.t_capture}" for c, count in pieces.items()}
        for row in (SERVED, *cut.values()):
            self.report.place(f"{row}: GPU time", f"{row}: its replay alone", f"{row}: wall, host to host")
        with self.report.part("capture"):
            manager = make_manager(self.model, self.ours)
            manager.capture()
            self.report.data["manager"] = manager.stats()
            runner = EncoderRunner(self.ours, manager)
            served.append(Served(SERVED, runner, short))
            served += [Served(row, runner, [column], pieces[column]) for column, row in cut.items()]
        for column in pieces:
            t = column.grids[0][0]
            with self.report.part(f"capture, t_capture {t}"):
                state = self.theirs.state_dict()
                encoder = build_encoder(TOWERS[self.model], state, self.device, self.dtype, t_capture=t)
                manager = make_manager(self.model, encoder, ("video",))
                manager.capture()
                # The same row as the others': the column's name tells t.
                served.append(Served(SERVED, EncoderRunner(encoder, manager), [column]))
        return served

    def run(self, quick: bool, compile_seconds: float) -> None:
        part = self.report.part
        self.report.place("floor", *EAGER)
        # Measured last, so that a run cut short keeps the rest.
        self.report.absent(COMPILED, "not measured")
        with part("floor"):
            self.floor()
        with part("reference values"):
            self.reference_values()
        with part("transformers eager"):
            self.reference_eager()
        self.report.data |= {"attention": self.ours.attention.name, "linears": self.ours.ops.linears}
        rows, served = self.graph_rows(), self.managers()
        for column in self.columns:
            self.measure(column, rows, [each for each in served if column in each.columns])
        managers = {each.runner.encoder: each.runner.manager for each in served}
        if self.ours in managers:
            with part("metadata fill"):
                self.metadata(managers[self.ours])
        for manager in managers.values():
            manager.clear()
        if not quick:
            with part("capture in fresh processes"):
                self.report.data["capture"] = capture_in_fresh_processes(self.model, self.device)
        with part(COMPILED):
            self.reference_compiled(compile_seconds)


# --- the compiled reference ---


def compiled_here(model: str, clock: Clock) -> None:
    """Prints a JSON line for every column and mode of the compiled reference, with packed attention and the metadata
    passed in. One compilation a mode serves all shapes; a column that neither mode could do so gets one of its own."""
    dtype = torch.bfloat16 if clock.cuda else torch.float32
    tower = build_reference(TOWERS[model], clock.device, dtype)
    tower.config._attn_implementation = PACKED
    done: set[str] = set()
    for mode, dynamic in (("reduce-overhead", True), ("default", True), ("reduce-overhead", False)):
        torch._dynamo.reset()
        compiled = torch.compile(tower, mode=mode, dynamic=dynamic)
        for column in columns_of(model):
            if not dynamic and column.name in done:
                continue
            cell: dict[str, Any] = {"column": column.name, "mode": mode}
            patches = torch.rand(column.patches, 1536, device=clock.device).mul_(2).sub_(1).to(dtype)
            grids = torch.tensor(column.grids, device=clock.device)
            metadata = reference_metadata(grids, tower.num_grid_per_side)
            try:
                cell["timing"] = clock.busy(
                    lambda p=patches, g=grids, c=compiled, m=metadata: c(p, grid_thw=g, **m),  # type: ignore[misc]
                    warm=5,
                )
                done.add(column.name)
            except Exception as error:
                cell |= {"error": repr(error)[:500], "trace": traceback.format_exc()[-3000:]}
            print(json.dumps(cell), flush=True)


# --- capture times ---


def capture_in_fresh_processes(model: str, device: torch.device) -> dict[str, Any]:
    """Capture of all budgets: with empty kernel caches, with filled ones, and again in the same process."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty kernel caches", "filled kernel caches"):
            command = [sys.executable, "-m", "benchmarks.encoder", "--model", model, "--capture-on", str(device)]
            done = subprocess.run(
                command,
                env={**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "XDG_CACHE_HOME": cache},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{name}: exit code {done.returncode}: {done.stderr[-1500:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def capture_here(model: str, device: torch.device) -> dict[str, Any]:
    """Times the first and the second manager of this process; random weights, no reference."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        encoder = Qwen3VLVisionEncoder(VisionConfig.from_dict(TOWERS[model]))
    encoder.finalize(device, dtype)

    def free() -> int:
        if device.type != "cuda":
            return 0
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    found: dict[str, Any] = {}
    for name in ("first", "second"):
        before = free()
        manager = make_manager(model, encoder)
        started = time.perf_counter()
        manager.capture()
        seconds = time.perf_counter() - started
        stats = manager.stats()
        after = free()
        manager.clear()
        found[name] = {
            "seconds": seconds,
            "graphs": stats["num_graphs"],
            "static_mib": stats["static_bytes"] / 2**20,
            "taken_mib": (before - after) / 2**20,
            "kept_after_clear_mib": (before - free()) / 2**20,
            "costs_ms": {m: {b: s * 1e3 for b, s in c.graph.items()} for m, c in manager.costs.items()},
            "eager_ms": {m: {n: s * 1e3 for n, s in c.eager} for m, c in manager.costs.items()},
        }
        del manager
    return found


# --- Markdown ---


def markdown(data: dict[str, Any]) -> str:
    """The report as Markdown, from the decoded JSON alone."""
    columns, rows = data["columns"], data["rows"]
    lines = [f"# Vision tower, `{data['model']}`, on {data['device']}", ""]
    lines += [f"- {name}: {value}" for name, value in data["versions"].items()]
    lines += [f"- date: {data['date']}", f"- command: `{data['command']}`", f"- weights and outputs: {data['dtype']}"]
    if "ceilings" in data:
        found = data["ceilings"]
        lines.append(
            f"- measured here: {found['matmul_tflops']:.4g} TFLOP/s ({found['matmul_side']}^3 product), "
            f"{found['copy_gbs']:.4g} GB/s (copy, read and written)"
        )
    lines += [
        "",
        "Milliseconds, median (10th to 90th percentile). Graphs and what is served on the device take turns, column by "
        "column, all timed alike: back to back, with the host's enqueueing hidden. `transformers` is timed apart, back "
        "to back: where launching takes longer than computing, the host shows.",
        "",
    ]
    absent = data["absent"]
    body = [
        [name, *(_time(cells.get(c)) or ("n/a" if name in absent else "") for c in columns)]
        for name, cells in rows.items()
    ]
    served, floor = rows.get(f"{SERVED}: GPU time", {}), rows.get("floor", {})
    body.append([f"{SERVED}: GPU time / floor", *(_ratio(served.get(c), floor.get(c)) for c in columns)])
    lines += _table(["", *columns], body)
    lines += ["", *(f"- n/a, {name}: {reason}" for name, reason in absent.items())]
    if any("flash-attn-2" in name for name in rows):
        lines += ["", "flash-attn-2 is PyTorch's own variable-length kernel (`aten._flash_attention_forward`)."]
    exact_rows = {n: cells for n, cells in rows.items() if ", exact shape, " in n and not n.startswith("plain")}
    for row, cells in data["served"].items():
        lines += ["", f"## {row}: the cells", ""]
        body = []
        for column, details in cells.items():
            gpu = rows.get(f"{row}: GPU time", {}).get(column)
            exact = [c[column]["ms"] for c in exact_rows.values() if column in c]
            same = exact_rows.get(f"ours, exact shape, {data['attention']}, {data['linears']}", {}).get(column)
            body.append(
                [
                    column,
                    ", ".join(map(str, details["budgets"])) or ", ".join(details["reasons"]),
                    str(details["replays"]),
                    _number(details["padding"]),
                    _ratio(gpu, rows.get("floor", {}).get(column)),
                    _ratio(gpu, same),
                    _ratio(gpu, {"ms": min(exact)} if exact else None),
                    _time(details["from_idle"]),
                    _time(details.get("submit")),
                    _time(details.get("pipelined")),
                    _host_share(details.get("pipelined"), gpu),
                ]
            )
        head = ["", "budget", "replays", "padding", "GPU / floor", "GPU / exact, same attention", "GPU / best exact"]
        head += ["wall, frames on the device", "submit()", f"a batch, {_in_flight(cells)} in flight", "beside the GPU"]
        lines += _table(head, body)
    lines += ["", "## Errors against `transformers` in float32: main, then each deepstack level", ""]
    body = []
    for column, errors in data["errors"].items():
        body += [[column, name, *(f"{e:.4g}" for e in values)] for name, values in errors.items()]
        body += [
            [column, name, *(f"{e:.4g}" for e in cells[column]["errors"])]
            for name, cells in {**rows, **data["served"]}.items()
            if cells.get(column, {}).get("errors")
        ]
    levels = max((len(row) for row in body), default=3) - 3
    lines += _table(["", "", "main", *(f"deepstack {i}" for i in range(levels))], body)
    if "capture" in data:
        lines += ["", f"## Capture of all image and video budgets, up to {MAX_BATCH_SIZE} items", ""]
        body = [
            [
                f"{process}, {manager} manager",
                f"{found['seconds']:.2f}",
                ", ".join(f"{n} {m}" for m, n in found["graphs"].items()),
                f"{found['static_mib']:.0f}",
                f"{found['taken_mib']:.0f}",
                f"{found['kept_after_clear_mib']:.0f}",
            ]
            for process, managers in data["capture"].items()
            for manager, found in managers.items()
        ]
        head = ["", "seconds", "graphs", "static buffers, MiB", "taken in all, MiB", "kept after clear(), MiB"]
        lines += _table(head, body)
    if data.get("metadata_fill"):
        lines += ["", "## Filling the metadata buffers, ms of wall time", ""]
        body = [[c, _time(f["cached"]), _time(f["uncached"])] for c, f in data["metadata_fill"].items()]
        lines += _table(["", "tables kept", "tables dropped"], body)
    lines += ["", "## Parts that failed", ""]
    lines += [f"- {f['part']}: `{f['error']}`" for f in data["failures"]] or ["None."]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _time(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    spread = f" ({_number(cell['p10'])} to {_number(cell['p90'])})" if "p10" in cell else ""
    return _number(cell["ms"]) + spread


def _ratio(cell: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
    return f"{cell['ms'] / base['ms']:.2f}" if cell and base else ""


def _host_share(pipelined: dict[str, Any] | None, gpu: dict[str, Any] | None) -> str:
    return f"{(pipelined['ms'] / gpu['ms'] - 1) * 100:+.0f}%" if pipelined and gpu else ""


def _in_flight(cells: dict[str, Any]) -> int:
    return next((d["in_flight"] for d in cells.values() if "in_flight" in d), 1)


def versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoder", description=__doc__)
    parser.add_argument("--model", choices=TOWERS, help="full: Qwen3-VL-8B's; default: full on CUDA, else tiny")
    parser.add_argument("--quick", action="store_true", help="short measurements, no capture in fresh processes")
    parser.add_argument(
        "--compile",
        type=float,
        default=0,
        metavar="SECONDS",
        help="measure transformers compiled too, at most for so long",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--capture-on", metavar="DEVICE", help="only time the capture there and print it as JSON")
    parser.add_argument("--compiled-on", metavar="DEVICE", help="only time the compiled reference there, likewise")
    parser.add_argument("--seconds-a-cell", type=float, default=0.6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device(options.capture_on or options.compiled_on or ("cuda:0" if cuda else "cpu"))
    model = options.model or ("full" if device.type == "cuda" else "tiny")
    torch.set_grad_enabled(False)
    if options.capture_on:
        print(json.dumps(capture_here(model, device)))
        return
    if options.compiled_on:
        compiled_here(model, Clock(device, options.seconds_a_cell))
        return
    # The float32 reference in true float32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    columns = columns_of(model)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"encoder-{model}-{device.type}.json"
    head = {
        "model": model,
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m benchmarks.encoder " + " ".join(sys.argv[1:]),
        "dtype": "bfloat16" if cuda else "float32",
        "versions": versions(device),
    }
    report = Report(path, head, columns)
    clock = Clock(device, 0.1 if options.quick else 0.6)
    with report.part("build"):
        benchmark = Benchmark(model, clock, report, columns)
        benchmark.run(options.quick, options.compile)
    text = markdown(json.loads(path.read_text()))
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
