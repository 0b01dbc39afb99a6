"""The service of configs/cluster.yaml on three Ray nodes of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.service import ROOT, free_port

ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.middleware.at_proxy",
    # As configs/kuberay sets them: how soon the controller sees what waits and what works.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    # A node whose Ray has ended counts as dead after 1.5 s, one that has gone silent after 6 s; by default 15 and 65 s.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "3",
}
POOLS = ("ImageGraph", "VideoGraph", "Eager")
Config = dict[str, Any]


def cluster_config() -> Config:
    """configs/cluster.yaml with the tiny model on CPUs and a fixed number of replicas: the least that it asks for."""
    config = yaml.safe_load((ROOT / "configs" / "cluster.yaml").read_text())
    config["proxy_location"] = "HeadOnly"
    config["http_options"]["port"] = free_port()
    (app,) = config["applications"]
    app["args"] = {"model": "tiny", "limits": {"deadline_s": 40}}
    for deployment in app["deployments"]:
        deployment["num_replicas"] = max(deployment.pop("autoscaling_config")["min_replicas"], 1)
        selector = deployment["ray_actor_options"]["label_selector"]
        deployment["ray_actor_options"] = {"num_cpus": 0.1, "label_selector": selector}
    return config


def deployment(config: Config, name: str) -> dict[str, Any]:
    """The entry of one deployment in `config`."""
    return next(d for d in config["applications"][0]["deployments"] if d["name"] == name)


class ServiceCluster:
    """A head that takes ingresses and two nodes that take pools; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        # Ray's sockets live under this folder, and a socket's path has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="fov", dir="/tmp"))
        self.config = cluster_config()
        self.url = f"http://127.0.0.1:{self.config['http_options']['port']}"
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        self._env = {name: os.environ.get(name) for name in (*ENV, "RAY_TMPDIR")}
        os.environ.update(ENV, RAY_TMPDIR=str(self._folder))
        head = {
            "labels": {"foveal": "ingress"},
            "num_cpus": 1,
            "include_dashboard": False,
            "temp_dir": str(self._folder / "ray"),
        }
        try:
            self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True)
            self._nodes = [self._add_node() for _ in range(2)]
            ray.init(self._cluster.address, namespace="serve", log_to_driver=False)
            serve.start(self.config["proxy_location"], HTTPOptions(**self.config["http_options"]))
            self.deploy(self.config)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        with contextlib.suppress(AttributeError):  # it did not start
            self._cluster.shutdown()
        for name, value in self._env.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)

    def deploy(self, config: Config, timeout_s: float = 600.0) -> float:
        """What `serve deploy` has the dashboard do, and the wait until it is done everywhere. Seconds."""
        started = time.monotonic()
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
        self.config = config
        eventually(lambda: self._told()["status"] == "RUNNING" and self.whole(), timeout_s)
        return time.monotonic() - started

    def replicas(self, name: str, state: str = "RUNNING") -> list[dict[str, Any]]:
        """Serve's record of each replica in `state`: `pid`, `node_id`, `replica_id` and more."""
        told = self._told()["deployments"].get(name, {"replicas": []})
        return [replica for replica in told["replicas"] if replica["state"] == state]

    def replica_states(self, name: str) -> Counter[str]:
        """How many replicas of a deployment are in which state."""
        return Counter(r["state"] for r in self._told()["deployments"][name]["replicas"])

    def whole(self) -> bool:
        """Every deployment has all its replicas, and no others, all running, none of them killed, and /health says so.

        Serve calls a killed replica running until it notices.
        """
        told = self._told()["deployments"]
        for wanted in self.config["applications"][0]["deployments"]:
            replicas = told.get(wanted["name"], {"replicas": []})["replicas"]
            fixed = wanted.get("num_replicas")
            if fixed is not None and len(replicas) != fixed:
                return False
            if any(r["state"] != "RUNNING" or r["pid"] in self._killed for r in replicas):
                return False
        return self.health() == 200

    def health(self) -> int:
        """The status of /health; 0 if there is no answer."""
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code
        except httpx.TransportError:
            return 0

    def kill(self, name: str) -> None:
        """kill -9 of one replica."""
        pid = self.replicas(name)[0]["pid"]
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def remove_node(self) -> int:
        """Kills the node that most pool replicas are on, as a power cut would. How many those are."""
        replicas = [replica for pool in POOLS for replica in self.replicas(pool)]
        count = Counter(replica["node_id"] for replica in replicas)
        node = max(self._nodes, key=lambda n: count[n.node_id])
        self._killed |= {replica["pid"] for replica in replicas if replica["node_id"] == node.node_id}
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        return count[node.node_id]

    def restore_node(self) -> None:
        self._nodes.append(self._add_node())

    def _add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=1, labels={"foveal": "gpu"})

    def _told(self) -> dict[str, Any]:
        """What Serve tells of the application, as `serve status` and the dashboard have it."""
        details = _get_global_client().get_serve_details()
        return details["applications"].get("foveal", {"status": "NOT_STARTED", "deployments": {}})


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> float:
    """Waits for it. How long that took, in seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not happen in time"
        time.sleep(0.1)
    return time.monotonic() - started
