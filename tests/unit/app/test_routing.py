from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing import choose_pool


@pytest.mark.parametrize(
    ("modality", "grid", "tokens", "expected"),
    [
        ("image", (1, 32, 32), 256, ("image", None)),
        ("image", (1, 64, 64), 1024, ("image", None)),
        ("image", (1, 64, 66), 1056, ("eager", "tokens_over_budget")),
        ("video", (1, 4, 4), 4, ("video", None)),
        ("video", (8, 4, 4), 32, ("video", None)),
        ("video", (9, 4, 4), 36, ("eager", "t_over_capture")),
        ("video", (8, 32, 16), 1024, ("video", None)),
        ("video", (8, 32, 18), 1152, ("eager", "tokens_over_budget")),
        ("video", (9, 64, 64), 9216, ("eager", "t_over_capture")),
    ],
)
def test_choose_pool(modality, grid, tokens, expected) -> None:
    assert choose_pool(modality, grid, tokens, t_capture=8, largest_budget=1024) == expected


@given(
    st.sampled_from(["image", "video"]),
    st.tuples(st.integers(1, 400), st.integers(1, 64), st.integers(1, 64)),
    st.integers(1, 32),
    st.integers(1, 20000),
)
def test_what_a_graph_pool_gets_fits_its_graphs(modality, half_grid, t_capture, largest_budget) -> None:
    t, h, w = half_grid if modality == "video" else (1, *half_grid[1:])
    tokens = t * h * w
    pool, reason = choose_pool(modality, (t, 2 * h, 2 * w), tokens, t_capture=t_capture, largest_budget=largest_budget)
    fits = tokens <= largest_budget and (modality == "image" or t <= t_capture)
    assert pool == (modality if fits else "eager")
    assert (reason is None) == fits
