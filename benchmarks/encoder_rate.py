"""What the encoder and the host's decoders do by themselves with the settings of a service: what bounds the latter.

Reads a JSON object from stdin and prints one as the last line: see `Job`. The rate is that of `EncoderRunner.submit`
and `result` back to back, as many batches in flight as a replica has, batches cut as its batcher cuts a long queue.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

import torch

from app.media.decode import decode
from app.media.types import DecodedMedia
from app.schemas import parse_options
from benchmarks.mixes import Media, Medium, make_mix
from configs.processor import ProcessorConfig
from configs.settings import Settings
from deployments.batcher import Size, count_that_fit
from deployments.pool import graph_budgets
from encoder.budgets import PackLimits
from encoder.checkpoint import resolve_checkpoint
from encoder.defs import EncodeRequest
from encoder.runner import EncoderRunner

DECODED = 64  # files of a mix that are decoded and encoded over and over


@dataclass(frozen=True)
class Job:
    """args: of `app.main:build`. video, clips, scale: of the media. seconds: of a measurement. decoders: processes."""

    args: dict[str, Any]
    mixes: list[str]
    video: tuple[int, int]
    clips: bool
    scale: float
    seconds: float
    decoders: int


def decode_one(medium: Medium, settings: Settings, processor: ProcessorConfig) -> DecodedMedia:
    options = parse_options(parse_qsl(medium.query), settings.limits)
    return decode(medium.data, options.media(), processor, settings.limits)


class Encoder:
    """The runner that a replica of one pool has, and the limits of its batches."""

    def __init__(self, modality: Literal["image", "video"], settings: Settings, processor: ProcessorConfig) -> None:
        own = settings.image if modality == "image" else settings.video
        budgets = graph_budgets(settings, own)
        seqs = own.max_batch_size * (settings.video.t_capture if modality == "video" else 1)
        self.modality, self._processor = modality, processor
        self._limits = PackLimits(max_tokens=budgets[-1], max_items=own.max_batch_size, max_seqs=seqs)
        self._runner = EncoderRunner.from_checkpoint(
            resolve_checkpoint(settings.model),
            device=settings.device,
            dtype=settings.dtype,
            token_budgets={modality: budgets},
            max_batch_size=own.max_batch_size,
            t_capture=settings.video.t_capture,
            image_mean=processor.image_mean,
            image_std=processor.image_std,
        )

    def facts(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "device": runner.device,
            "backend": runner.backend,
            "attention": runner.attention,
            "dtype": runner.dtype,
        }

    def rate(self, media: Sequence[DecodedMedia], seconds: float, most: int | None = None) -> dict[str, float]:
        """Items and tokens a second; at most `most` items a batch."""
        batches = self._batches(media, most)
        flight: deque[tuple[Any, int, int]] = deque()
        items = tokens = 0
        busy = 0.0
        warm = 2 * self._runner.max_in_flight
        started = time.perf_counter()
        for number in itertools.count():
            requests, size = next(batches)
            flight.append((self._runner.submit(self.modality, requests), len(requests), size))
            if len(flight) < self._runner.max_in_flight:
                continue
            pending, count, size = flight.popleft()
            _check(pending.result())
            if number < warm:
                started = time.perf_counter()
                continue
            items, tokens, busy = items + count, tokens + size, busy + pending.busy_seconds
            if time.perf_counter() - started > seconds:
                break
        elapsed = time.perf_counter() - started
        for pending, _, _ in flight:
            pending.result()
        return {"items_s": items / elapsed, "tokens_s": tokens / elapsed, "busy_share": busy / elapsed}

    def single(self, media: Sequence[DecodedMedia], seconds: float) -> dict[str, float]:
        """Milliseconds of one item on an idle device: on the device, and from host to host. Medians."""
        busy, wall = [], []
        end = time.perf_counter() + seconds
        for number, item in enumerate(itertools.cycle(media)):
            started = time.perf_counter()
            pending = self._runner.submit(self.modality, [EncodeRequest(item.frames)])
            _check(pending.result())
            if number >= 5:
                wall.append((time.perf_counter() - started) * 1e3)
                busy.append(pending.busy_seconds * 1e3)
            if number >= 12 and time.perf_counter() > end:
                return {"replay_ms": statistics.median(busy), "host_to_host_ms": statistics.median(wall)}
        raise ValueError("nothing to encode")

    def batch_sizes(self, media: Sequence[DecodedMedia]) -> list[int]:
        largest = max(len(requests) for requests, _ in itertools.islice(self._batches(media, None), 32))
        return sorted({1, *(n for n in (2, 4, 8) if n < largest), largest})

    def _batches(self, media: Sequence[DecodedMedia], most: int | None) -> Iterator[tuple[list[EncodeRequest], int]]:
        sizes = [self._size(item) for item in media]
        at = 0
        while True:
            queue = [(at + i) % len(media) for i in range(most or self._limits.max_items)]
            count = max(1, count_that_fit([sizes[i] for i in queue], self._limits))
            taken = queue[:count]
            yield [EncodeRequest(media[i].frames) for i in taken], sum(sizes[i].tokens for i in taken)
            at += count

    def _size(self, item: DecodedMedia) -> Size:
        frames, _, height, width = item.frames.shape
        grid = self._processor.grid_thw(frames, height, width)
        return Size(item.modality, self._processor.num_tokens(grid), grid[0])


def _check(outputs: Sequence[Any]) -> None:
    for output in outputs:
        if isinstance(output, Exception):
            raise output


def decode_rates(
    files: Mapping[str, Sequence[Medium]], settings: Settings, seconds: float, processes: int
) -> dict[str, float]:
    """Files of each mix a second, over so many processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    barrier, rates = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=_decode_for, args=(dict(files), settings, seconds, barrier, rates))
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    found = [rates.get(timeout=300) for _ in children]
    for child in children:
        child.join()
    return {name: sum(rate[name] for rate in found) for name in files}


