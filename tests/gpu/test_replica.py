"""A pool's replica on the GPU, without Serve around it: what it captures, measures and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="the replicas need Ray")

from configs.settings import GraphSettings, Settings, VideoSettings
from deployments.eager import EagerReplica
from deployments.image_graph import ImageReplica
from deployments.pool import PoolReplica
from deployments.protocol import EncodeCall, EncodeItem, EncodeResult
from deployments.video_graph import VideoReplica

SETTINGS = Settings(
    device="cuda",
    image=GraphSettings(token_budgets=(64, 256)),
    video=VideoSettings(token_budgets=(64, 256), t_capture=4),
)


def frames(count: int, side: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, side, side), np.uint8)


@pytest.fixture(scope="module")
def replicas() -> Iterator[dict[str, PoolReplica]]:
    kinds: dict[str, Any] = {"image": ImageReplica, "video": VideoReplica, "eager": EagerReplica}
    made = {name: kind(SETTINGS) for name, kind in kinds.items()}
    yield made
    for replica in made.values():
        replica._batcher.close()


def encode(replica: PoolReplica, *items: EncodeItem) -> list[EncodeResult]:
    return asyncio.run(replica.encode(EncodeCall("ingress", list(items)))).results


@pytest.mark.parametrize("modality", ["image", "video"])
def test_graphs_answer_as_the_eager_pool_does(replicas: dict[str, PoolReplica], modality: Any) -> None:
    items = [EncodeItem(modality, frames(1 if modality == "image" else 8, 64 + 32 * i, i)) for i in range(6)]
    graph, eager = encode(replicas[modality], *items), encode(replicas["eager"], *items)
    for a, b in zip(graph, eager, strict=True):
        assert (a.execution, b.execution, a.error, b.error, a.dtype) == ("graph", "eager", None, None, "bfloat16")
        assert a.embeddings is not None
        assert b.embeddings is not None
        left, right = ((r.astype(np.uint32) << 16).view(np.float32) for r in (a.embeddings, b.embeddings))
        assert np.linalg.norm(left - right) < 0.02 * np.linalg.norm(right)


def test_what_the_replicas_tell(replicas: dict[str, PoolReplica]) -> None:
    for name, replica in replicas.items():
        encode(replica, EncodeItem("video" if name == "video" else "image", frames(1, 128, 1)))
        state = asyncio.run(replica.state())
        assert (state.device, state.backend) == ("cuda:0", "eager" if name == "eager" else "cuda-graph")
        assert state.busy_s > 0
        assert state.fault is None
        report = asyncio.run(replica.record_autoscaling_stats())
        assert report == {"foveal_queued_work": 0.0, "foveal_busy": 0.0}
    costs = [replica._work._costs for replica in replicas.values()]
    for table in costs:
        assert all(0 < seconds < 1 for seconds in table.graph.values())
        assert all(0 < seconds < 1 for _, seconds in table.eager)
