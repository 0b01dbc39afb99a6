"""The application that `serve run serve_config.yaml` builds."""

# No `from __future__ import annotations` here: Serve reads the builder's annotation to validate `args:` with it.
from ray.serve import Application

from app.ingress import Ingress
from configs.settings import Settings
from deployments.eager import Eager
from deployments.image_graph import ImageGraph
from deployments.video_graph import VideoGraph


def build(settings: Settings) -> Application:
    """The ingress bound to its three pools. `settings` is `args:` of the application in serve_config.yaml."""
    return Ingress.bind(settings, ImageGraph.bind(settings), VideoGraph.bind(settings), Eager.bind(settings))
