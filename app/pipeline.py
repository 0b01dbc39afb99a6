"""Sources -> decoded frames -> pools -> encoded items. What every way into the service shares."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from app.errors import FovealError
from app.formats.dtypes import cast
from app.formats.types import EncodedItem
from app.inputs import Source
from app.media.fetch import fetch
from app.media.pool import DecodePool
from app.media.types import DecodedMedia
from app.metrics import STAGE_SECONDS
from app.pools import Pools
from app.routing import choose_pool
from app.schemas import EncodeOptions
from configs.processor import ProcessorConfig
from configs.settings import Settings
from deployments.protocol import EncodeItem, EncodeResult, PoolName

STAGES = ("fetch", "decode", "queue", "encode", "format", "total")


@dataclass
class Timings:
    """Seconds of each stage of a request, and of all of it since this was made. They feed Server-Timing and metrics."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def note(self, **seconds: float) -> None:
        """Stages that one item has gone through one after another; 0 for one that it had no need of.

        Items go side by side. The slowest one's stages are kept, so that all stages sum to no more than the total.
        """
        for stage in STAGE_SECONDS.keys() & seconds:
            if seconds[stage]:
                STAGE_SECONDS[stage].record(seconds[stage])
        if sum(seconds.values()) > sum(self.seconds[stage] for stage in seconds):
            self.seconds |= seconds

    def header(self) -> str:
        """The value of Server-Timing, in milliseconds."""
        return ", ".join(f"{stage};dur={seconds * 1000:.1f}" for stage, seconds in self.seconds.items())


class Pipeline:
    """Has media decoded in child processes, routes, and calls the pools. One an ingress replica."""

    def __init__(self, settings: Settings, processor: ProcessorConfig, pools: Pools) -> None:
        self._settings, self._processor, self._pools = settings, processor, pools
        self._decoder = DecodePool(processor, settings.limits)
        self._waiters = ThreadPoolExecutor(settings.limits.decode_processes, thread_name_prefix="decode")

    async def run(self, sources: Sequence[Source], options: EncodeOptions, timings: Timings) -> list[EncodedItem]:
        """The encoded items, in the order of `sources`.

        Raises:
            FovealError: of the first source that cannot be decoded, naming it; or of the pools.
        """
        deadline = time.time() + self._settings.limits.deadline_s
        decoded = await asyncio.gather(
            *(self._decode(source, options, timings) for source in sources), return_exceptions=True
        )
        media: list[DecodedMedia] = []
        for item in decoded:
            if isinstance(item, BaseException):
                raise item
            media.append(item)
        return await self._encode(media, options, deadline, timings)

    def close(self) -> None:
        """Ends the decoding processes."""
        self._waiters.shutdown()
        self._decoder.close()

    async def _decode(self, source: Source, options: EncodeOptions, timings: Timings) -> DecodedMedia:
        try:
            fetch_s, started = 0.0, time.perf_counter()
            frames = await self._fetch(source.frame_urls)
            data = source.data
            if data is None and source.url is not None:
                (data,) = await self._fetch([source.url])
            if source.data is None:
                fetch_s = time.perf_counter() - started
            media_options = options.media()
            if source.claims is not None:
                media_options = replace(media_options, modality=source.claims)
            started = time.perf_counter()
            if frames:
                decode = partial(self._decoder.decode_frames, frames)
            else:
                assert data is not None
                decode = partial(self._decoder.decode, data)
            media = await asyncio.get_running_loop().run_in_executor(self._waiters, decode, media_options)
            timings.note(fetch=fetch_s, decode=time.perf_counter() - started)
            return media
        except FovealError as error:
            if source.claims is not None and error.param == "modality":
                # The part itself said what it is; the client sent no such option.
                error = FovealError(error.code, error.message, source.param)
            raise error.with_param(source.param) from None

    async def _fetch(self, urls: Sequence[str]) -> list[bytes]:
        """The bytes behind `urls`, one after another: together they are bounded as one body."""
        limits, fetched = self._settings.limits, list[bytes]()
        if len(urls) > limits.max_frames:
            message = f"{len(urls)} frames are over limits.max_frames ({limits.max_frames})"
            raise FovealError("too_many_frames", message)
        room = limits.max_body_bytes
        for url in urls:
            fetched.append(await fetch(url, self._settings.fetch, room))
            room -= len(fetched[-1])
        return fetched

    async def _encode(
        self, media: Sequence[DecodedMedia], options: EncodeOptions, deadline: float, timings: Timings
    ) -> list[EncodedItem]:
        grids = [self._processor.grid_thw(m.num_frames, m.height, m.width) for m in media]
        bound: dict[PoolName, list[tuple[int, EncodeItem]]] = defaultdict(list)
        for i, (item, grid) in enumerate(zip(media, grids, strict=True)):
            pool, reason = choose_pool(
                item.modality,
                grid,
                self._processor.num_tokens(grid),
                t_capture=self._settings.video.t_capture,
                largest_budget=await self._pools.largest_budget(item.modality),
            )
            request = EncodeItem(item.modality, item.frames, options.main_only, options.pooling, reason, deadline)
            bound[pool].append((i, request))
        answers = await _all_or_first_error(
            [self._pools.encode(pool, [request for _, request in group]) for pool, group in bound.items()]
        )
        results: dict[int, EncodeResult] = {}
        for group, answer in zip(bound.values(), answers, strict=True):
            results.update(zip((i for i, _ in group), answer, strict=True))
        return [
            self._item(i, item, grid, results[i], options, timings)
            for i, (item, grid) in enumerate(zip(media, grids, strict=True))
        ]

    def _item(
        self,
        index: int,
        media: DecodedMedia,
        grid_thw: tuple[int, int, int],
        result: EncodeResult,
        options: EncodeOptions,
        timings: Timings,
    ) -> EncodedItem:
        assert result.embeddings is not None
        assert result.execution is not None
        timings.note(queue=result.queue_s, encode=result.encode_s)
        dtype = result.dtype if options.dtype == "auto" else options.dtype
        return EncodedItem(
            index=index,
            modality=media.modality,
            grid_thw=grid_thw,
            timestamps=media.timestamps,
            embeddings=cast(result.embeddings, result.dtype, dtype),
            dtype=dtype,
            pool=result.pool,
            execution=result.execution,
            reason=result.reason,
            budget=result.budget,
            num_tokens=self._processor.num_tokens(grid_thw),
            num_frames=media.num_frames,
            width=media.width,
            height=media.height,
        )


async def _all_or_first_error(calls: Sequence) -> list[list[EncodeResult]]:
    """All answers; the first failure cancels the other calls, so that their items leave the queues."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
