"""The pool `video`: video graphs with room for `max_batch_size * t_capture` segments.

Takes videos of at most `t_capture` temporal patches that fit its largest budget.
"""

from __future__ import annotations

from ray import serve

from configs.settings import Settings
from deployments.pool import POOL_OPTIONS, PoolReplica, graph_budgets
from encoder.budgets import PackLimits


def batch_limits(settings: Settings) -> PackLimits:
    """What one batch takes: a video has up to `t_capture` segments."""
    own = settings.video
    largest = graph_budgets(settings, own)[-1]
    return PackLimits(max_tokens=largest, max_items=own.max_batch_size, max_seqs=own.max_batch_size * own.t_capture)


class VideoReplica(PoolReplica):
    def __init__(self, settings: Settings) -> None:
        super().__init__("video", settings, batch_limits, {"video": graph_budgets(settings, settings.video)})


VideoGraph = serve.deployment(name="VideoGraph", **POOL_OPTIONS)(VideoReplica)
