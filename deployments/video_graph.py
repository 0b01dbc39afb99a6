"""The pool `video`: video graphs with room for `max_batch_size * t_capture` segments.

Takes videos of at most `t_capture` temporal patches that fit its largest budget.
"""

from __future__ import annotations

from ray import serve

from configs.settings import Settings
from deployments.pool import POOL_OPTIONS, PoolReplica, graph_budgets
from encoder.budgets import PackLimits


class VideoReplica(PoolReplica):
    def __init__(self, settings: Settings) -> None:
        own = settings.video
        budgets = graph_budgets(settings, own)
        limits = PackLimits(
            max_tokens=budgets[-1], max_items=own.max_batch_size, max_seqs=own.max_batch_size * own.t_capture
        )
        super().__init__("video", settings, own, limits, {"video": budgets})


VideoGraph = serve.deployment(name="VideoGraph", **POOL_OPTIONS)(VideoReplica)
