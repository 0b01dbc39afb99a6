"""The pool `image`: image graphs, one per token budget. Takes images that fit its largest budget."""

from __future__ import annotations

from ray import serve

from configs.settings import Settings
from deployments.pool import POOL_OPTIONS, PoolReplica, graph_budgets
from encoder.budgets import PackLimits


class ImageReplica(PoolReplica):
    def __init__(self, settings: Settings) -> None:
        own = settings.image
        budgets = graph_budgets(settings, own)
        limits = PackLimits(max_tokens=budgets[-1], max_items=own.max_batch_size, max_seqs=own.max_batch_size)
        super().__init__("image", settings, own, limits, {"image": budgets})


ImageGraph = serve.deployment(name="ImageGraph", **POOL_OPTIONS)(ImageReplica)
