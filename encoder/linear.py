"""How the linear layers of Hopper GPUs are cut into tiles: the tilings, a model of their cost, and the choice by it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import IntEnum

STEP = 64
"""Columns of the contraction that one stage of `linear_sm90` holds: 128 bytes of a row, which is a line of memory."""

OUT_PITCH = 2 * STEP + 16
"""Bytes between a consumer warp's rows of 64 columns on their way out: the rows of a matrix lie in different banks."""

_BLOCKS = 132
# Clock cycles, fitted to 300 measured launches on an H200 (256 to 25088 rows; the error is 13 % on average): _MMA for
# 32 values of a tile and one step, _STEP_ALONE the least that a lone consumer's step takes, _EPILOGUE for a value,
# _TILE for a tile, _LAUNCH for a launch.
_BYTES_PER_CLOCK = 66
_MMA = 1.28
_STEP_ALONE = 200
_EPILOGUE = 0.046
_TILE = 1780
_LAUNCH = 3650
# A rotary epilogue, for every 64 rows of a tile; and a rotary pass of its own, in all and for every value.
_ROTATE = 1150
_ROTARY_LAUNCH = 5400
_ROTARY_VALUE = 0.0026
# Fused must cost less than this share of apart: the model errs.
_FUSED_SHARE = 0.95
# Partial sums are float32, and the kernel behind reads them all.
_PARTIAL_BYTES_PER_CLOCK = _BLOCKS * 14


class Epilogue(IntEnum):
    """What is done to a tile before it is written; `linear_sm90.cu` gets these names and numbers."""

    NONE = 0
    GELU_TANH = 1
    GELU_ERF = 2
    PARTIAL = 3
    ROTARY = 4


