"""A video posted as a list of stills."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.errors import FovealError
from app.media.decode import decode_frames
from app.media.types import MediaOptions
from configs.settings import Limits
from tests.unit.media import makers as m
from tests.unit.media.reference import PROCESSOR, grid, patches, reference_video

FRAMES = m.movie(7)
POSTED = [m.save(f, "PNG") for f in FRAMES]
LIMITS = Limits(max_frames=8, max_pixels=1_000_000)


def test_every_frame_is_taken_and_pixels_equal_the_reference() -> None:
    media = decode_frames(POSTED, MediaOptions(), PROCESSOR, LIMITS)
    values, reference_grid = reference_video(np.stack(FRAMES))
    assert (media.modality, media.num_frames, grid(media)) == ("video", 7, reference_grid)
    assert torch.equal(patches(media), values)
    # The checkpoint's rate is 2 frames a second; the odd last frame counts twice.
    np.testing.assert_allclose(media.timestamps, [0.25, 1.25, 2.25, 3.0])


def test_fps_is_the_rate_they_were_taken_at() -> None:
    media = decode_frames(POSTED[:4], MediaOptions(fps=10), PROCESSOR, LIMITS)
    np.testing.assert_allclose(media.timestamps, [0.05, 0.25], rtol=1e-6)


def test_num_frames_takes_some_evenly() -> None:
    media = decode_frames(POSTED, MediaOptions(num_frames=3), PROCESSOR, LIMITS)
    values, _ = reference_video(np.stack([FRAMES[i] for i in (0, 3, 6)]))
    assert torch.equal(patches(media), values)
    np.testing.assert_allclose(media.timestamps, [0.75, 3.0])


def test_formats_may_mix_and_rotation_is_applied() -> None:
    exif = m.Image.Exif()
    exif[0x0112] = 3
    turned = m.save(np.ascontiguousarray(FRAMES[1][::-1, ::-1]), "WEBP", lossless=True, exif=exif)
    media = decode_frames([POSTED[0], turned], MediaOptions(), PROCESSOR, LIMITS)
    values, _ = reference_video(np.stack(FRAMES[:2]))
    assert torch.equal(patches(media), values)


@pytest.mark.parametrize(
    ("images", "options", "code", "param"),
    [
        ([], MediaOptions(), "malformed_request", None),
        ([b""], MediaOptions(), "empty_body", None),
        ([POSTED[0], b"%PDF-1.4 not a frame"], MediaOptions(), "unsupported_media", None),
        ([POSTED[0], POSTED[1][:-80]], MediaOptions(), "undecodable_media", None),
        ([POSTED[0], m.save(m.scene(20, 20), "PNG")], MediaOptions(), "malformed_request", None),
        ([POSTED[0], m.animate(FRAMES[:3], "PNG", 100)], MediaOptions(), "modality_mismatch", None),
        ([POSTED[0], m.clip(FRAMES[:3], "mp4", "libx264")], MediaOptions(), "modality_mismatch", None),
        (POSTED[:2], MediaOptions(modality="image"), "modality_mismatch", "modality"),
        (POSTED[:2], MediaOptions(fps=0), "invalid_option", "fps"),
        (POSTED[:2], MediaOptions(num_frames=0), "invalid_option", "num_frames"),
        (POSTED[:2], MediaOptions(fps=1, num_frames=2), "invalid_option", "num_frames"),
        (POSTED[:2], MediaOptions(num_frames=9), "invalid_option", "num_frames"),
        (POSTED[:2], MediaOptions(max_pixels=10**12), "invalid_option", "max_pixels"),
        (POSTED[:5] + POSTED[:4], MediaOptions(), "too_many_frames", None),
        (POSTED[:5] + POSTED[:4], MediaOptions(fps=3), "too_many_frames", None),
        ([m.save(m.Image.new("1", (2000, 1000)), "PNG")], MediaOptions(), "too_many_pixels", None),
    ],
)
def test_refusals(images: list[bytes], options: MediaOptions, code: str, param: str | None) -> None:
    with pytest.raises(FovealError) as caught:
        decode_frames(images, options, PROCESSOR, LIMITS)
    assert (caught.value.code, caught.value.param) == (code, param)
