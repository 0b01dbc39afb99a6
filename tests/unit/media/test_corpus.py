"""Every file of the corpus has exactly its expected outcome, by the reference processors."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from app.errors import FovealError
from app.media.types import DecodedMedia
from tests.unit.media import corpus
from tests.unit.media.corpus import Case, Clip, Refused, Still
from tests.unit.media.reference import (
    grid,
    patches,
    reference_image,
    reference_indices,
    reference_video,
)

PAGE = Path(__file__).parents[3] / "docs" / "media.md"


def test_corpus_is_large_and_names_are_unique(cases: dict[str, list[Case]]) -> None:
    names = Counter((case.group, case.name) for case in chain(*cases.values()))
    assert len(names) >= 300
    assert max(names.values()) == 1


@pytest.mark.parametrize("group", [g.__name__ for g in corpus.GROUPS])
def test_outcomes(group: str, cases: dict[str, list[Case]]) -> None:
    if group not in cases:
        pytest.skip("the optional package pillow-heif is not installed")
    failures = []
    for case in cases[group]:
        try:
            check(case, corpus.outcome(case))
        except AssertionError as e:
            failures.append(f"{case.group} / {case.name}: {e}")
    assert not failures, "\n".join(failures)


def test_table_in_the_documentation_is_current(cases: dict[str, list[Case]]) -> None:
    if "heifs" not in cases:
        pytest.skip("the table has rows of the optional package pillow-heif, which is not installed")
    page = PAGE.read_text()
    current = corpus.page_with(corpus.table(chain(*cases.values())), page)
    assert current == page, "run `python -m tests.unit.media.corpus docs/media.md`"


def check(case: Case, result: DecodedMedia | FovealError) -> None:
    if isinstance(case.expect, Refused):
        assert isinstance(result, FovealError), f"decoded to {getattr(result, 'frames', np.empty(0)).shape}"
        assert (result.code, result.param) == (case.expect.code, case.expect.param), result.message
        assert case.expect.says.lower() in result.message.lower(), result.message
        assert 400 <= result.status < 500
        return
    assert isinstance(result, DecodedMedia), getattr(result, "message", "")
    assert result.frames.flags.c_contiguous
    assert result.frames.dtype == np.uint8
    if isinstance(case.expect, Still):
        check_still(case, case.expect, result)
    else:
        check_clip(case, case.expect, result)


def check_still(case: Case, expect: Still, result: DecodedMedia) -> None:
    values, reference_grid = reference_image(expect.rgb, case.options.min_pixels, case.options.max_pixels)
    assert (result.modality, result.timestamps, result.num_frames) == ("image", None, 1)
    assert grid(result) == reference_grid
    assert_same(patches(result), values)


def check_clip(case: Case, expect: Clip, result: DecodedMedia) -> None:
    indices = expected_indices(case, expect)
    assert result.modality == "video"
    assert result.num_frames == len(indices)
    shown = [expect.frames[i] for i in indices]
    if len(shown) == 1:
        shown *= 2
    if len({f.shape for f in shown}) > 1:
        check_changing_size(shown, result)
    else:
        values, reference_grid = reference_video(np.stack(shown), case.options.min_pixels, case.options.max_pixels)
        assert grid(result) == reference_grid
        assert_same(patches(result), values)
    times = [float(expect.times[i]) for i in indices]
    times += times[-1:] * (len(times) % 2)
    assert result.timestamps is not None
    assert result.timestamps.dtype == np.float32
    # Matroska and WebM round to milliseconds.
    np.testing.assert_allclose(result.timestamps, np.reshape(times, (-1, 2)).mean(1), atol=1.01e-3, rtol=1e-6)


def expected_indices(case: Case, expect: Clip) -> list[int]:
    total, options = len(expect.frames), case.options
    wanted = None if options.num_frames is None else min(options.num_frames, total)
    indices = reference_indices(total, expect.rate, None if options.fps is None else min(options.fps, 1e6), wanted)
    if expect.constant or len(indices) == total:
        return indices
    grid_times = [expect.times[-1] * Fraction(k, max(len(indices) - 1, 1)) for k in range(len(indices))]
    return [min(range(total), key=lambda i: (abs(expect.times[i] - when), i)) for when in grid_times]


def check_changing_size(shown: list[np.ndarray], result: DecodedMedia) -> None:
    from torchvision.transforms.v2 import InterpolationMode, functional

    _, (_, h, w) = reference_video(np.stack([shown[0]] * len(shown)))
    assert (result.height, result.width) == (h * 16, w * 16)
    for ours, frame in zip(result.frames, shown, strict=True):
        picture = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)
        expected = functional.resize(picture, [h * 16, w * 16], interpolation=InterpolationMode.BICUBIC, antialias=True)
        assert_same(torch.from_numpy(ours), expected)


def assert_same(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.shape == reference.shape, f"{tuple(ours.shape)} against {tuple(reference.shape)}"
    difference = (ours.float() - reference.float()).abs().max().item()
    assert difference == 0, f"pixel values differ by up to {difference}"
