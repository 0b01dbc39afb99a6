"""Clips and pictures share the decoders, but a picture never waits for a clip."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from app.inputs import Source
from app.media.detect import is_clip
from app.media.types import DecodedMedia, MediaOptions
from app.pipeline import Pipeline, Timings
from app.pools import Pools
from app.schemas import EncodeOptions
from configs.processor import ProcessorConfig
from configs.settings import Limits, Settings
from tests.unit.app.test_ingress import PlayedPools
from tests.unit.media import makers as m

PICTURE, CLIP = m.save(m.scene(64, 64), "PNG"), m.clip(m.movie(2), "mp4", "libx264")


class Held:
    """Decoders that finish a clip only when told to. started: clips that have one."""

    def __init__(self) -> None:
        self.finish, self.started = threading.Event(), threading.Semaphore(0)

    def decode(self, data: bytes, options: MediaOptions) -> DecodedMedia:
        if is_clip(data):
            self.started.release()
            assert self.finish.wait(60)
        return DecodedMedia("image", np.zeros((1, 3, 64, 64), np.uint8), None)

    async def decode_soon(self, data: bytes, options: MediaOptions) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.fixture
def held() -> Iterator[tuple[Pipeline, Held]]:
    pipeline = Pipeline(Settings(limits=Limits(decode_processes=2)), ProcessorConfig(), cast(Pools, PlayedPools()))
    pipeline._decoder.close()
    decoders = Held()
    pipeline._decoder = cast(Any, decoders)
    yield pipeline, decoders
    pipeline.close()


def test_what_a_clip_is() -> None:
    assert is_clip(CLIP)
    assert [is_clip(data) for data in (PICTURE, m.save(m.scene(8, 8), "GIF"), b"", b"text")] == [False] * 4


def test_pictures_pass_a_flood_of_clips(held: tuple[Pipeline, Held]) -> None:
    pipeline, decoders = held

    async def encode(data: bytes) -> int:
        return len(await pipeline.run([Source("file", data)], EncodeOptions(), Timings()))

    async def story() -> None:
        flood = [asyncio.create_task(encode(CLIP)) for _ in range(8)]
        for _ in range(2):
            assert await asyncio.to_thread(decoders.started.acquire, timeout=60)
        assert [await encode(PICTURE) for _ in range(5)] == [1] * 5
        assert not any(task.done() for task in flood)
        assert not decoders.started.acquire(blocking=False)  # as many clips as `decode_processes`, no more
        decoders.finish.set()
        assert await asyncio.gather(*flood) == [1] * 8

    asyncio.run(story())
