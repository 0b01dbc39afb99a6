"""Decoding in children: the same answers, and none that a file can hold, crash or bloat."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.errors import FovealError
from app.media.decode import decode, decode_frames
from app.media.pool import CRASHED, INLINE_BYTES, DecodePool, _Decoder, _Lost
from app.media.types import DecodedMedia, MediaOptions
from configs.settings import Limits
from tests.unit.media import makers as m
from tests.unit.media.reference import PROCESSOR

LIMITS = Limits(decode_processes=2, decode_timeout_s=20, max_pixels=20_000_000)
STILL, CLIP = m.save(m.scene(48, 64), "JPEG"), m.clip(m.movie(30), "mp4", "libx264")


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(PROCESSOR, LIMITS)
    yield pool
    pool.close()


def same(a: DecodedMedia, b: DecodedMedia) -> bool:
    times = (a.timestamps is None) == (b.timestamps is None)
    if a.timestamps is not None and b.timestamps is not None:
        times = np.array_equal(a.timestamps, b.timestamps) and a.timestamps.dtype == b.timestamps.dtype
    return bool(a.modality == b.modality and np.array_equal(a.frames, b.frames) and times)


def test_answers_equal_those_of_decoding_here(pool: DecodePool) -> None:
    for data, options in ((STILL, MediaOptions()), (CLIP, MediaOptions(fps=5.0)), (CLIP, MediaOptions(num_frames=3))):
        assert same(pool.decode(data, options), decode(data, options, PROCESSOR, LIMITS))
    images = [m.save(f, "PNG") for f in m.movie(3)]
    options = MediaOptions(fps=4.0)
    assert same(pool.decode_frames(images, options), decode_frames(images, options, PROCESSOR, LIMITS))
    assert pool.decode(memoryview(STILL), MediaOptions()).frames.flags.c_contiguous


def test_errors_pass_through(pool: DecodePool) -> None:
    for data, options in ((b"", MediaOptions()), (STILL[:100], MediaOptions()), (CLIP, MediaOptions(fps=-1))):
        with pytest.raises(FovealError) as here:
            decode(data, options, PROCESSOR, LIMITS)
        with pytest.raises(FovealError) as there:
            pool.decode(data, options)
        assert there.value.args == here.value.args
    with pytest.raises(FovealError, match="malformed_request"):
        pool.decode_frames([], MediaOptions())


def test_an_idle_decoder_is_awaited_without_a_thread(pool: DecodePool) -> None:
    pool.decode(STILL, MediaOptions())
    large = m.save(m.scene(400, 500), "PNG")
    assert len(large) > INLINE_BYTES

    async def run() -> None:
        answer = await pool.decode_soon(STILL, MediaOptions())
        assert answer is not None
        assert same(answer, decode(STILL, MediaOptions(), PROCESSOR, LIMITS))
        with pytest.raises(FovealError, match="unsupported_media"):
            await pool.decode_soon(b"no picture", MediaOptions())
        assert await pool.decode_soon(large, MediaOptions()) is None

    idle = pool.pids()
    asyncio.run(run())
    assert pool.pids() == idle


def test_frames_of_any_size_come_back_whole(pool: DecodePool) -> None:
    small = m.save(m.scene(64, 64), "PNG")

    async def run() -> None:
        for side in (64, 256, 288, 1024):  # below and above what goes inside a message
            options = MediaOptions(min_pixels=side * side, max_pixels=side * side)
            answer = await pool.decode_soon(small, options)
            assert answer is not None
            assert same(answer, decode(small, options, PROCESSOR, LIMITS))
            assert same(answer, pool.decode(small, options))

    asyncio.run(run())


def test_an_awaited_decoder_is_freed_whatever_becomes_of_its_caller() -> None:
    pool = DecodePool(PROCESSOR, Limits(decode_processes=1, decode_timeout_s=0.2))

    def idle_pid() -> int:
        while not pool.pids():
            with suppress(FovealError):
                pool.decode(STILL, MediaOptions())
        return pool.pids()[0]

    async def leaves(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        caller = asyncio.create_task(pool.decode_soon(STILL, MediaOptions()))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert pool.pids() == []
        os.kill(pid, signal.SIGCONT)
        await asyncio.wait(pool._finishing)

    async def waits(pid: int, sent: signal.Signals) -> DecodedMedia | None:
        os.kill(pid, sent)
        return await pool.decode_soon(STILL, MediaOptions())

    try:
        first = idle_pid()
        asyncio.run(leaves(first))
        assert idle_pid() == first  # it finished, and serves on
        with pytest.raises(FovealError, match="decode_timeout"):
            asyncio.run(waits(first, signal.SIGSTOP))
        second = idle_pid()
        assert second != first
        answer = asyncio.run(waits(second, signal.SIGKILL))
        assert answer is not None
        assert same(answer, decode(STILL, MediaOptions(), PROCESSOR, LIMITS))
        third = idle_pid()
        assert third != second
        runs: list[int] = []

        def crash(*_: object) -> DecodedMedia:
            runs.append(1)
            raise _Lost

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Decoder, "run", crash)
            with pytest.raises(FovealError, match="undecodable_media"):
                asyncio.run(waits(third, signal.SIGKILL))
        assert len(runs) == 1  # two decoders, as without waiting for the first one here
    finally:
        pool.close()


def test_many_threads_share_few_children(pool: DecodePool) -> None:
    expected = [decode(data, MediaOptions(), PROCESSOR, LIMITS) for data in (STILL, CLIP)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: pool.decode((STILL, CLIP)[i % 2], MediaOptions()), range(40)))
    assert all(same(answer, expected[i % 2]) for i, answer in enumerate(answers))


def test_children_do_not_import_what_they_do_not_need(pool: DecodePool) -> None:
    pool.decode(STILL, MediaOptions())
    for pid in pool.pids():
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "ray/_raylet" not in mapped
        assert "libtorch_cpu" in mapped


def test_a_child_that_dies_costs_no_item(pool: DecodePool) -> None:
    pool.decode(STILL, MediaOptions())
    before = pool.pids()
    os.kill(before[-1], signal.SIGKILL)
    assert [pool.decode(STILL, MediaOptions()).modality for _ in range(2)] == ["image", "image"]
    assert before[-1] not in pool.pids()


def test_content_that_two_decoders_die_of_is_at_fault(pool: DecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, lost = _Decoder.run, list[int]()

    def killed(self: _Decoder, *args: Any) -> DecodedMedia:
        os.kill(self.pid, signal.SIGKILL)
        lost.append(self.pid)
        return run(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(_Decoder, "run", killed)
        with pytest.raises(FovealError, match=CRASHED) as caught:
            pool.decode(STILL, MediaOptions())
    assert caught.value.code == "undecodable_media"
    assert len(set(lost)) == 2
    assert pool.decode(STILL, MediaOptions()).modality == "image"


def test_a_decoder_is_replaced_after_its_share_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.media.pool.ITEMS_EACH", 3)
    one = DecodePool(PROCESSOR, Limits(decode_processes=1))
    try:
        idle = []
        for _ in range(6):
            assert same(one.decode(STILL, MediaOptions()), decode(STILL, MediaOptions(), PROCESSOR, LIMITS))
            idle.append(one.pids())
    finally:
        one.close()
    assert idle[2] == idle[5] == []
    assert idle[0] == idle[1] != idle[3] == idle[4]


def test_a_decoder_that_does_not_answer_is_ended() -> None:
    pool = DecodePool(PROCESSOR, Limits(decode_processes=1, decode_timeout_s=0.2))
    try:
        while not pool.pids():
            with suppress(FovealError):
                pool.decode(STILL, MediaOptions())
        (before,) = pool.pids()
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(FovealError, match="decode_timeout"):
            pool.decode(STILL, MediaOptions())
        assert pool.pids() == []
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        # Thousands of nearly empty scans: each is a pass over the whole picture.
        with pytest.raises(FovealError, match="decode_timeout"):
            pool.decode(m.progressive_bomb(2000, 3000), MediaOptions())
        with pytest.raises(FovealError, match="unsupported_media"):
            pool.decode(b"still here", MediaOptions())
    finally:
        pool.close()


def test_the_parent_of_the_decoders_may_die(pool: DecodePool) -> None:
    pool.decode(STILL, MediaOptions())
    pool._parent._process.kill()
    pool._parent._process.wait()
    assert [pool.decode(STILL, MediaOptions()).modality for _ in range(3)] == ["image"] * 3


def test_decoders_that_die_with_their_parent_are_no_fault_of_a_picture() -> None:
    pool = DecodePool(PROCESSOR, Limits(decode_processes=3))
    expected = decode(STILL, MediaOptions(), PROCESSOR, LIMITS)

    async def soon() -> DecodedMedia | None:
        # The lock is what a place waits for that becomes free: meanwhile only places of dead decoders can be had.
        with pool._parent._lock:
            answer = asyncio.create_task(pool.decode_soon(STILL, MediaOptions()))
            await asyncio.wait([answer], timeout=0.5)
        return await answer

    try:
        with ThreadPoolExecutor(3) as threads:
            while len(pool.pids()) < 3:
                list(threads.map(lambda _: pool.decode(CLIP, MediaOptions()), range(3)))
        pids = pool.pids()
        os.kill(pool._parent._process.pid, signal.SIGKILL)
        while any(alive(pid) for pid in pids):
            time.sleep(0.01)
        answer = asyncio.run(soon())
        assert answer is not None
        assert same(answer, expected)
    finally:
        pool.close()


def test_a_parent_that_answers_late_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer must not be taken for the next one: that would name another decoder."""
    pool = DecodePool(PROCESSOR, Limits(decode_processes=1))
    try:
        pool.decode(STILL, MediaOptions())
        parent, (decoder,) = pool._parent._process.pid, pool.pids()
        pool._parent._socket.settimeout(0.2)
        os.kill(parent, signal.SIGSTOP)
        os.kill(decoder, signal.SIGKILL)
        with pytest.raises(FovealError, match="unavailable"):
            pool._parent.fork()
        assert not alive(parent)
        assert same(pool.decode(STILL, MediaOptions()), decode(STILL, MediaOptions(), PROCESSOR, LIMITS))
        assert pool.pids() != [decoder]
    finally:
        pool.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_busy_pool_answers_overloaded() -> None:
    pool = DecodePool(PROCESSOR, Limits(decode_processes=1, decode_timeout_s=5, deadline_s=0.05))
    try:
        place = pool._places.get()
        with pytest.raises(FovealError) as caught:
            pool.decode(STILL, MediaOptions())
        assert (caught.value.code, caught.value.retry_after_s) == ("overloaded", 1)
        pool._places.put(place)
    finally:
        pool.close()
    with pytest.raises(FovealError, match="unavailable"):
        pool.decode(STILL, MediaOptions())
