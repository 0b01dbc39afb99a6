"""The preprocessing constants of a checkpoint, read from its preprocessor_config.json files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PixelRange:
    """Bounds on resized pixels: of one image, or of a whole video (frames * height * width)."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True)
class ProcessorConfig:
    """Defaults are the constants that the released Qwen3-VL checkpoints carry."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image: PixelRange = field(default=PixelRange(65536, 16777216))
    video: PixelRange = field(default=PixelRange(4096, 25165824))
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    @property
    def factor(self) -> int:
        """Sides of a resized picture are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    def grid_thw(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches (t, h, w) of frames whose sides are multiples of `factor`; t = ceil(frames / temporal)."""
        return -(-num_frames // self.temporal_patch_size), height // self.patch_size, width // self.patch_size

    def num_tokens(self, grid_thw: tuple[int, int, int]) -> int:
        t, h, w = grid_thw
        return t * h * w // self.merge_size**2

    @classmethod
    def from_checkpoint(cls, folder: Path) -> ProcessorConfig:
        """Reads `preprocessor_config.json` and `video_preprocessor_config.json` where the folder has them.

        Raises:
            ValueError: the two files disagree, or ask for something that this service does not do.
        """
        image, video = _read(folder / "preprocessor_config.json"), _read(folder / "video_preprocessor_config.json")
        base = cls()
        shared: dict[str, Any] = {}
        for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"):
            values = {_frozen(c[name]) for c in (image, video) if c.get(name) is not None}
            if len(values) > 1:
                raise ValueError(f"{folder}: {name} differs between the image and the video preprocessor config")
            shared[name] = values.pop() if values else getattr(base, name)
        if video.get("cap_pixels_per_frame"):
            raise ValueError(f"{folder}: cap_pixels_per_frame is not supported")
        return cls(
            **shared,
            image=_range(image, base.image),
            video=_range(video, base.video),
            fps=float(video.get("fps") or base.fps),
            min_frames=int(video.get("min_frames") or base.min_frames),
            max_frames=int(video.get("max_frames") or base.max_frames),
        )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _range(config: dict[str, Any], default: PixelRange) -> PixelRange:
    size = config.get("size") or {}
    return PixelRange(
        int(size.get("shortest_edge") or config.get("min_pixels") or default.min_pixels),
        int(size.get("longest_edge") or config.get("max_pixels") or default.max_pixels),
    )
