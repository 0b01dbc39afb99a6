"""What decoding may cost: memory by a decoder's own peak, time by its deadline."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import ImageFile

from app.errors import FovealError
from app.media.decode import decode
from app.media.pool import DecodePool
from app.media.types import MediaOptions
from configs.settings import Limits
from tests.unit.media import makers as m
from tests.unit.media.reference import PROCESSOR

STILL = m.save(m.scene(48, 64), "JPEG")
MIB = 1 << 20


LIMITS = Limits(decode_processes=1, max_pixels=8_000_000, max_tokens=10_000_000)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(PROCESSOR, LIMITS)
    yield pool
    pool.close()


@pytest.fixture
def decoder(pool: DecodePool) -> tuple[DecodePool, int]:
    """The pool with a fresh decoder, and its process id."""
    for pid in pool.pids():
        os.kill(pid, 9)
    pool.decode(STILL, MediaOptions())
    return pool, pool.pids()[0]


def peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def bombs() -> dict[str, bytes]:
    row = np.zeros((1, 1, 3), np.uint8)
    jpeg = m.save(row, "JPEG")
    bmp = m.save(row, "BMP")
    tiff = m.save(row, "TIFF")
    width = tiff.index(struct.pack("<HHI", 256, 4, 1)) if struct.pack("<HHI", 256, 4, 1) in tiff else -1
    webm = m.clip(m.movie(2, 512, 512), "webm", "libvpx-vp9")
    bombs = {
        "PNG": m.png(row, 8, 2, size=(100_000, 100_000)),
        "JPEG": m.patch(jpeg, m.jpeg_frame_header(jpeg) + 5, struct.pack(">HH", 65000, 65000)),
        "BMP": m.patch(bmp, 18, struct.pack("<ii", 60000, 60000)),
        "GIF": m.gif((65000, 65000), np.zeros((256, 3)), [m.GifFrame(np.zeros((2, 2), int))]),
        "animated PNG": m.png_set_chunk(m.animate(m.movie(3), "PNG", 10), b"IHDR", 0, struct.pack(">II", 50000, 50000)),
        "animated WebP": _webp_canvas(m.animate(m.movie(3), "WEBP", 10)),
        "MP4": _mp4_size(m.clip(m.movie(2), "mp4", "mpeg4"), 40000, 40000),
        "VP9": webm.replace(
            struct.pack(">BBHBBH", 0xB0, 0x82, 512, 0xBA, 0x82, 512), b"\xb0\x82\x7f\xff\xba\x82\x7f\xff"
        ),
    }
    if width >= 0:
        bombs["TIFF"] = m.patch(tiff, width + 8, struct.pack("<I", 400_000_000))
    return bombs


def _webp_canvas(data: bytes) -> bytes:
    at = data.index(b"VP8X") + 12
    return m.patch(data, at, (16383).to_bytes(3, "little") * 2)


def _mp4_size(data: bytes, width: int, height: int) -> bytes:
    return m.patch(data, data.index(b"mp4v") + 4 + 24, struct.pack(">HH", width, height))


def outcome(pool: DecodePool, data: bytes) -> str:
    try:
        return pool.decode(data, MediaOptions()).modality
    except FovealError as e:
        return e.code


def test_bombs_cost_no_memory(decoder: tuple[DecodePool, int]) -> None:
    pool, pid = decoder
    before = peak(pid)
    outcomes = {}
    for name, data in bombs().items():
        outcomes[name] = outcome(pool, data)
    assert peak(pid) - before < 24 * MIB
    assert pool.pids() == [pid]
    # The size that a clip's container claims is nothing to a decoder: its frames have their own.
    assert (outcomes.pop("VP9"), outcomes.pop("MP4")) == ("video", "video")
    assert set(outcomes.values()) == {"too_many_pixels"}, outcomes


def test_the_header_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [m.save(m.scene(100, 100), format) for format in ("PNG", "JPEG", "BMP", "TIFF", "JPEG2000", "WEBP")]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("pixels were decoded"))
    for data in pictures:
        with pytest.raises(FovealError, match="too_many_pixels"):
            decode(data, MediaOptions(), PROCESSOR, Limits(max_pixels=1000))


def test_memory_is_bounded_by_the_sampled_frames(decoder: tuple[DecodePool, int]) -> None:
    """400 frames of 640x480 are 369 MB as RGB; four of them at target size are 4 MB."""
    pool, pid = decoder
    frames = [np.roll(m.scene(480, 640), i, axis=1) for i in range(20)]
    data = m.clip(frames * 20, "mp4", "mpeg4", rate=100)
    before = peak(pid)
    media = pool.decode(data, MediaOptions(num_frames=4))
    assert media.frames.shape == (4, 3, 480, 640)
    assert peak(pid) - before < 96 * MIB


def test_a_worst_legal_picture_fits_in_what_a_decoder_may_use(decoder: tuple[DecodePool, int]) -> None:
    """16 bits and alpha, as many pixels as the limit allows: under 24 bytes a pixel."""
    pool, pid = decoder
    data = m.png(np.zeros((2000, 4000, 4), np.uint16), 16, 6)
    before = peak(pid)
    assert pool.decode(data, MediaOptions()).modality == "image"
    assert peak(pid) - before < 24 * LIMITS.max_pixels


def test_a_decoder_that_runs_out_of_memory_says_so(decoder: tuple[DecodePool, int]) -> None:
    pool, pid = decoder
    with pytest.raises(FovealError, match="too_many_pixels"):
        pool.decode(STILL, MediaOptions(min_pixels=9_000_000_000, max_pixels=9_500_000_000))
    assert pool.pids() == [pid]


@pytest.mark.parametrize(
    "data",
    [
        m.clip(m.movie(60), "mp4", "libx264", preset="ultrafast"),
        m.animate(m.movie(60), "PNG", 10),
        m.animate(m.movie(60), "GIF", 10),
        STILL,
    ],
    ids=["clip", "APNG", "GIF", "JPEG"],
)
def test_the_deadline_is_checked_on_the_way(data: bytes) -> None:
    with pytest.raises(FovealError, match="decode_timeout"):
        decode(data, MediaOptions(), PROCESSOR, Limits(decode_timeout_s=1e-9))


def test_a_clip_is_decoded_once_when_its_packets_keep_their_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    open_container = av.open
    monkeypatch.setattr(av, "open", lambda *a, **k: opened.append("") or open_container(*a, **k))
    frames = m.movie(40)
    decode(m.clip(frames, "mp4", "libx264"), MediaOptions(), PROCESSOR, Limits())
    writes = 1
    assert len(opened) - writes == 2, "once to demux, once to decode"
    opened.clear()
    hidden = m.clip(frames, "webm", "libvpx", **{"auto-alt-ref": "1", "lag-in-frames": "16"})
    decode(hidden, MediaOptions(), PROCESSOR, Limits())
    assert len(opened) - writes in (2, 3), "once more when packets hold frames that are not shown"


def test_frames_that_grow_over_the_limit_are_not_made() -> None:
    small, large = (m.clip(m.movie(12, h, w), "mpegts", "libx264") for h, w in ((48, 64), (480, 640)))
    media = decode(small + large, MediaOptions(num_frames=500), PROCESSOR, Limits(max_pixels=100_000))
    # A decoder drops what it still held when a frame fails.
    assert 8 <= media.num_frames <= 12
    assert (media.height, media.width) == (64, 64)
    assert decode(small + large, MediaOptions(num_frames=500), PROCESSOR, Limits()).num_frames == 24


def test_time_base_is_exact() -> None:
    data = m.clip(m.movie(10), "mp4", "libx264", rate=Fraction(30000, 1001))
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].average_rate == Fraction(30000, 1001)
    media = decode(data, MediaOptions(num_frames=10), PROCESSOR, Limits())
    expected = np.float32([(2 * i + 0.5) * 1001 / 30000 for i in range(5)])
    np.testing.assert_allclose(media.timestamps, expected, rtol=1e-6)
