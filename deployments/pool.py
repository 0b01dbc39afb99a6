"""What the replicas of all three pools share: a runner, its batcher and the health latch."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

from configs.processor import ProcessorConfig
from configs.settings import EagerSettings, GraphSettings, Settings, VideoSettings, change_pool
from deployments.batcher import SWITCH_INTERVAL_S, Batcher, all_done
from deployments.lane import LaneOffer, LaneServer, node_id
from deployments.metrics import ReplicaMetrics
from deployments.protocol import EncodeCall, EncodeReply, EncodeResult, PoolName, ReplicaState
from deployments.work import WorkMeter, cost_table
from encoder.budgets import PackLimits, default_token_budgets
from encoder.checkpoint import resolve_checkpoint
from encoder.runner import EncoderRunner, resolve_device

# A batch is taken for hung after so many times `limits.deadline_s`.
HUNG_DEADLINES = 3
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
    """Serves `encode` calls. Graphs are captured in the constructor, so a replica is not ready before.

    Args:
        limits_of: what one batch of the pool takes by its settings.
        token_budgets: those to capture.
    """

    def __init__(
        self,
        pool: PoolName,
        settings: Settings,
        limits_of: Callable[[Settings], PackLimits],
        token_budgets: Mapping[str, Sequence[int]],
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._pool, self._settings, self._limits_of = pool, settings, limits_of
        own: GraphSettings | EagerSettings = getattr(settings, pool)
        limits = limits_of(settings)
        folder = resolve_checkpoint(settings.model)
        processor = ProcessorConfig.from_checkpoint(folder)
        self._token_budgets = tuple(budget for budgets in token_budgets.values() for budget in budgets)
        self._t_capture = own.t_capture if isinstance(own, VideoSettings) else None
        self._id = uuid4().hex
        self.calls = 0
        self._runner = EncoderRunner.from_checkpoint(
            folder,
            device=settings.device,
            dtype=settings.dtype,
            token_budgets=token_budgets,
            max_batch_size=own.max_batch_size,
            t_capture=settings.video.t_capture,
            image_mean=processor.image_mean,
            image_std=processor.image_std,
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
        self._lock = threading.Lock()
        self._lanes = LaneServer(node_id(), self._id, self._put, self._batcher.drop)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it with the deployment's `user_config` at the start and when it changes.

        Raises:
            ValueError: a name that is no field of `PoolUserConfig`, or a value that the settings refuse.
        """
        settings = change_pool(self._settings, self._pool, user_config)
        own: GraphSettings | EagerSettings = getattr(settings, self._pool)
        captured: int = getattr(self._settings, self._pool).max_batch_size
        if self._token_budgets and own.max_batch_size > captured:
            raise ValueError(f"max_batch_size ({own.max_batch_size}) is over the {captured} that the graphs hold")
        self._work.limits = self._limits_of(settings)
        self._batcher.configure(self._work.limits, own.max_queued_items, own.max_queued_bytes)

    async def encode(self, call: EncodeCall) -> EncodeReply:
        """The items' results. Cancelling the call drops those that still wait, and stops what can be stopped."""
        futures = self._put(call)
        try:
            await all_done(futures)
        except asyncio.CancelledError:
            self._batcher.drop({item.id for item in call.items})
            raise
        return EncodeReply(self._id, [future.result() for future in futures])

    async def lane(self, offer: LaneOffer) -> bool:
        """Serves calls past the handle, as long as the ingress likes; False if it is on another node."""
        return await self._lanes.serve(offer)

    async def drop(self, ids: Collection[str]) -> None:
        """Forgets those of the items that wait here: nobody waits for them any more."""
        self._batcher.drop(ids)

    def _put(self, call: EncodeCall) -> list[Future[EncodeResult]]:
        with self._lock:
            self.calls += 1
        self._work.note_behind(call.ingress, call.tokens_behind)
        futures = self._batcher.put(call.items)
        for item, future in zip(call.items, futures, strict=True):
            self._work.add(item.size, future)
        return futures

    async def state(self) -> ReplicaState:
        stats = self._runner.stats()
        return ReplicaState(
            backend=self._runner.backend,
            attention=self._runner.attention,
            linears=self._runner.linears,
            device=self._runner.device,
            dtype=self._runner.dtype,
            width=self._runner.width,
            main_width=self._runner.main_width,
            token_budgets=self._token_budgets,
            t_capture=self._t_capture,
            limits=self._work.limits,
            calls=self.calls,
            lane_calls=self._lanes.calls,
            batches=self._batcher.batches,
            busy_s=self._batcher.busy_s,
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
        """Raises once a batch has failed as a whole, for ever, or while one does not end: Serve then replaces the
        replica. A device that hangs tells nobody, and by then every request that the batch served has got its 504."""
        if self._batcher.fault is not None:
            raise RuntimeError(self._batcher.fault)
        if (seconds := self._batcher.running_s()) > HUNG_DEADLINES * self._settings.limits.deadline_s:
            raise RuntimeError(f"a batch has been running for {seconds:.0f} s")


def graph_budgets(settings: Settings, own: GraphSettings) -> list[int]:
    """The budgets to capture: those that the settings name, or what suits the device."""
    device_type = resolve_device(settings.device).partition(":")[0]
    return list(own.token_budgets) or default_token_budgets(device_type, own.min_tokens, own.max_tokens)
