"""Measures the vision tower: `transformers`, our graphs at the exact shape, and what a replica serves, side by side.

python -m benchmarks.encoder [--model full|tiny] [--quick] [--compile SECONDS] [--out DIR]

Writes DIR/encoder-<model>-<device>.json and the Markdown made from it, and prints the Markdown. A part that fails is
listed in both and leaves the others alone.

GPU times are CUDA event pairs around each repetition: median, 10th and 90th percentile. The weights of the full tower
are many times the L2 cache, so each replay reads them from memory; served rows rotate over several inputs as well.
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

from encoder.attention import Attention, FlashVarlen, SegmentSdpa, has_triton
from encoder.budgets import default_token_budgets
from encoder.defs import Modality
from encoder.graph import CapturedGraph, CpuStaticGraph, CudaGraph
from encoder.manager import EncoderCudaGraphManager
from encoder.ops import Ops, TorchOps
from encoder.preprocess import frames_grid, patchify
from encoder.qwen3_vl import Qwen3VLVisionEncoder, VisionConfig
from encoder.runner import EncodeRequest, EncoderRunner

TOWERS: dict[str, dict[str, Any]] = {
    # The vision_config of Qwen3-VL-8B.
    "full": {
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
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
PACKED = "flash_torch_varlen"
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
        started = time.perf_counter()
        run()
        self.synchronize()
        return int(min(max(self.seconds / (time.perf_counter() - started), 7), 200))

    def busy(self, run: Callable[[], object], warm: int = 3) -> dict[str, float]:
        """Milliseconds of device time, repetitions back to back."""
        if not self.cuda:
            return self.wall(run, warm)
        marks = []
        for _ in range(self.repeats(run, warm)):
            marks.append(self._between(run))
        self.synchronize()
        return summary([start.elapsed_time(end) for start, end in marks])

    def queued(self, run: Callable[[], object], warm: int = 3) -> dict[str, float]:
        """As `busy`, with the host's enqueueing hidden behind a wait on the device: what a full queue would see."""
        if not self.cuda:
            return self.wall(run, warm)
        count = self.repeats(run, warm)
        started = time.perf_counter()
        run()
        # 2 GHz is above the clock of any GPU, so the wait is at least twice the host's time.
        cycles = int(min(2 * (time.perf_counter() - started) + 1e-3, 0.1) * 2e9)
        values = []
        for _ in range(count):
            self.synchronize()
            torch.cuda._sleep(cycles)
            start, end = self._between(run)
            self.synchronize()
            values.append(start.elapsed_time(end))
        return summary(values)

    def wall(self, run: Callable[[], object], warm: int = 3) -> dict[str, float]:
        """Milliseconds from an idle device until it is idle again."""
        values = []
        for _ in range(self.repeats(run, warm)):
            started = time.perf_counter()
            run()
            self.synchronize()
            values.append((time.perf_counter() - started) * 1e3)
        return summary(values)

    def _between(self, run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end


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
    """Our tower over the weights in `state`, which it shares if they are of that device and dtype."""
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


@dataclass
class ExactGraph:
    """A graph of one batch's own shape: no padding, no empty segment, the tightest longest segment."""

    graph: CapturedGraph
    output: torch.Tensor
    keep: tuple[Any, ...]


def capture_exact(
    encoder: Qwen3VLVisionEncoder, column: Column, frames: Sequence[torch.Tensor], attention: Attention, ops: Ops
) -> ExactGraph:
    served, encoder.attention, encoder.ops = (encoder.attention, encoder.ops), attention, ops
    t_capture, encoder.t_capture = encoder.t_capture, column.grids[0][0]
    try:
        batch = batch_of(column, frames)
        pixels = torch.empty(column.patches, 1536, dtype=encoder.dtype, device=encoder.device)
        encoder.write_encoder_cudagraph_input(batch, pixels)
        filled = encoder.prepare_encoder_cudagraph_replay_buffers(batch, column.tokens, column.items).buffers
        buffers = {name: value.to(encoder.device) for name, value in filled.items() if value is not None}
        buffers["max_seqlen"] = torch.tensor(column.frames_per_segment[1], dtype=torch.int32)
        output = torch.empty(column.tokens, encoder.config.width, dtype=encoder.dtype, device=encoder.device)

        def run() -> None:
            encoder.encoder_cudagraph_forward(pixels, buffers, output)

        graph: CapturedGraph
        if encoder.device.type == "cuda":
            graph = CudaGraph(run, torch.cuda.graph_pool_handle(), torch.cuda.Stream(encoder.device))
        else:
            # The stand-in runs the callable anew, so it keeps what this graph was made with.
            graph = CpuStaticGraph(_bound(encoder, attention, ops, run))
        return ExactGraph(graph, output, (pixels, buffers))
    finally:
        encoder.attention, encoder.ops = served
        encoder.t_capture = t_capture


def _bound(
    encoder: Qwen3VLVisionEncoder, attention: Attention, ops: Ops, run: Callable[[], None]
) -> Callable[[], None]:
    def bound() -> None:
        served, encoder.attention, encoder.ops = (encoder.attention, encoder.ops), attention, ops
        try:
            run()
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
            "failures": [],
            "seconds": {},
        }

    def cell(self, row: str, column: Column, timing: dict[str, Any]) -> None:
        self.data["rows"].setdefault(row, {})[column.name] = timing

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            trace = traceback.format_exc()
            self.data["failures"].append({"part": name, "error": repr(error)[:500], "trace": trace[-3000:]})
            print(f"FAILED {name}: {error!r}", file=sys.stderr, flush=True)
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
        for name, implementation in (
            ("transformers eager, sdpa", "sdpa"),
            ("transformers eager, packed attention", PACKED),
        ):
            self.theirs.config._attn_implementation = implementation
            for column in self.columns:
                patches, grids = self.patches(column).to(self.dtype), self.grids[column]
                timing = self.clock.busy(lambda p=patches, g=grids: self.theirs(p, grid_thw=g))  # type: ignore[misc]
                self.report.cell(name, column, timing)
        self.theirs.config._attn_implementation = "sdpa"

    def reference_compiled(self, seconds: float) -> None:
        """The best of two modes, with packed attention and the metadata passed in, until the time is used up."""
        deadline = time.perf_counter() + seconds
        self.theirs.config._attn_implementation = PACKED
        side = self.theirs.num_grid_per_side
        for column, mode in itertools.product(self.columns, ("default", "reduce-overhead")):
            if time.perf_counter() > deadline:
                break
            with self.report.part(f"transformers compiled, {mode}, {column.name}"):
                torch._dynamo.reset()
                compiled = torch.compile(self.theirs, mode=mode, dynamic=False)
                patches, grids = self.patches(column).to(self.dtype), self.grids[column]
                metadata = reference_metadata(grids, side)
                timing = self.clock.busy(
                    lambda p=patches, g=grids, c=compiled, m=metadata: c(p, grid_thw=g, **m),  # type: ignore[misc]
                    warm=5,
                )
                best = self.report.data["rows"].get("transformers compiled", {}).get(column.name)
                if best is None or timing["ms"] < best["ms"]:
                    self.report.cell("transformers compiled", column, {**timing, "mode": mode})
        self.theirs.config._attn_implementation = "sdpa"
        torch._dynamo.reset()

    def exact(self, row: str, attention: Attention, ops: Ops) -> None:
        for column in self.columns:
            with self.report.part(f"{row}, {column.name}"):
                exact = capture_exact(self.ours, column, self.inputs[column], attention, ops)
                exact.output.fill_(float("nan"))
                exact.graph.replay()
                self.clock.synchronize()
                errors = self._errors(column, exact.output)
                self.report.cell(row, column, {**self.clock.busy(exact.graph.replay), "errors": errors})
                del exact

    def _errors(self, column: Column, rows: torch.Tensor) -> list[float] | None:
        if column not in self.expected:
            return None
        return level_errors(split_levels(rows, self.levels), self.expected[column])

    def served(self, row: str, manager: EncoderCudaGraphManager, columns: Sequence[Column], pieces: int = 1) -> None:
        """Rows of what a replica does with a batch. pieces: cut each item into so many of equal length in time."""
        runner = EncoderRunner(manager.model, manager)  # type: ignore[arg-type]
        for column in columns:
            with self.report.part(f"{row}, {column.name}"):
                batches = [
                    [piece for frames in column.frames(seed) for piece in np.split(frames, pieces)]
                    for seed in range(ROTATED)
                ]
                self._served_on_device(row, manager, column, batches)
                self._served_from_host(row, runner, column, batches)

    def _served_on_device(
        self, row: str, manager: EncoderCudaGraphManager, column: Column, batches: Sequence[list[np.ndarray]]
    ) -> None:
        placed = [batch_of(column, [torch.from_numpy(f).to(self.device) for f in batch]) for batch in batches]
        before = manager.stats()
        outputs = manager.execute_items(placed[0])
        after = manager.stats()
        replays = after["replays"] - before["replays"]
        used = after["used_tokens"] - before["used_tokens"]
        turn = itertools.cycle(placed)
        details = {
            "budgets": sorted({o.budget for o in outputs if o.budget is not None}),
            "replays": replays,
            "reasons": sorted({o.reason for o in outputs if o.reason is not None}),
            "padding": (after["budget_tokens"] - before["budget_tokens"]) / used if used else None,
            "errors": self._errors(column, torch.cat([o.embeddings for o in outputs])),
            "from_idle": self.clock.wall(lambda: manager.execute_items(next(turn))),
        }
        self.report.data["served"].setdefault(row, {})[column.name] = details
        self.report.cell(f"{row}: GPU time", column, self.clock.queued(lambda: manager.execute_items(next(turn))))
        if replays == 1:
            # The last batch's metadata is still in the buffers.
            graph = manager.budget_graphs[column.modality][details["budgets"][0]].graph
            self.report.cell(f"{row}: its replay alone", column, self.clock.busy(graph.replay))

    def _served_from_host(
        self, row: str, runner: EncoderRunner, column: Column, batches: Sequence[list[np.ndarray]]
    ) -> None:
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

    def run(self, quick: bool, compile_seconds: float) -> None:
        part = self.report.part
        with part("floor"):
            self.floor()
        with part("reference values"):
            self.reference_values()
        with part("transformers eager"):
            self.reference_eager()
        if compile_seconds:
            with part("transformers compiled"):
                self.reference_compiled(compile_seconds)
        self.report.data["attention"] = self.ours.attention.name
        attentions: list[Attention] = [self.ours.attention]
        plain: Attention = SegmentSdpa()
        if self.clock.cuda:
            plain = FlashVarlen()
            others: list[Attention] = [CudnnDense(), FlashVarlen()]
            if has_triton(self.device):
                from encoder.kernels import TritonVarlen

                others.insert(0, TritonVarlen())
            attentions += [a for a in others if a.name != self.ours.attention.name]
        self.exact("plain graph, exact shape", plain, TorchOps())
        for attention in attentions:
            self.exact(f"ours, exact shape, {attention.name}", attention, self.ours.ops)
        long = [c for c in self.columns if c.grids[0][0] > self.ours.t_capture]
        short = [c for c in self.columns if c not in long]
        with part("capture"):
            manager = make_manager(self.model, self.ours)
            manager.capture()
            self.report.data["manager"] = manager.stats()
            self.served("ours as served", manager, short)
            for column in long:
                pieces = column.grids[0][0] // self.ours.t_capture
                self.served(f"ours as served, {pieces} videos of t={self.ours.t_capture}", manager, [column], pieces)
            with part("metadata fill"):
                self.metadata(manager)
            manager.clear()
            del manager
        for column in long:
            with part(f"capture, t_capture {column.grids[0][0]}"):
                state, t = self.theirs.state_dict(), column.grids[0][0]
                encoder = build_encoder(TOWERS[self.model], state, self.device, self.dtype, t_capture=t)
                long_manager = make_manager(self.model, encoder, ("video",))
                long_manager.capture()
                # The same row as the others': the column's name tells t.
                self.served("ours as served", long_manager, [column])
                long_manager.clear()
        if not quick:
            with part("capture in fresh processes"):
                self.report.data["capture"] = capture_in_fresh_processes(self.model, self.device)


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
    lines += ["", "Milliseconds, median (10th to 90th percentile).", ""]
    lines += _table(["", *columns], [[name, *(_time(cells.get(c)) for c in columns)] for name, cells in rows.items()])
    exact_rows = {n: cells for n, cells in rows.items() if n.startswith("ours, exact shape")}
    for row, cells in data["served"].items():
        lines += ["", f"## {row}: the cells", ""]
        body = []
        for column, details in cells.items():
            gpu = rows.get(f"{row}: GPU time", {}).get(column)
            exact = [c[column]["ms"] for c in exact_rows.values() if column in c]
            same = exact_rows.get(f"ours, exact shape, {data['attention']}", {}).get(column)
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
        "--compile", type=float, default=0, metavar="SECONDS", help="measure transformers compiled too, for so long"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--capture-on", metavar="DEVICE", help="only time the capture there and print it as JSON")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device(options.capture_on or ("cuda:0" if cuda else "cpu"))
    model = options.model or ("full" if device.type == "cuda" else "tiny")
    torch.set_grad_enabled(False)
    if options.capture_on:
        print(json.dumps(capture_here(model, device)))
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