def _decode_for(
    files: Mapping[str, Sequence[Medium]], settings: Settings, seconds: float, barrier: Any, rates: Any
) -> None:
    torch.set_num_threads(1)
    processor = ProcessorConfig.from_checkpoint(resolve_checkpoint(settings.model))
    found = {}
    for name, media in files.items():
        decode_one(media[0], settings, processor)
        barrier.wait()
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            decode_one(media[done % len(media)], settings, processor)
            done += 1
        found[name] = done / (time.perf_counter() - started)
    rates.put(found)


def run(job: Job) -> dict[str, Any]:
    """{"mixes": {name: {"items_s", "tokens_s": of the best batch size, "by_batch", "decode_s"}}, "single224", ...}."""
    settings = Settings.model_validate(job.args)
    processor = ProcessorConfig.from_checkpoint(resolve_checkpoint(settings.model))
    made = Media(job.video, job.clips)
    files = {name: list(make_mix(name, made, job.scale).media)[:DECODED] for name in job.mixes}
    decoded = {name: [decode_one(m, settings, processor) for m in media] for name, media in files.items()}
    found: dict[str, Any] = {"job": {k: v for k, v in asdict(job).items() if k != "args"}, "mixes": {}}
    for name, rate in decode_rates(files, settings, job.seconds, job.decoders).items():
        found["mixes"][name] = {"decode_s": rate}
    # Seconds, items and tokens of each mix, by modality: a mixture costs the sum of its parts.
    parts: dict[str, list[tuple[float, int, int]]] = {name: [] for name in files}
    modalities: tuple[Literal["image", "video"], ...] = ("image", "video")
    for modality in modalities:
        chosen = {name: [d for d in items if d.modality == modality] for name, items in decoded.items()}
        if not any(chosen.values()):
            continue
        encoder = Encoder(modality, settings, processor)
        found["runner"] = encoder.facts()
        for name, items in chosen.items():
            if not items:
                continue
            rates = {n: encoder.rate(items, job.seconds, n) for n in encoder.batch_sizes(items)}
            best = max(rates.values(), key=lambda rate: rate["items_s"])
            tokens = best["tokens_s"] / best["items_s"] * len(items)
            parts[name].append((len(items) / best["items_s"], len(items), round(tokens)))
            found["mixes"][name].setdefault("by_batch", {})[modality] = rates
            if name == "photo224":
                found["single224"] = encoder.single(items, job.seconds)
        del encoder
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for name, costs in parts.items():
        seconds, items, tokens = (sum(column) for column in zip(*costs, strict=True))
        found["mixes"][name] |= {"items_s": items / seconds, "tokens_s": tokens / seconds}
    return found


def main() -> None:
    print(json.dumps(run(Job(**json.loads(sys.stdin.read())))))


if __name__ == "__main__":
    main()
