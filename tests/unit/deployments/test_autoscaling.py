"""The policy that sizes a pool by its queued work, by itself and inside Serve's own bounds and delays."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.autoscaling import BUSY, QUEUED_WORK, QueuedWorkPolicy, replicas_for
from deployments.protocol import EncodeResult, Size
from deployments.work import WorkMeter, cost_table, predicted_work
from encoder.budgets import CostTable, PackLimits

REPORTS = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1)), max_size=20)
TARGET = st.floats(0.01, 100)
COSTS = CostTable({64: 1.0, 128: 1.5, 1024: 8.0})
LIMITS = PackLimits(max_tokens=1024, max_items=8, max_seqs=64)


def sized(reports: list[tuple[float, float]], target_queued: float, target_busy: float = 0.8) -> int:
    return replicas_for(
        [q for q, _ in reports], [b for _, b in reports], target_queued=target_queued, target_busy=target_busy
    )


class TestReplicasFor:
    @pytest.mark.parametrize(
        ("reports", "replicas"),
        [
            ([], 0),
            ([(0.0, 0.0)] * 5, 0),  # empty: nothing is needed
            ([(0.01, 0.2)], 1),
            ([(0.5, 0.8)], 1),  # exactly on both targets
            ([(0.1, 0.7), (0.1, 0.7)], 2),  # steady: a short queue, but one replica would be 1.4 busy
            ([(3.0, 1.0)], 6),  # a burst
            ([(9.0, 1.0), (0.0, 0.0)], 18),  # the sum counts, not its spread
            ([(0.1, 0.0)] * 15, 3),  # 15 * 0.1 is over 1.5 in floats
        ],
    )
    def test_values(self, reports: list[tuple[float, float]], replicas: int) -> None:
        assert sized(reports, 0.5) == replicas

    @given(REPORTS, TARGET)
    def test_it_meets_both_targets_with_the_fewest(self, reports: list[tuple[float, float]], target: float) -> None:
        replicas = sized(reports, target)
        queued, busy = sum(q for q, _ in reports), sum(b for _, b in reports)
        assert queued <= replicas * target * (1 + 1e-6) + 1e-6 * target
        assert busy <= replicas * 0.8 + 1e-6
        fewer = replicas - 1
        assert fewer < 0 or queued > fewer * target * (1 - 1e-6) or busy > fewer * 0.8 - 1e-6

    @given(REPORTS, REPORTS, TARGET)
    def test_more_work_never_means_fewer(
        self, some: list[tuple[float, float]], more: list[tuple[float, float]], target: float
    ) -> None:
        assert sized(some, target) <= sized(some + more, target)


def context(
    reports: list[tuple[float, float]], *, now: int = 1, requests: float = 1, **config: Any
) -> AutoscalingContext:
    deployment = DeploymentID(name="VideoGraph", app_name="foveal")
    replicas = [ReplicaID(str(i), deployment) for i in range(len(reports))]
    names = {QUEUED_WORK: 0, BUSY: 1}
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name="VideoGraph",
        app_name="foveal",
        current_num_replicas=now,
        target_num_replicas=now,
        running_replicas=replicas,
        total_num_requests=requests,
        total_queued_requests=0,
        aggregated_metrics={
            n: {r: report[at] for r, report in zip(replicas, reports, strict=True)} for n, at in names.items()
        },
        raw_metrics=None,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=10,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=AutoscalingConfig(min_replicas=0, max_replicas=10, **config),
    )


class TestQueuedWorkPolicy:
    def test_values(self) -> None:
        policy = QueuedWorkPolicy(0.5)
        assert policy(context([(3.0, 1.0)])) == (6, {})
        assert policy(context([(0.0, 0.0)], requests=0)) == (0, {})
        assert policy(context([(0.0, 0.0)])) == (1, {})  # on its way to the replica
        assert policy(context([], now=3)) == (3, {})  # nobody has reported

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"target_queued": 0}, "target_queued"),
            ({"target_queued": math.inf}, "target_queued"),
            ({"target_queued": math.nan}, "target_queued"),
            ({"target_queued": 1, "target_busy": 0}, "target_busy"),
            ({"target_queued": 1, "target_busy": 1.1}, "target_busy"),
        ],
    )
    def test_a_target_out_of_range_is_named(self, arguments: dict[str, float], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            QueuedWorkPolicy(**arguments)

    def test_serve_bounds_it(self) -> None:
        from ray.serve._private.autoscaling_state import DeploymentAutoscalingState

        policy = {
            "policy_function": "deployments.autoscaling:QueuedWorkPolicy",
            "policy_kwargs": {"target_queued": 0.5},
        }
        config = AutoscalingConfig(
            min_replicas=1, max_replicas=4, upscale_delay_s=0, downscale_delay_s=0, policy=policy
        )
        state = DeploymentAutoscalingState(DeploymentID(name="VideoGraph", app_name="foveal"))
        info = SimpleNamespace(
            deployment_config=SimpleNamespace(autoscaling_config=config, gang_scheduling_config=None),
            target_capacity=None,
            target_capacity_direction=None,
            config_changed=lambda other: True,
        )
        state.register(info, 1)
        decided = [
            state.apply_bounds(state._policy(context(reports, now=2, upscale_delay_s=0, downscale_delay_s=0))[0])
            for reports in ([(50.0, 1.0)] * 2, [(0.6, 0.7)] * 2, [(0.0, 0.0)] * 2)
        ]
        assert decided == [4, 3, 1]

    def test_it_can_be_unpickled_without_the_package(self, tmp_path: Path) -> None:
        policy = AutoscalingConfig(policy={"policy_function": "deployments.autoscaling:QueuedWorkPolicy"}).policy
        (tmp_path / "policy").write_bytes(policy.get_serialized_policy_def())
        program = (
            "import pickle, sys; policy = pickle.load(open('policy', 'rb'))(0.5); "
            "assert 'deployments' not in sys.modules; print(type(policy).__name__)"
        )
        out = subprocess.run(
            [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert out.stdout == "QueuedWorkPolicy\n", out.stderr


class TestPredictedWork:
    @pytest.mark.parametrize(
        ("tokens", "work"),
        [
            ([], 0.0),
            ([49], 1.0),
            ([64, 64], 1.5),  # together in the budget of 128
            ([64, 100], 2.5),  # apart: 1.0 + 1.5 beats the budget of 1024
            ([1024], 8.0),
            ([1024, 64], 9.0),
            ([2048], 16.0),  # over every budget: by tokens, as the largest
        ],
    )
    def test_graphs(self, tokens: list[int], work: float) -> None:
        assert predicted_work([Size("image", n, 1) for n in tokens], COSTS, LIMITS) == pytest.approx(work)

    def test_without_graphs_a_batch_costs_its_tokens(self) -> None:
        eager = CostTable({}, ((0, 32.0), (1, 33.0)))
        sizes = [Size("video", 1000, 4), Size("video", 24, 1), Size("video", 500, 2)]
        assert predicted_work(sizes, eager, LIMITS) == 32 + 1024 + 32 + 500

    @given(st.lists(st.integers(1, 3000), max_size=30))
    def test_it_is_finite_and_at_least_the_cheapest_way(self, tokens: list[int]) -> None:
        work = predicted_work([Size("image", n, 1) for n in tokens], COSTS, LIMITS)
        assert sum(tokens) * 8 / 1024 <= work * (1 + 1e-9) < math.inf


def test_the_meter_counts_an_item_until_it_is_done() -> None:
    meter = WorkMeter(COSTS, LIMITS)
    assert meter.report() == {QUEUED_WORK: 0.0, BUSY: 0.0}
    answered, cancelled, done = (Future[EncodeResult]() for _ in range(3))
    result = EncodeResult(None, "float32", "image")
    done.set_result(result)
    for future in (answered, cancelled, done):
        meter.add(Size("image", 1024, 1), future)
    assert meter.report() == {QUEUED_WORK: 16.0, BUSY: 1.0}
    cancelled.cancel()
    assert meter.report() == {QUEUED_WORK: 8.0, BUSY: 1.0}
    answered.set_result(result)
    assert meter.report() == {QUEUED_WORK: 0.0, BUSY: 0.0}


def test_the_meter_adds_what_waits_in_the_ingress_while_the_news_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("deployments.work.time.monotonic", lambda: now)
    meter = WorkMeter(COSTS, PackLimits(max_tokens=1024, max_items=8, max_seqs=8))
    meter.note_behind("a", 1500)
    meter.note_behind("b", 548)
    assert meter.report()[QUEUED_WORK] == 16.0  # 2048 tokens, as two batches of 1024
    meter.note_behind("a", 0)
    assert meter.report()[QUEUED_WORK] == predicted_work([Size("image", 548, 1)], COSTS, LIMITS)
    now += 6
    assert meter.report() == {QUEUED_WORK: 0.0, BUSY: 0.0}


def test_replicas_report_their_queue() -> None:
    import numpy as np

    from configs.settings import EagerSettings, GraphSettings, Settings
    from deployments.eager import EagerReplica
    from deployments.image_graph import ImageReplica
    from deployments.protocol import EncodeCall, EncodeItem

    settings = Settings(
        device="cpu", image=GraphSettings(token_budgets=(16,), max_batch_size=1), eager=EagerSettings(max_batch_size=1)
    )
    items = [EncodeItem("image", np.zeros((1, 3, 128, 128), np.uint8)) for _ in range(3)]

    async def run(replica: Any) -> list[float]:
        before = (await replica.record_autoscaling_stats())[QUEUED_WORK]
        task = asyncio.create_task(replica.encode(EncodeCall("ingress", items)))
        await asyncio.sleep(0)
        queued = (await replica.record_autoscaling_stats())[QUEUED_WORK]
        await task
        return [before, queued, (await replica.record_autoscaling_stats())[QUEUED_WORK]]

    for kind in (ImageReplica, EagerReplica):
        replica = kind(settings)
        release, submit = Future[None](), replica._runner.submit
        replica._runner.submit = lambda *args, r=release, s=submit, **named: (r.result(), s(*args, **named))[1]
        try:
            table = cost_table(replica._runner)
            assert (table.graph.get(16), table.eager_cost(16)) in ((48.0, math.inf), (None, 48.0))
            # Three batches of one item of 16 tokens, 48 each; none can finish before it is released.
            release_later = run(replica)

            async def released(pending: Any = release_later, r: Future[None] = release) -> list[float]:
                asyncio.get_running_loop().call_later(0.2, r.set_result, None)
                return await pending

            assert asyncio.run(released()) == [0.0, 3 * 48.0, 0.0]
        finally:
            replica._batcher.close()
