"""Which pool encodes an item. Pure: the same rule that the graphs themselves apply, so what is sent always fits."""

from __future__ import annotations

from typing import Literal

from deployments.protocol import PoolName

Reason = Literal["t_over_capture", "tokens_over_budget"]


def choose_pool(
    modality: Literal["image", "video"],
    grid_thw: tuple[int, int, int],
    num_tokens: int,
    *,
    t_capture: int,
    largest_budget: int,
) -> tuple[PoolName, Reason | None]:
    """The pool and, for the eager one, why.

    Args:
        grid_thw: patches of the item; `t` counts temporal patches.
        num_tokens: visual tokens of the item.
        t_capture: temporal patches that a video may have in a graph.
        largest_budget: tokens of the largest graph of the modality's own pool.
    """
    if modality == "video" and grid_thw[0] > t_capture:
        return "eager", "t_over_capture"
    if num_tokens > largest_budget:
        return "eager", "tokens_over_budget"
    return modality, None
