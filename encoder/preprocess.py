"""uint8 frames -> normalised patches, in the order of the Qwen3-VL processors of `transformers`."""

from __future__ import annotations

import torch

from encoder.frames import MERGE, PATCH, TEMPORAL, check_frames


def patchify(frames: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Patches of one item, float32 [t * h * w, 3 * 2 * 16 * 16], on the device of `frames`.

    Rows go block by block: (t, h / 2, w / 2, 2, 2); columns: (channel, frame of the pair, y, x). An odd last frame is
    repeated.

    Args:
        frames: uint8 [T, 3, H, W], H and W multiples of 32.
        mean, std: float32 [3], in units of 255.

    Raises:
        ValueError: the frames are not of that shape and dtype.
    """
    check_frames(frames.shape, str(frames.dtype).removeprefix("torch."))
    if frames.shape[0] % TEMPORAL:
        frames = torch.cat((frames, frames[-1:]))
    pixels = (frames.float() - mean[:, None, None]) / std[:, None, None]
    t, h, w = frames.shape[0] // TEMPORAL, frames.shape[2] // PATCH, frames.shape[3] // PATCH
    blocks = pixels.view(t, TEMPORAL, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3 * TEMPORAL * PATCH * PATCH)
