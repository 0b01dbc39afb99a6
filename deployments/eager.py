"""The pool `eager`: no graphs, both modalities. Takes long videos and oversized images."""

from __future__ import annotations

from ray import serve

from configs.settings import Settings
from deployments.pool import POOL_OPTIONS, PoolReplica
from encoder.budgets import PackLimits


def batch_limits(settings: Settings) -> PackLimits:
    """What one batch takes. A segment holds at least one token, so the token bound also bounds the segments."""
    own = settings.eager
    return PackLimits(max_tokens=own.max_batch_tokens, max_items=own.max_batch_size, max_seqs=own.max_batch_tokens)


class EagerReplica(PoolReplica):
    def __init__(self, settings: Settings) -> None:
        super().__init__("eager", settings, batch_limits, {})


Eager = serve.deployment(name="Eager", **POOL_OPTIONS)(EagerReplica)
