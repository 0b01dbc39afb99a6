"""The reference's picture sizes and its resampling."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from app.errors import FovealError
from configs.processor import PixelRange

MAX_ASPECT = 200


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise FovealError(
            "aspect_ratio", f"the picture is {width}x{height}: its longer side is over {MAX_ASPECT} times its shorter"
        )


def smart_resize_image(height: int, width: int, factor: int, pixels: PixelRange) -> tuple[int, int]:
    """Resized (height, width) of an image, multiples of `factor`: `smart_resize` of transformers' Qwen2-VL image
    processor, which Qwen3-VL uses.

    Raises:
        FovealError: `aspect_ratio`.
    """
    _check_aspect(height, width)
    # Python's round, to even at a tie, is part of the reference.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > pixels.max_pixels:
        beta = math.sqrt(height * width / pixels.max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < pixels.min_pixels:
        beta = math.sqrt(pixels.min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def smart_resize_video(
    num_frames: int, height: int, width: int, factor: int, temporal: int, pixels: PixelRange
) -> tuple[int, int]:
    """Resized (height, width) of a video's frames: `smart_resize` of transformers' Qwen3-VL video processor.

    The pixel bounds hold for frames * height * width. The reference refuses fewer frames than `temporal`; a lone
    frame is counted here as the pair it will be repeated to.

    Raises:
        FovealError: `aspect_ratio`.
    """
    num_frames = max(num_frames, temporal)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    rounded_frames = round(num_frames / temporal) * temporal
    # The tests use the rounded frame count, beta the raw one: so does the reference.
    if rounded_frames * new_height * new_width > pixels.max_pixels:
        beta = math.sqrt(num_frames * height * width / pixels.max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif rounded_frames * new_height * new_width < pixels.min_pixels:
        beta = math.sqrt(pixels.min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def resize_into(frame: np.ndarray, out: np.ndarray) -> None:
    """Resamples `frame`, uint8 [H, W, 3], into `out`, uint8 [3, H', W']: antialiased bicubic on uint8, as the
    torchvision backend does on a CPU.

    Channels stay innermost while resampling: bit for bit the same result as channels first, several times faster.
    """
    height, width = out.shape[1:]
    if frame.shape[:2] != (height, width):
        source = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1).unsqueeze(0)
        resized = functional.interpolate(source, size=(height, width), mode="bicubic", antialias=True)
        frame = resized.squeeze(0).permute(1, 2, 0).numpy()
    for channel in range(3):
        out[channel] = frame[..., channel]
