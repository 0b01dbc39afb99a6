"""The pool `image`: image graphs, one per token budget. Takes images that fit its largest budget."""

from __future__ import annotations

from ray import serve

from configs.settings import Settings
from deployments.pool import POOL_OPTIONS, PoolReplica, graph_budgets
from encoder.budgets import PackLimits


def batch_limits(settings: Settings) -> PackLimits:
    """What one batch takes: an image is one segment."""
    own = settings.image
    largest = graph_budgets(settings, own)[-1]
    return PackLimits(max_tokens=largest, max_items=own.max_batch_size, max_seqs=own.max_batch_size)


class ImageReplica(PoolReplica):
    def __init__(self, settings: Settings) -> None:
        super().__init__("image", settings, batch_limits, {"image": graph_budgets(settings, settings.image)})


ImageGraph = serve.deployment(name="ImageGraph", **POOL_OPTIONS)(ImageReplica)
