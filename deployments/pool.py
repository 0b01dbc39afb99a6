"""What the replicas of all three pools share: a runner, its batcher and the health latch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from configs.processor import ProcessorConfig
from configs.settings import EagerSettings, GraphSettings, Settings, VideoSettings
from deployments.batcher import Batcher, Size
from deployments.metrics import ReplicaMetrics
from deployments.protocol import EncodeItem, EncodeResult, PoolName, ReplicaState
from deployments.work import WorkMeter, cost_table
from encoder.budgets import PackLimits, default_token_budgets
from encoder.checkpoint import resolve_checkpoint
from encoder.runner import EncoderRunner, resolve_device

# Serve's defaults for a pool, overridden under `deployments:` in serve_config.yaml. The batcher is the queue: calls are
# let through to it, and it refuses what it has no room for.
POOL_OPTIONS: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0.25},
    "max_ongoing_requests": 256,
    "max_queued_requests": 256,
    "health_check_period_s": 1,
    "health_check_timeout_s": 10,
    "graceful_shutdown_timeout_s": 30,
}


class PoolReplica:
    """Serves `encode` calls. Graphs are captured in the constructor, so a replica is not ready before."""

    def __init__(
        self,
        pool: PoolName,
        settings: Settings,
        own: GraphSettings | EagerSettings,
        limits: PackLimits,
        token_budgets: Mapping[str, Sequence[int]],
    ) -> None:
        folder = resolve_checkpoint(settings.model)
        self._config = ProcessorConfig.from_checkpoint(folder)
        self._token_budgets = tuple(budget for budgets in token_budgets.values() for budget in budgets)
        self._t_capture = own.t_capture if isinstance(own, VideoSettings) else None
        self._max_batch_size = own.max_batch_size
        self._runner = EncoderRunner.from_checkpoint(
            folder,
            device=settings.device,
            dtype=settings.dtype,
            token_budgets=token_budgets,
            max_batch_size=own.max_batch_size,
            t_capture=settings.video.t_capture,
            image_mean=self._config.image_mean,
            image_std=self._config.image_std,
        )
        self._work = WorkMeter(cost_table(self._runner), limits)
        self._batcher = Batcher(
            pool,
            self._runner,
            limits,
            ReplicaMetrics(pool, self._token_budgets, self._runner.stats),
            max_queued_items=own.max_queued_items,
            max_queued_bytes=own.max_queued_bytes,
        )

    async def encode(self, items: list[EncodeItem]) -> list[EncodeResult]:
        """The items' results, in order. Cancelling the call drops those that still wait."""
        futures = []
        for item in items:
            size = self._size(item)
            futures.append(self._batcher.put(item, size))
            self._work.add(size, futures[-1])
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    async def state(self) -> ReplicaState:
        stats = self._runner.stats()
        return ReplicaState(
            backend=self._runner.backend,
            attention=self._runner.attention,
            device=self._runner.device,
            dtype=self._runner.dtype,
            token_budgets=self._token_budgets,
            t_capture=self._t_capture,
            max_batch_size=self._max_batch_size,
            hits=stats["hits"],
            misses=stats["misses"],
            budget_tokens=stats["budget_tokens"],
            used_tokens=stats["used_tokens"],
            queue=self._batcher.state(),
            fault=self._batcher.fault,
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve collects while `autoscaling_config` is set; read by `deployments.autoscaling`."""
        return self._work.report()

    def check_health(self) -> None:
        """Raises once a batch has failed as a whole, for ever: Serve then replaces the replica."""
        if self._batcher.fault is not None:
            raise RuntimeError(self._batcher.fault)

    def _size(self, item: EncodeItem) -> Size:
        frames, _, height, width = item.frames.shape
        grid = self._config.grid_thw(frames, height, width)
        return Size(item.modality, self._config.num_tokens(grid), grid[0])


def graph_budgets(settings: Settings, own: GraphSettings) -> list[int]:
    """The budgets to capture: those that the settings name, or what suits the device."""
    device_type = resolve_device(settings.device).partition(":")[0]
    return list(own.token_budgets) or default_token_budgets(device_type, own.min_tokens, own.max_tokens)
