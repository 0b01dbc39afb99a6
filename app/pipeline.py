"""Sources -> decoded frames -> pools -> encoded items. What every way into the service shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from app.errors import FovealError
from app.formats.dtypes import cast
from app.formats.types import EncodedItem
from app.inputs import Source
from app.media.detect import is_clip
from app.media.fetch import fetch
from app.media.pool import DecodePool
from app.media.types import DecodedMedia
from app.metrics import STAGE_SECONDS
from app.pools import Pools
from app.routing import choose_pool
from app.schemas import EncodeOptions
from app.store import Store, item_hash
from app.threads import in_thread
from configs.processor import ProcessorConfig
from configs.settings import Settings
from deployments.protocol import EncodeItem

STAGES = ("fetch", "decode", "queue", "encode", "store", "format", "total")
STORE_THREADS = 4


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


@dataclass(frozen=True)
class _Decoded:
    """One item, and its name in the store if it goes there."""

    media: DecodedMedia
    hash: str | None


class Pipeline:
    """Has media decoded in child processes, routes, and calls the pools. One an ingress replica.

    Args:
        store: where `deliver=store` puts embeddings; None: nowhere.
    """

    def __init__(
        self, settings: Settings, processor: ProcessorConfig, pools: Pools, store: Store | None = None
    ) -> None:
        self._settings, self._processor, self._pools, self._store = settings, processor, pools, store
        # One decoder more than clips may take: however many of them come, a picture waits for none.
        places = settings.limits.decode_processes
        self._decoder = DecodePool(processor, settings.limits, spare=1)
        self._clips = ThreadPoolExecutor(places, thread_name_prefix="clips")
        self._pictures = ThreadPoolExecutor(places + 1, thread_name_prefix="pictures")
        self._files = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")

    async def run(self, sources: Sequence[Source], options: EncodeOptions, timings: Timings) -> list[EncodedItem]:
        """The encoded items, in the order of `sources`.

        Raises:
            FovealError: of the first source that cannot be decoded, naming it; or of the pools or the store.
        """
        deadline = time.time() + self._settings.limits.deadline_s
        name = None
        if options.deliver == "store":
            if self._store is None:
                raise FovealError("invalid_option", "deliver: store is off on this server (store.root)", "deliver")
            compute_dtype = self._settings.dtype if self._settings.dtype != "auto" else await self._pools.dtype()
            if options.dtype == "auto":
                options = options.model_copy(update={"dtype": compute_dtype})
            name = partial(
                item_hash,
                checkpoint=self._store.checkpoint,
                compute_dtype=compute_dtype,
                dtype=options.dtype,
                pooling=options.pooling,
            )
        prepared = await asyncio.gather(
            *(self._prepare(i, source, options, name, timings) for i, source in enumerate(sources)),
            return_exceptions=True,
        )
        items: list[EncodedItem | _Decoded] = []
        for item in prepared:
            if isinstance(item, BaseException):
                raise item
            items.append(item)
        wanted = [(i, item) for i, item in enumerate(items) if isinstance(item, _Decoded)]
        encoded = await _all_or_first_error([self._encode(i, item, options, deadline, timings) for i, item in wanted])
        by_index = {item.index: item for item in encoded}
        return [item if isinstance(item, EncodedItem) else by_index[i] for i, item in enumerate(items)]

    def configure(self, settings: Settings) -> None:
        """Goes by these limits from now on. What the decoders read of them at their start does not change."""
        self._settings = settings
        self._decoder.configure(settings.limits)

    def close(self) -> None:
        """Ends the decoding processes."""
        self._clips.shutdown()
        self._pictures.shutdown()
        self._files.shutdown()
        self._decoder.close()

    async def _prepare(
        self, index: int, source: Source, options: EncodeOptions, name: Callable[..., str] | None, timings: Timings
    ) -> EncodedItem | _Decoded:
        """The item out of the store, or its frames."""
        try:
            fetch_s, started = 0.0, time.perf_counter()
            files = await self._fetch(source.frame_urls)
            if source.data is not None:
                files = [source.data]
            elif source.url is not None:
                files = await self._fetch([source.url])
            if source.data is None:
                fetch_s = time.perf_counter() - started
            media_options = options.media()
            if source.claims is not None:
                media_options = replace(media_options, modality=source.claims)
            frames, hash_ = bool(source.frame_urls), None
            if name is not None and self._store is not None:
                hash_ = await in_thread(partial(name, files, media_options, frames=frames), self._files)
                stored = await in_thread(partial(self._store.get, hash_, index), self._files)
                if stored is not None:
                    timings.note(fetch=fetch_s, decode=0.0)
                    return stored
            started = time.perf_counter()
            clip = frames or is_clip(files[0])
            media = None if clip else await self._decoder.decode_soon(files[0], media_options)
            if media is None:
                decode: Callable[[], DecodedMedia] = (
                    partial(self._decoder.decode_frames, files, media_options)
                    if frames
                    else partial(self._decoder.decode, files[0], media_options)
                )
                media = await in_thread(decode, self._clips if clip else self._pictures)
            timings.note(fetch=fetch_s, decode=time.perf_counter() - started)
            return _Decoded(media, hash_)
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
        self, index: int, decoded: _Decoded, options: EncodeOptions, deadline: float, timings: Timings
    ) -> EncodedItem:
        media = decoded.media
        grid = self._processor.grid_thw(media.num_frames, media.height, media.width)
        pool, reason = choose_pool(
            media.modality,
            grid,
            self._processor.num_tokens(grid),
            t_capture=self._settings.video.t_capture,
            largest_budget=await self._pools.largest_budget(media.modality),
        )
        request = EncodeItem(media.modality, media.frames, options.main_only, options.pooling, reason, deadline)
        result = await self._pools.encode(pool, request)
        assert result.embeddings is not None
        assert result.execution is not None
        dtype, embeddings = result.dtype, result.embeddings
        if options.dtype not in ("auto", dtype):
            dtype = options.dtype
            embeddings = await in_thread(partial(cast, embeddings, result.dtype, dtype))
        item = EncodedItem(
            index=index,
            modality=media.modality,
            grid_thw=grid,
            timestamps=media.timestamps,
            embeddings=embeddings,
            shape=embeddings.shape,
            dtype=dtype,
            pool=result.pool,
            execution=result.execution,
            reason=result.reason,
            budget=result.budget,
            num_tokens=self._processor.num_tokens(grid),
            num_frames=media.num_frames,
            width=media.width,
            height=media.height,
        )
        if self._store is None or decoded.hash is None:
            timings.note(queue=result.queue_s, encode=result.encode_s)
            return item
        started = time.perf_counter()
        item = await in_thread(partial(self._store.put, decoded.hash, item), self._files)
        timings.note(queue=result.queue_s, encode=result.encode_s, store=time.perf_counter() - started)
        return item


async def _all_or_first_error(calls: Sequence[Coroutine[Any, Any, EncodedItem]]) -> list[EncodedItem]:
    """All answers; the first failure cancels the other calls, so that their items leave the queues."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
