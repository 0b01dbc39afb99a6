"""The shape of the uint8 frames that go in, and the grid of patches that they make."""

from __future__ import annotations

PATCH, TEMPORAL, MERGE = 16, 2, 2


def check_frames(shape: tuple[int, ...], dtype: str) -> None:
    """Raises ValueError unless frames of this shape and dtype can be patchified."""
    side = PATCH * MERGE
    if dtype != "uint8" or len(shape) != 4 or shape[1] != 3 or 0 in shape or shape[2] % side or shape[3] % side:
        raise ValueError(
            f"frames must be uint8 [T, 3, H, W] with sides in multiples of {side}, got {dtype} {list(shape)}"
        )


def frames_grid(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """grid_thw of frames [T, 3, H, W]."""
    return -(-shape[0] // TEMPORAL), shape[2] // PATCH, shape[3] // PATCH
