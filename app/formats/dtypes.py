"""Casts between the response dtypes in numpy, which has no bfloat16: its bits travel as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np

NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}


def cast(array: np.ndarray, source: str, target: str) -> np.ndarray:
    """`array` in the dtype `target`; the same array if it already is. Rounds to nearest, ties to even; keeps NaN.

    Args:
        array: float32, float16, or uint16 holding bfloat16 bits, as `source` says.
    """
    if source == target:
        return array
    wide = (array.astype(np.uint32) << 16).view(np.float32) if source == "bfloat16" else array
    if target != "bfloat16":
        with np.errstate(over="ignore"):  # Past float16's range lies infinity, as in torch.
            return wide.astype(NUMPY[target])
    bits = np.ascontiguousarray(wide, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding could carry a NaN's payload over into infinity; a quiet NaN of the same sign stays one.
    return np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded).astype(np.uint16)
