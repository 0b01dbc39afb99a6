"""The three pools as the ingress sees them: Serve handles, and Serve's exceptions turned into ours."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatusOverview

from app.arena import Arena
from app.dispatch import TWO_DIED, UNCALLABLE, Dispatcher, uncallable
from app.errors import FovealError
from app.lanes import Hub
from deployments.lane import node_id
from deployments.protocol import EncodeItem, EncodeResult, PoolName, ReplicaState

STATE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class PoolView:
    """One pool at one moment: the state of each replica that answered, and what Serve says of it (None if unknown)."""

    name: PoolName
    status: DeploymentStatusOverview | None
    replicas: Sequence[ReplicaState]

    @property
    def running(self) -> int:
        """Replicas that take calls, as Serve counts them."""
        states = self.status.replica_states if self.status else {}
        return sum(count for state, count in states.items() if state == "RUNNING")

    @property
    def state(self) -> str:
        """healthy, idle (scaled to zero on purpose), fault, or starting / unhealthy."""
        if self.status is None:
            return "unknown"
        if any(replica.fault for replica in self.replicas):
            return "fault"
        if self.running:
            return "healthy"
        if self.status.status == "HEALTHY" or self.status.status_trigger == "AUTOSCALING":
            return "idle"
        return "unhealthy" if self.status.status in ("UNHEALTHY", "DEPLOY_FAILED") else "starting"

    @property
    def well(self) -> bool:
        return self.state in ("healthy", "idle")

    def summary(self) -> dict[str, Any]:
        """What `/v1/pools` tells. Counters are sums over the replicas; what replicas agree on is told once."""
        one = self.replicas[0] if self.replicas else None
        used = sum(r.used_tokens for r in self.replicas)
        queue_fields = ("items", "tokens", "bytes", "cancelled", "expired", "rejected")
        return {
            "name": self.name,
            "backend": one and one.backend,
            "attention": one and one.attention,
            "linears": one and one.linears,
            "device": one and one.device,
            "dtype": one and one.dtype,
            "token_budgets": list(one.token_budgets) if one else None,
            "t_capture": one and one.t_capture,
            "max_batch_size": one and one.limits.max_items,
            "replicas": self.running,
            "state": self.state,
            "faults": [r.fault for r in self.replicas if r.fault],
            "hits": sum(r.hits for r in self.replicas),
            "misses": sum(r.misses for r in self.replicas),
            "calls": sum(r.calls for r in self.replicas),
            "lane_calls": sum(r.lane_calls for r in self.replicas),
            "batches": sum(r.batches for r in self.replicas),
            "busy_s": sum(r.busy_s for r in self.replicas),
            "padding_ratio": sum(r.budget_tokens for r in self.replicas) / used if used else None,
            "queue": {name: sum(getattr(r.queue, name) for r in self.replicas) for name in queue_fields},
        }


class Pools:
    """Calls the pools. An ingress holds one."""

    def __init__(self, handles: Mapping[PoolName, DeploymentHandle]) -> None:
        self._handles = handles
        self._dispatchers: dict[PoolName, Dispatcher] = {}
        self._known: dict[PoolName, ReplicaState] = {}
        self._hub: Hub | None = None

    async def encode(self, pool: PoolName, item: EncodeItem) -> EncodeResult:
        """As `Dispatcher.encode` of the pool."""
        if pool not in self._dispatchers:
            state = await self._fixed(pool)
            if pool not in self._dispatchers:
                self._dispatchers[pool] = Dispatcher(pool, self._handles[pool], state, self._hub_here())
        return await self._dispatchers[pool].encode(item)

    def _hub_here(self) -> Hub | None:
        """None where a system has no memory without a name, or Ray is not there: tests of single parts."""
        if self._hub is None and hasattr(os, "memfd_create") and node_id():
            self._hub = Hub(node_id(), Arena())
        return self._hub

    async def largest_budget(self, modality: Literal["image", "video"]) -> int:
        """Tokens of the largest graph of the modality's pool."""
        return (await self._fixed(modality)).limits.max_tokens

    async def dtype(self) -> str:
        """The dtype that the image pool computes in."""
        return (await self._fixed("image")).dtype

    async def views(self) -> list[PoolView]:
        """Every pool. One without a running replica is not asked, so it is neither waited for nor woken."""
        statuses = await asyncio.to_thread(self._statuses)

        async def view(name: PoolName, handle: DeploymentHandle) -> PoolView:
            bare = PoolView(name, statuses.get(handle.deployment_name), [])
            return replace(bare, replicas=await self._states(handle)) if bare.running else bare

        return list(await asyncio.gather(*(view(name, handle) for name, handle in self._handles.items())))

    async def _fixed(self, pool: PoolName) -> ReplicaState:
        """What one replica of the pool is, asked once: limits and dtype depend on its device, and stay."""
        if pool not in self._known:
            handle = self._handles[pool].options(method_name="state")
            for last_try in (False, True):
                try:
                    self._known[pool] = await handle.remote()
                    break
                except RayActorError:
                    if last_try:
                        raise FovealError("unavailable", TWO_DIED.format(pool), None, 5) from None
                except UNCALLABLE as error:
                    raise uncallable(pool, error) from None
        return self._known[pool]

    async def _states(self, handle: DeploymentHandle) -> list[ReplicaState]:
        try:
            response = handle.broadcast("state")
            answers = await response.results_async(timeout_s=STATE_TIMEOUT_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return []
        return [answer for answer in answers if isinstance(answer, ReplicaState)]

    def _statuses(self) -> Mapping[str, DeploymentStatusOverview]:
        app = serve.status().applications.get(serve.get_replica_context().app_name)
        return {} if app is None else app.deployments
