"""Writes what transformers' own processors make of pictures and clips that a seed defines.

    python -m scripts.make_reference_pixels tests/unit/media/data/reference_pixels.json

For each: the grid, the frames taken, the time stamps, the SHA-256 of the float32 pixel values and a few of them. The
file lets the intake be held against the reference where torchvision is not installed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = [
    (1, 1), (1, 200), (200, 1), (16, 16), (31, 33), (32, 32), (48, 64), (64, 48), (100, 150), (255, 257), (256, 256),
    (300, 500), (37, 1001), (640, 480), (480, 640), (720, 1280), (999, 1), (5, 999), (1024, 768), (1500, 1000),
    (224, 224), (2000, 333), (513, 511), (1080, 1920),
]  # fmt: skip
# Frames, height, width, frames a second.
CLIPS = [
    (2, 48, 64, 2), (3, 48, 64, 2), (4, 100, 60, 1), (5, 31, 33, 2), (8, 64, 64, 4), (9, 20, 90, 10), (16, 120, 160, 8),
    (25, 48, 64, 25), (30, 90, 50, 10), (33, 37, 41, 20), (60, 48, 48, 20), (100, 32, 40, 10),
]  # fmt: skip


def picture(height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3]."""
    return np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def movie(count: int, height: int, width: int) -> np.ndarray:
    """uint8 [T, H, W, 3]."""
    return np.random.default_rng([count, height, width]).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def digest(values: np.ndarray) -> dict[str, Any]:
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    places = np.linspace(0, flat.size - 1, 5).astype(int)
    return {"sha256": hashlib.sha256(flat.tobytes()).hexdigest(), "some": [float(v) for v in flat[places]]}


def main(path: Path) -> None:
    import torch
    import torchvision
    import transformers

    import tests.conftest  # noqa: F401  (makes torchvision importable)
    from tests.unit.media.reference import reference_image, reference_indices, reference_timestamps, reference_video

    images, clips = [], []
    for height, width in SHAPES:
        if max(height, width) > 200 * min(height, width):
            continue
        values, grid = reference_image(picture(height, width))
        images.append({"height": height, "width": width, "grid": grid, **digest(values.numpy())})
    for count, height, width, rate in CLIPS:
        indices = reference_indices(count, Fraction(rate))
        values, grid = reference_video(movie(count, height, width)[indices])
        times = [float(np.float32(t)) for t in reference_timestamps(indices, rate)]
        shape = {"count": count, "height": height, "width": width, "rate": rate}
        clips.append({**shape, "indices": indices, "timestamps": times, "grid": grid, **digest(values.numpy())})
    versions = {m.__name__: m.__version__ for m in (torch, torchvision, transformers, np)}
    path.write_text(json.dumps({"versions": versions, "images": images, "clips": clips}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
