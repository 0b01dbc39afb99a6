"""Target sizes and resampling against the reference, value by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.errors import FovealError
from app.media.resize import resize_into, smart_resize_image, smart_resize_video
from configs.processor import PixelRange

SIDES = st.integers(1, 9000)
RANGES = st.tuples(st.integers(1, 200_000), st.integers(0, 20_000_000)).map(lambda p: PixelRange(p[0], p[0] + p[1]))


@given(height=SIDES, width=SIDES, pixels=RANGES)
def test_image_sizes(height: int, width: int, pixels: PixelRange) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    if max(height, width) > 200 * min(height, width):
        with pytest.raises(FovealError, match="aspect_ratio"):
            smart_resize_image(height, width, 32, pixels)
        return
    expected = smart_resize(height, width, 32, pixels.min_pixels, pixels.max_pixels)
    assert smart_resize_image(height, width, 32, pixels) == expected


@given(frames=st.integers(2, 800), height=SIDES, width=SIDES, pixels=RANGES)
def test_video_sizes(frames: int, height: int, width: int, pixels: PixelRange) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    try:
        expected = smart_resize(frames, height, width, 2, 32, pixels.min_pixels, pixels.max_pixels)
    except ValueError:
        with pytest.raises(FovealError, match="aspect_ratio"):
            smart_resize_video(frames, height, width, 32, 2, pixels)
        return
    assert smart_resize_video(frames, height, width, 32, 2, pixels) == expected


def test_a_lone_frame_is_sized_as_the_pair_it_becomes() -> None:
    pixels = PixelRange(4096, 100_000)
    assert smart_resize_video(1, 700, 500, 32, 2, pixels) == smart_resize_video(2, 700, 500, 32, 2, pixels)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((48, 64), (64, 96)),
        ((300, 500), (96, 160)),
        ((37, 1001), (32, 1024)),
        ((5, 5), (256, 256)),
        ((900, 70), (896, 64)),
    ],
)
def test_resampling(source: tuple[int, int], target: tuple[int, int]) -> None:
    from torchvision.transforms.v2 import InterpolationMode, functional

    frame = np.random.default_rng(0).integers(0, 256, (*source, 3), dtype=np.uint8)
    for layout in (frame, frame[::-1, ::-1], frame.transpose(1, 0, 2).copy().transpose(1, 0, 2)):
        ours = np.empty((3, *target), np.uint8)
        resize_into(layout, ours)
        planar = torch.from_numpy(layout.copy()).permute(2, 0, 1).contiguous()
        reference = functional.resize(planar, list(target), interpolation=InterpolationMode.BICUBIC, antialias=True)
        assert np.array_equal(ours, reference.numpy())


def test_same_size_is_copied() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    ours = np.empty((3, 32, 64), np.uint8)
    resize_into(frame, ours)
    assert np.array_equal(ours, frame.transpose(2, 0, 1))
