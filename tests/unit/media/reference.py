"""The reference: transformers' own Qwen3-VL processors, torchvision backend, with the released constants."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch

from app.media.types import DecodedMedia
from configs.processor import ProcessorConfig

PROCESSOR = ProcessorConfig()
_CONSTANTS: dict[str, Any] = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@cache
def image_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(size={"shortest_edge": 65536, "longest_edge": 16777216}, **_CONSTANTS)


@cache
def video_processor() -> Any:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    size = {"shortest_edge": 4096, "longest_edge": 25165824}
    return Qwen3VLVideoProcessor(size=size, cap_pixels_per_frame=False, **_CONSTANTS)


def reference_image(rgb: np.ndarray, min_pixels: int | None = None, max_pixels: int | None = None) -> tuple[Any, Any]:
    """(pixel_values [N, 1536] float32, grid [3]) of uint8 [H, W, 3]."""
    size = {"shortest_edge": min_pixels or 65536, "longest_edge": max_pixels or 16777216}
    out = image_processor()([np.array(rgb)], return_tensors="pt", size=size, input_data_format="channels_last")
    return out["pixel_values"], out["image_grid_thw"][0].tolist()


def reference_video(
    frames: np.ndarray, min_pixels: int | None = None, max_pixels: int | None = None
) -> tuple[Any, list[int]]:
    """(pixel_values_videos [N, 1536] float32, grid [3]) of sampled frames, uint8 [T, H, W, 3], T >= 2."""
    size = {"shortest_edge": min_pixels or 4096, "longest_edge": max_pixels or 25165824}
    tensor = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)
    out = video_processor()([tensor], return_tensors="pt", do_sample_frames=False, size=size)
    return out["pixel_values_videos"], out["video_grid_thw"][0].tolist()


def reference_indices(total: int, rate: Fraction, fps: float | None = None, num_frames: int | None = None) -> list[int]:
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=float(rate))
    return video_processor().sample_frames(metadata=metadata, fps=fps, num_frames=num_frames).tolist()


def reference_timestamps(indices: list[int], rate: float) -> list[float]:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    return Qwen3VLProcessor._calculate_timestamps(None, list(indices), rate, 2)


def patches(media: DecodedMedia) -> Any:
    """Our frames, normalised in float32 and cut by the reference's own `patchify`."""
    pixels = (torch.from_numpy(np.array(media.frames)).float() - 127.5) / 127.5
    if media.modality == "image":
        return image_processor().patchify(pixels, 16, 2, 2)[0][0]
    return video_processor().patchify(pixels[None], 16, 2, 2)[0][0]


def grid(media: DecodedMedia) -> list[int]:
    return list(PROCESSOR.grid_thw(media.num_frames, media.height, media.width))
