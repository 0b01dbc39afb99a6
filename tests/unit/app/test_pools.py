"""Serve's answers and exceptions as the ingress takes them, with handles that the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID, DeploymentStatus, DeploymentStatusTrigger
from ray.serve._private.common import ReplicaState as State
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatusOverview

from app.errors import FovealError
from app.pools import Pools, PoolView
from deployments.protocol import EncodeItem, EncodeReply, EncodeResult, QueueState, ReplicaState
from encoder.budgets import PackLimits

ITEM = EncodeItem("image", np.zeros((1, 3, 32, 32), np.uint8))
GOOD = EncodeResult(np.zeros((1, 1), np.float32), "float32", "image", "graph")


@dataclass
class Handle:
    """Gives its answers in turn; an exception is raised. `None` never answers."""

    answers: list[Any]
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    cancelled: bool = False
    method: str = ""

    def options(self, method_name: str) -> Handle:
        self.method = method_name
        return self

    def remote(self, *args: Any) -> Handle:
        self.calls.append((self.method, args))
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


def pools(handle: Handle) -> Pools:
    return Pools({"image": cast(DeploymentHandle, handle)})


REPLICA = ReplicaState(
    backend="cpu-static",
    attention="sdpa",
    linears="torch",
    device="cpu",
    dtype="float32",
    width=4,
    main_width=1,
    token_budgets=(64, 128),
    t_capture=None,
    limits=PackLimits(128, 8, 8),
    hits=3,
    misses=1,
    budget_tokens=256,
    used_tokens=128,
    queue=QueueState(items=2, tokens=20, bytes=300, cancelled=1),
)


def test_what_a_batch_takes_is_asked_once() -> None:
    handle = Handle([RayActorError(), REPLICA, EncodeReply("r", [GOOD]), EncodeReply("r", [GOOD])])

    async def run() -> None:
        asked = pools(handle)
        assert [await asked.largest_budget("image") for _ in range(3)] == [128, 128, 128]
        assert [await asked.encode("image", ITEM) for _ in range(2)] == [GOOD, GOOD]

    asyncio.run(run())
    assert [method for method, _ in handle.calls] == ["state", "state", "encode", "encode"]


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([RayActorError(), RayActorError()], "unavailable"),
        ([BackPressureError(num_queued_requests=9, max_queued_requests=8)], "overloaded"),
        ([DeploymentUnavailableError(DeploymentID("ImageGraph"))], "unavailable"),
    ],
)
def test_a_pool_that_cannot_be_asked(answers: list[Any], code: str) -> None:
    with pytest.raises(FovealError) as caught:
        asyncio.run(pools(Handle(answers)).largest_budget("image"))
    assert caught.value.code == code
    assert caught.value.retry_after_s is not None


Status = Callable[..., DeploymentStatusOverview]


def status(name: str, trigger: str = "CONFIG_UPDATE_STARTED", **replicas: int) -> DeploymentStatusOverview:
    states = {State(key): count for key, count in replicas.items()}
    return DeploymentStatusOverview(DeploymentStatus(name), DeploymentStatusTrigger(trigger), states, "")


@pytest.mark.parametrize(
    ("overview", "fault", "state", "well"),
    [
        (status("HEALTHY", RUNNING=1), None, "healthy", True),
        (status("UPDATING", RUNNING=1, STARTING=1), None, "healthy", True),
        (status("UNHEALTHY", "HEALTH_CHECK_FAILED", RUNNING=1, STARTING=1), None, "healthy", True),
        (status("HEALTHY", RUNNING=2), "CUDA error", "fault", False),
        (status("HEALTHY"), None, "idle", True),
        (status("UPSCALING", "AUTOSCALING", STARTING=1), None, "idle", True),
        (status("UPDATING", STARTING=1), None, "starting", False),
        (status("UNHEALTHY", "HEALTH_CHECK_FAILED", STARTING=1), None, "unhealthy", False),
        (None, None, "unknown", False),
    ],
)
def test_health(overview: DeploymentStatusOverview | None, fault: str | None, state: str, well: bool) -> None:
    view = PoolView("image", overview, [REPLICA, replace(REPLICA, fault=fault)])
    assert (view.state, view.well) == (state, well)


def test_counters_are_summed_over_replicas() -> None:
    other = replace(REPLICA, hits=10, misses=0, budget_tokens=64, used_tokens=32, queue=QueueState(items=1, rejected=4))
    summary = PoolView("image", status("HEALTHY", RUNNING=2), [REPLICA, other]).summary()
    assert (summary["replicas"], summary["hits"], summary["misses"], summary["padding_ratio"]) == (2, 13, 1, 2.0)
    assert summary["queue"] == {
        "items": 3, "tokens": 20, "bytes": 300, "cancelled": 1, "expired": 0, "rejected": 4
    }  # fmt: skip
    assert summary["token_budgets"] == [64, 128]
    assert (summary["attention"], summary["linears"]) == ("sdpa", "torch")


def test_a_pool_without_replicas() -> None:
    summary = PoolView("eager", status("HEALTHY"), []).summary()
    assert (summary["state"], summary["replicas"], summary["hits"], summary["padding_ratio"]) == ("idle", 0, 0, None)
    assert summary["backend"] is None
