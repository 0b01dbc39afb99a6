"""The part of a checkpoint's config.json that describes the vision tower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoder.frames import MERGE, PATCH, TEMPORAL


@dataclass(frozen=True)
class VisionConfig:
    """The fields of a checkpoint's `vision_config` that the tower depends on."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    rope_theta: float = 10000.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> VisionConfig:
        """Raises ValueError, which names the field, for a tower that is impossible or of another architecture."""
        fixed = {
            "patch_size": PATCH,
            "temporal_patch_size": TEMPORAL,
            "spatial_merge_size": MERGE,
            "in_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
        }
        for name, value in fixed.items():
            if config.get(name, value) != value:
                raise ValueError(f"vision_config.{name} must be {value!r}, got {config[name]!r}")
        names = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size", "num_position_embeddings")
        missing = [n for n in (*names, "deepstack_visual_indexes") if n not in config]
        if missing:
            raise ValueError(f"vision_config lacks {', '.join(missing)}")
        rope = config.get("rope_parameters") or {}
        tower = cls(
            **{n: _whole(n, config[n]) for n in names},
            deepstack_visual_indexes=tuple(config["deepstack_visual_indexes"] or ()),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
        )
        tower._check()
        return tower

    def _check(self) -> None:
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                f"vision_config.num_heads ({self.num_heads}) must divide hidden_size ({self.hidden_size}) "
                "into heads of a multiple of 4"
            )
        levels = list(self.deepstack_visual_indexes)
        if levels != sorted(set(levels) & set(range(self.depth))):
            raise ValueError(
                f"vision_config.deepstack_visual_indexes must be ascending blocks below {self.depth}, got {levels}"
            )
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(
                f"vision_config.num_position_embeddings must be a square, got {self.num_position_embeddings}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def width(self) -> int:
        """Columns of an output row: [main | deepstack 0 | deepstack 1 | ...]."""
        return self.out_hidden_size * (1 + len(self.deepstack_visual_indexes))


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"vision_config.{name} must be a whole number above 0, got {value!r}")
    return value
