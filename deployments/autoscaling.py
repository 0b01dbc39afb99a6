"""Sizes a pool by the predicted work that waits in it. Names itself in `autoscaling_config.policy`.

Serve pickles the policy by value into its controller, so this module needs nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUED_WORK, BUSY = "foveal_queued_work", "foveal_busy"  # the names of what a replica reports


def replicas_for(
    queued_work: Iterable[float], busy: Iterable[float], *, target_queued: float, target_busy: float
) -> int:
    """Replicas that bring the queued work of each down to `target_queued`, but no fewer than keep them `target_busy`.

    The queue alone would take away the replicas that keep it short: once it is empty it asks for none.

    Args:
        queued_work: of each replica, predicted work accepted and not finished; any one unit.
        busy: of each replica, the part of the time that it had any.
        target_queued: in the unit of `queued_work`, above 0.
        target_busy: above 0, at most 1.
    """
    wanted = max(sum(queued_work) / target_queued, sum(busy) / target_busy)
    return math.ceil(wanted - 1e-9)  # sums of floats may be a hair over a whole number


class QueuedWorkPolicy:
    """The policy that `autoscaling_config.policy.policy_function` names; its arguments are `policy_kwargs`.

    Serve averages the reports over `look_back_period_s`, and applies bounds, factors and delays to what this returns.

    Args:
        target_queued: work that a replica may have queued: device-seconds on CUDA, tokens on a CPU.
        target_busy: see `replicas_for`.

    Raises:
        ValueError: a target out of range, by name.
    """

    def __init__(self, target_queued: float, target_busy: float = 0.8) -> None:
        if not 0 < target_queued < math.inf:
            raise ValueError(f"target_queued must be above 0, got {target_queued}")
        if not 0 < target_busy <= 1:
            raise ValueError(f"target_busy must be above 0 and at most 1, got {target_busy}")
        self._target_queued, self._target_busy = target_queued, target_busy

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reports = ctx.aggregated_metrics or {}
        if not reports.get(QUEUED_WORK):
            return ctx.target_num_replicas, {}  # nobody has reported yet: nothing is known
        wanted = replicas_for(
            reports[QUEUED_WORK].values(),
            reports.get(BUSY, {}).values(),
            target_queued=self._target_queued,
            target_busy=self._target_busy,
        )
        # A request that is still on its way to a replica must find one.
        return max(wanted, 1 if ctx.total_num_requests > 0 else 0), {}