@dataclass(frozen=True)
class LinearTiling:
    """How `linear_sm90` cuts work.

    Args:
        m64: row tiles of 64 that one consumer warpgroup holds.
        block_n: columns of a tile.
        consumers: warpgroups that multiply.
        stages: steps of the contraction in flight.
        pingpong: the consumers take turns with tiles of their own instead of sharing each tile.
        cluster: blocks below each other that share the loads of the weights.
        splits: parts that the contraction is cut into.
    """

    m64: int
    block_n: int
    consumers: int
    stages: int
    pingpong: bool = False
    cluster: int = 1
    splits: int = 1

    @property
    def block_m(self) -> int:
        return 64 * self.m64 * (1 if self.pingpong else self.consumers)

    @property
    def shared_bytes(self) -> int:
        """Of a block: the stages, and for each consumer warp 16 padded rows of 64 columns on their way out."""
        return self.stages * (self.block_m + self.block_n) * 2 * STEP + 4 * self.consumers * 16 * OUT_PITCH

    @property
    def may_split(self) -> bool:
        """Where consumers take turns there are more tiles than blocks, and nothing to gain by cutting them."""
        return not self.pingpong

    def goes_with(self, epilogue: Epilogue, head_dim: int) -> bool:
        """Whether a tile can be finished so: rotation needs whole heads."""
        if epilogue == Epilogue.ROTARY:
            return self.block_n % head_dim == 0
        return self.may_split or epilogue != Epilogue.PARTIAL

    def grid(self, rows: int, cols: int, multiprocessors: int) -> int:
        """Blocks of a launch: whole clusters, no more than there are tiles or multiprocessors."""
        tiles = -(-rows // (self.block_m * self.cluster)) * -(-cols // self.block_n) * self.splits
        return min(tiles, multiprocessors // self.cluster) * self.cluster


# About as many stages as fit, since a launch fills them while the kernel before it ends; and always over half of a
# multiprocessor's shared memory, since of two blocks on one the second should be on another.
TILINGS = (
    LinearTiling(1, 64, 1, 12),
    LinearTiling(1, 96, 1, 10),
    LinearTiling(1, 128, 1, 9),
    LinearTiling(1, 144, 1, 8),
    LinearTiling(1, 144, 1, 8, cluster=2),
    LinearTiling(1, 96, 2, 7),
    LinearTiling(1, 192, 2, 5),
    LinearTiling(1, 208, 2, 4),
    LinearTiling(1, 240, 2, 4),
    LinearTiling(2, 144, 2, 4),
    LinearTiling(2, 128, 2, 6, pingpong=True),
    LinearTiling(2, 144, 2, 6, pingpong=True),
    LinearTiling(2, 160, 2, 5, pingpong=True),
)
MAX_SPLITS = 6


def tiling_cost(tiling: LinearTiling, rows: int, cols: int, inner: int, rotary: bool = False) -> float:
    """Modelled clock cycles of [rows, inner] x [cols, inner]^T on 132 multiprocessors.

    Tiles run in waves. A step takes as long as its products or, if that is longer, its loads. Where consumers take
    turns, one writes its tile out while the other multiplies; of a rotation the last tile's still shows.
    """
    row_tiles = -(-rows // (tiling.block_m * tiling.cluster)) * tiling.cluster
    waves = -(-row_tiles * -(-cols // tiling.block_n) * tiling.splits // _BLOCKS)
    steps = -(-inner // (STEP * tiling.splits))
    area = tiling.block_m * tiling.block_n
    loads = (tiling.block_m + tiling.block_n / tiling.cluster) * 2 * STEP / _BYTES_PER_CLOCK
    step = max(_MMA * area / 32, loads, _STEP_ALONE if tiling.consumers == 1 else 0)
    epilogue = 0 if tiling.pingpong else _EPILOGUE * area
    rotate = _ROTATE * tiling.block_m / 64 * (1 if tiling.pingpong else waves) if rotary else 0
    reader = rows * cols * 4 * tiling.splits / _PARTIAL_BYTES_PER_CLOCK if tiling.splits > 1 else 0
    return waves * (steps * step + epilogue + _TILE) + _LAUNCH + rotate + reader


@functools.lru_cache(maxsize=4096)
def choose_linear_tiling(rows: int, cols: int, inner: int, may_split: bool = False) -> LinearTiling:
    """The cheapest of `TILINGS` by `tiling_cost`, cut into parts of at least four steps where that may be done."""
    parts = min(MAX_SPLITS, -(-inner // STEP) // 4) if may_split else 1
    candidates = [replace(t, splits=s) for t in TILINGS for s in range(1, max(parts, 1) + 1) if s == 1 or t.may_split]
    return min(candidates, key=lambda t: tiling_cost(t, rows, cols, inner))


@functools.lru_cache(maxsize=4096)
def choose_rotary_tiling(rows: int, cols: int, inner: int, head_dim: int) -> LinearTiling | None:
    """The cheapest of `TILINGS` whose columns are whole heads, for q, k and v of which q and k are rotated on the way
    out; None where another one and a rotary pass of its own are cheaper, or there is none."""
    candidates = [t for t in TILINGS if t.goes_with(Epilogue.ROTARY, head_dim)]
    if not candidates:
        return None
    best = min(candidates, key=lambda t: tiling_cost(t, rows, cols, inner, rotary=True))
    apart = tiling_cost(choose_linear_tiling(rows, cols, inner), rows, cols, inner)
    apart += _ROTARY_LAUNCH + _ROTARY_VALUE * rows * (cols // 3 * 2)
    return best if tiling_cost(best, rows, cols, inner, rotary=True) < _FUSED_SHARE * apart else None


def loadable(address: int, pitch: int) -> bool:
    """Whether rows of 16-bit elements at `address`, `pitch` elements apart, start at multiples of 16 bytes."""
    return address % 16 == 0 and pitch % 8 == 0


def aligned_pitch(cols: int) -> int:
    """The least pitch of 16-bit elements whose rows start at multiples of 128 bytes."""
    return -(-cols // STEP) * STEP
