"""The pool `eager`: no graphs, both modalities. Takes long videos and oversized images."""

from __future__ import annotations

from ray import serve

from configs.settings import Settings
from deployments.batcher import BatchLimits
from deployments.pool import POOL_OPTIONS, PoolReplica


class EagerReplica(PoolReplica):
    def __init__(self, settings: Settings) -> None:
        own = settings.eager
        # A segment holds at least one token, so the token bound also bounds the segments.
        limits = BatchLimits(tokens=own.max_batch_tokens, items=own.max_batch_size, segments=own.max_batch_tokens)
        super().__init__("eager", settings, own, limits, {})


Eager = serve.deployment(name="Eager", **POOL_OPTIONS)(EagerReplica)
