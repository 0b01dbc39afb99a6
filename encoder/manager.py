"""Captures a graph for every budget of every modality, and runs batches through them or eagerly."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from encoder.budgets import (
    Batch,
    CostTable,
    PackLimits,
    interpolate_costs,
    plan_batches,
    timed_budgets,
    timed_eager_sizes,
    validate_budgets,
)
from encoder.defs import (
    BudgetGraphMetadata,
    EncoderItemSpec,
    GraphStats,
    ItemOutput,
    MmKwargs,
    Modality,
    Reason,
    Stop,
)
from encoder.graph import CapturedGraph, CpuStaticGraph, CudaGraph, StaticBuffers
from encoder.interface import SupportsEncoderCudaGraph

logger = logging.getLogger(__name__)

# The first replay also uploads the graph, which shows beside the run time of a small one.
_UPLOAD_MATTERS_UP_TO = 2048


class EncoderCudaGraphManager:
    """Holds `budget_graphs[modality][token_budget]`. Not thread-safe: one thread captures and executes.

    Args:
        token_budgets: budgets of each modality to capture; a modality that is absent always runs eagerly.
        max_batch_size: items in one replay.
        costs: replay and eager costs by modality; absent ones are measured at capture on CUDA, and taken by size on a
            CPU.

    Raises:
        ValueError: an unknown modality or impossible budgets, by name.
    """

    def __init__(
        self,
        model: SupportsEncoderCudaGraph,
        token_budgets: Mapping[str, Sequence[int]],
        max_batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        costs: Mapping[str, CostTable] | None = None,
    ) -> None:
        self.model = model
        self.config = model.get_encoder_cudagraph_config()
        unknown = set(token_budgets) - set(self.config.modalities)
        if unknown:
            raise ValueError(f"token_budgets: unknown modality {', '.join(sorted(unknown))}")
        self.max_batch_size, self.device, self.dtype = max_batch_size, torch.device(device), dtype
        self.token_budgets: dict[Modality, list[int]] = {
            cast(Modality, m): validate_budgets(b, max_batch_size) for m, b in token_budgets.items()
        }
        self.budget_graphs: dict[Modality, dict[int, BudgetGraphMetadata]] = {}
        self.costs: dict[Modality, CostTable] = {cast(Modality, m): c for m, c in (costs or {}).items()}
        self._static = StaticBuffers(self.device)
        self._counters = GraphStats()
        self._capture_seconds = 0.0
        self._graph_bytes = 0
        self._warm: set[int] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def backend(self) -> str:
        """`cuda-graph`, `cpu-static`, or `eager` while nothing is captured."""
        return next((g.graph.backend for graphs in self.budget_graphs.values() for g in graphs.values()), "eager")

    # --- capture ---

    # Not inference mode: its tensors cannot be written outside of it, and the static buffers are anyone's to write.
    @torch.no_grad()
    def capture(self) -> None:
        """Captures all budgets of all modalities, largest first, in one memory pool.

        Raises:
            MemoryError: names the budget that did not fit on the device; nothing stays captured.
        """
        started = time.perf_counter()
        if self.device.type == "cuda":
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            # What loading left in the allocator's cache cannot serve the graphs' pool: it is given back.
            torch.cuda.empty_cache()
            before = torch.cuda.mem_get_info(self.device)[0]
        for budget, modality in sorted(((b, m) for m, bs in self.token_budgets.items() for b in bs), reverse=True):
            try:
                graph = self._capture_budget_graph(modality, budget)
            except torch.OutOfMemoryError as error:
                self.clear()
                raise MemoryError(
                    f"no room on {self.device} to capture the {modality} graph of {budget} tokens; "
                    f"lower {modality}.max_tokens or {modality}.token_budgets"
                ) from error
            self.budget_graphs.setdefault(modality, {})[budget] = graph
        self._measure_costs()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._graph_bytes = before - torch.cuda.mem_get_info(self.device)[0]
        self._capture_seconds = time.perf_counter() - started
        logger.info("captured %d graphs in %.2f s", sum(map(len, self.budget_graphs.values())), self._capture_seconds)

    def _capture_budget_graph(self, modality: Modality, token_budget: int) -> BudgetGraphMetadata:
        inputs = self.model.prepare_encoder_cudagraph_capture_inputs(
            token_budget, self.max_batch_size, self.device, self.dtype, modality, self._static
        )
        input_buffer = inputs.mm_kwargs[self._get_input_key(modality)]
        output = self._static.take("output", (token_budget, self.config.out_hidden_size), self.dtype)

        def run(stop: Stop | None = None) -> None:
            self.model.encoder_cudagraph_forward(input_buffer, inputs.buffers, output, stop)

        graph: CapturedGraph
        if self.device.type == "cuda":
            assert self._stream is not None

            def warmup() -> None:
                # A shape that another modality has warmed up needs no more: the kernels are the same.
                if token_budget not in self._warm:
                    self.model.encoder_cudagraph_warmup(input_buffer, inputs.buffers, output)
                    self._warm.add(token_budget)

            graph = CudaGraph(run, self._pool, self._stream, warmup)
        else:
            graph = CpuStaticGraph(run)
        return BudgetGraphMetadata(
            token_budget, self.max_batch_size, inputs.max_num_seqs, graph, input_buffer, inputs.buffers, output
        )

    def _measure_costs(self) -> None:
        """Fills `costs` where none were given: seconds of replays and of eager runs without attention (every segment
        empty) on CUDA, and sizes where there is no GPU. What several modalities have is timed once: their graphs, and
        their eager runs, differ only in segments."""
        missing = [m for m in self.budget_graphs if m not in self.costs]
        if self.device.type != "cuda":
            self.costs |= {m: CostTable.by_size(list(self.budget_graphs[m])) for m in missing}
            return
        graphs = {b: g for m in missing for b, g in self.budget_graphs[m].items()}
        if not graphs:
            return
        points = timed_budgets(list(graphs))
        events = []
        for budget in points:
            # Each before its own replay: the graphs share these buffers.
            _fill_without_segments(graphs[budget].buffers, len(graphs[budget].input_buffer))
            if budget <= _UPLOAD_MATTERS_UP_TO:
                graphs[budget].graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[budget].graph.replay()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        table = interpolate_costs(points, [start.elapsed_time(end) / 1e3 for start, end in events], list(graphs))
        eager = self.time_eager(timed_eager_sizes(max(graphs)))
        self.costs |= {m: CostTable({b: table[b] for b in self.budget_graphs[m]}, eager) for m in missing}

    @torch.no_grad()
    def time_eager(self, sizes: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """(tokens, seconds) of eager runs of these ascending sizes with every segment empty, for `CostTable.eager`;
        none where the device has no room for such a run.

        Wall time from an idle device until it is idle again, launches included: the one thread that launches an eager
        run's hundreds of kernels bounds a small run, while a replay is one launch whatever its size.
        """
        points: list[tuple[int, float]] = []
        modality = self.config.modalities[0]
        current = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        # On the stream of the captures: the memory of their warm-ups is kept there.
        with current:
            for tokens in sizes:
                try:
                    seconds = self._time_eager_run(modality, tokens)
                except torch.OutOfMemoryError:
                    logger.warning("no room on %s for an eager run of %d tokens: none is planned", self.device, tokens)
                    points.clear()
                    break
                # A larger run never costs less: noise must not make the packer prefer it.
                points.append((tokens, max(seconds, points[-1][1] if points else 0.0)))
        if self.device.type == "cuda":
            # No later run uses that stream, nor what is kept for it.
            torch.cuda.empty_cache()
        return tuple(points)

    def _time_eager_run(self, modality: Modality, tokens: int) -> float:
        """The least of up to three runs, which stop once they took 20 ms together."""
        # The static buffers lend memory for what the graphs have room for.
        static = self._static if self.budget_graphs else StaticBuffers(self.device)
        inputs = self.model.prepare_encoder_cudagraph_capture_inputs(
            tokens, self.max_batch_size, self.device, self.dtype, modality, static
        )
        pixels = inputs.mm_kwargs[self._get_input_key(modality)]
        _fill_without_segments(inputs.buffers, len(pixels))
        output = static.take("output", (tokens, self.config.out_hidden_size), self.dtype)
        if tokens not in self._warm:
            self.model.encoder_cudagraph_warmup(pixels, inputs.buffers, output)
        times: list[float] = []
        while len(times) < 3 and sum(times) < 0.02:
            self._synchronize()
            started = time.perf_counter()
            self.model.encoder_cudagraph_forward(pixels, inputs.buffers, output)
            self._synchronize()
            times.append(time.perf_counter() - started)
        return min(times)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- execution ---

    def execute(self, mm_kwargs: MmKwargs) -> list[torch.Tensor]:
        """One tensor [tokens, out_hidden_size] an item, in the caller's order, on the device."""
        return [output.embeddings for output in self.execute_items(mm_kwargs)]

    @torch.inference_mode()
    def execute_items(
        self,
        mm_kwargs: MmKwargs,
        columns: Sequence[int] | None = None,
        stop: Stop | None = None,
        *,
        eager: bool = False,
    ) -> list[ItemOutput]:
        """As `execute`, with how each item was run. The tensors are copies, safe from later replays.

        Args:
            columns: leading columns to give of each item; None: all.
            stop: asked before each block of what does not run as a CUDA graph.
            eager: run all items together without graphs.

        Raises:
            ValueError: the keys of `mm_kwargs` name no modality, or two.
            Stopped: `stop` gave True.
        """
        modality = self._detect_modality(mm_kwargs)
        specs = self.model.get_encoder_cudagraph_item_specs(mm_kwargs)
        columns = columns or [self.config.out_hidden_size] * len(specs)
        outputs: list[ItemOutput | None] = [None] * len(specs)
        for batch in [Batch(tuple(range(len(specs))), None)] if eager else self._plan(modality, specs):
            for index, output in zip(
                batch.indices, self._run_batch(modality, mm_kwargs, specs, batch, columns, stop), strict=True
            ):
                outputs[index] = output
        return [output for output in outputs if output is not None]

    def _plan(self, modality: Modality, specs: Sequence[EncoderItemSpec]) -> list[Batch]:
        graphs = self.budget_graphs.get(modality)
        if not graphs:
            return [Batch(tuple(range(len(specs))), None)] if specs else []
        largest = graphs[max(graphs)]
        return plan_batches(
            specs,
            self.token_budgets[modality],
            PackLimits(largest.token_budget, self.max_batch_size, largest.max_num_seqs),
            self.costs[modality],
            self.model.get_encoder_cudagraph_max_item_seqs(modality),
        )

    def _run_batch(
        self,
        modality: Modality,
        mm_kwargs: MmKwargs,
        specs: Sequence[EncoderItemSpec],
        batch: Batch,
        columns: Sequence[int],
        stop: Stop | None,
    ) -> list[ItemOutput]:
        whole = batch.indices == tuple(range(len(specs)))
        part = mm_kwargs if whole else self.model.select_encoder_cudagraph_items(mm_kwargs, batch.indices)
        chosen = [specs[i] for i in batch.indices]
        reason, static = batch.reason, None
        if batch.budget is None:
            self._count_misses(len(chosen), reason)
        else:
            static = self._run_budget_graph(modality, part, chosen, batch.budget, stop)
            reason = None if static is not None else "batch_over_segments"
        if static is None:
            rows = self.model.encoder_eager_forward(part, stop)
        else:
            # The static output is the next replay's: what leaves is a copy.
            used = sum(spec.num_tokens for spec in chosen)
            widest = max(columns[i] for i in batch.indices)
            rows = static[:used, :widest].clone(memory_format=torch.contiguous_format)
        results, start = [], 0
        for index, spec in zip(batch.indices, chosen, strict=True):
            item = rows[start : start + spec.num_tokens, : columns[index]].contiguous()
            start += spec.num_tokens
            results.append(
                ItemOutput(item, "eager", reason) if static is None else ItemOutput(item, "graph", None, batch.budget)
            )
        return results

    def _run_budget_graph(
        self,
        modality: Modality,
        mm_kwargs: MmKwargs,
        specs: Sequence[EncoderItemSpec],
        token_budget: int,
        stop: Stop | None = None,
    ) -> torch.Tensor | None:
        """The static output after a replay, valid until the next one; None, and its items counted as misses, if the
        batch breaks a captured limit."""
        graph = self.budget_graphs[modality][token_budget]
        used = sum(spec.num_tokens for spec in specs)
        actual = self.model.get_encoder_cudagraph_num_seqs(mm_kwargs)
        replay = None
        if used <= token_budget and not (graph.max_num_seqs > 0 and actual > graph.max_num_seqs):
            replay = self.model.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, token_budget, self.max_batch_size)
        if replay is None or not replay.fits:
            self._count_misses(len(specs), "batch_over_segments")
            return None
        for name in self.config.buffer_keys:
            value = replay.buffers.get(name)
            if value is not None:
                target = graph.buffers[name]
                (target[: len(value)] if value.ndim else target).copy_(value, non_blocking=True)
        self.model.write_encoder_cudagraph_input(mm_kwargs, graph.input_buffer)
        graph.graph.replay(stop)
        counters = self._counters
        counters.hits += len(specs)
        counters.replays += 1
        counters.budget_tokens += token_budget
        counters.used_tokens += used
        by_budget = counters.hits_by_budget.setdefault(modality, {})
        by_budget[token_budget] = by_budget.get(token_budget, 0) + len(specs)
        return graph.output

    def _count_misses(self, items: int, reason: Reason | None) -> None:
        self._counters.misses += items
        key = reason or "no_graphs"
        self._counters.misses_by_reason[key] = self._counters.misses_by_reason.get(key, 0) + items

    # --- lookups and state ---

    def _detect_modality(self, mm_kwargs: MmKwargs) -> Modality:
        found = [m for m in self.config.modalities if self._get_input_key(m) in mm_kwargs]
        if found and self.config.modality_input_keys is None:
            return found[0]
        if len(found) != 1:
            keys = ", ".join(self._get_input_key(m) for m in self.config.modalities)
            raise ValueError(f"mm_kwargs must have exactly one of {keys}; it has {', '.join(mm_kwargs) or 'nothing'}")
        return found[0]

    def _get_input_key(self, modality: Modality) -> str:
        keys = self.config.modality_input_keys or {}
        return keys.get(modality, self.config.input_key)

    def stats(self) -> dict[str, Any]:
        """Counters since the start, in items, and what is captured. JSON-able."""
        return {
            # Each dict is copied in one step: another thread may add a key meanwhile.
            **vars(self._counters),
            "hits_by_budget": {m: dict(b) for m, b in list(self._counters.hits_by_budget.items())},
            "misses_by_reason": dict(self._counters.misses_by_reason),
            "hit_rate": self._counters.hit_rate,
            "padding_ratio": self._counters.padding_ratio,
            "backend": self.backend,
            "token_budgets": {m: list(b) for m, b in self.token_budgets.items()},
            "max_batch_size": self.max_batch_size,
            "num_graphs": {m: len(g) for m, g in self.budget_graphs.items()},
            "static_bytes": self._static.nbytes,
            "graph_bytes": self._graph_bytes,
            "capture_seconds": self._capture_seconds,
        }

    def clear(self) -> None:
        """Drops every graph, the static memory and the pool. Later batches run eagerly."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.budget_graphs.clear()
        self._static.clear()
        self._pool = self._stream = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _fill_without_segments(buffers: Mapping[str, torch.Tensor], rows: int) -> None:
    """All `rows` in use, and every segment empty."""
    for name, value in (("cu_seqlens", 0), ("sequence_lengths", 0), ("num_patches", rows)):
        if name in buffers:
            buffers[name].fill_(value)
