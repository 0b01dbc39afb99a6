"""`python -m app CONFIG`: `serve run CONFIG`, which drains before it stops when it gets SIGTERM or SIGINT.

`serve run` by itself ends Serve's proxy at once when it is told to stop, and with it every request under way; SIGTERM
ends all of Ray. Here the ingress first refuses new requests and finishes those that it has.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import yaml  # type: ignore[import-untyped]
from ray import serve
from ray.serve.scripts import cli

from app.ingress import GRACE_S, Ingress

CALL_S = 5.0  # for a replica to say how many items it has
SEND_S = 1.0  # for answers that Serve's proxy has, but not yet the client

_log = logging.getLogger("foveal")


def grace_s(config: dict[str, Any]) -> float:
    """Seconds that the ingress may take for the requests that it has: its `graceful_shutdown_timeout_s`."""
    ingresses = [d for a in config["applications"] for d in a.get("deployments", []) if d["name"] == Ingress.name]
    return max((d.get("graceful_shutdown_timeout_s", GRACE_S) for d in ingresses), default=GRACE_S)


def drain(timeout_s: float) -> None:
    """Has every ingress refuse new requests, and waits for those under way."""
    deadline = time.monotonic() + timeout_s
    applications = serve.status().applications.items()
    ingresses = [
        serve.get_deployment_handle(Ingress.name, name) for name, a in applications if Ingress.name in a.deployments
    ]
    while any(sum(ingress.broadcast("drain").results(timeout_s=CALL_S)) for ingress in ingresses):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)
    time.sleep(SEND_S)


def main(path: str) -> None:
    timeout_s = grace_s(yaml.safe_load(Path(path).read_text()))

    def stop(signum: int, frame: FrameType | None) -> None:
        for again in (signal.SIGTERM, signal.SIGINT):  # the second one does not wait
            signal.signal(again, signal.default_int_handler)
        try:
            drain(timeout_s)
        except Exception as error:
            _log.warning("stopped before all requests had ended: %r", error)
        raise KeyboardInterrupt

    if not ray.is_initialized():
        ray.init(namespace="serve")
    # After ray.init, which has a handler of its own.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    cli(["run", path])


if __name__ == "__main__":
    main(sys.argv[1])
