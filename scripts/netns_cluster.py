"""A cluster of hosts that share nothing but a network: Ray nodes in network namespaces on a bridge.

    sudo .venv/bin/python -m scripts.netns_cluster

Each host has its own network, /tmp and /dev/shm: a head that takes ingresses, two hosts for pools, and one for the
client. Starts Ray on the three with `ray start`, deploys configs/cluster.yaml with the tiny model, has one request of
each kind answered, cuts the link of a host with pool replicas while clients ask, waits until the service is whole
without it, restores the link and takes the host back in. Ends with 1 if an answer was wrong, missing or not to be
retried; with 77, as test drivers have it for a skipped test, where it is not root or cannot make namespaces. Ends all
that it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from benchmarks.checked import CheckedLoad, Request, first_answers
from benchmarks.service import token_auth
from tests.cluster.cluster import ENV, POOLS, cluster_config, eventually
from tests.integration.media import mp4, png

T = TypeVar("T")
BIN = Path(sys.executable).parent
CLONE_NEWNET = 0x40000000
NETWORK = "198.18.77"  # of the range that is set aside for such tests
PORT, GCS_PORT = 8000, 6379
SKIPPED = 77
# As docs/operations.md has it for whatever `ray start` starts.
AUTH = token_auth()
HOSTS = {"head": 1, "a": 2, "b": 3, "client": 9}


class Network:
    """A bridge in a namespace of its own, and hosts on it. Nothing is added to the machine's own network."""

    def __init__(self) -> None:
        self._prefix = f"fov{os.getpid()}"
        self.folder = Path(tempfile.mkdtemp(prefix="fovnet", dir="/tmp"))
        self._made: list[str] = []

    def namespace(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def address(self, host: str) -> str:
        return f"{NETWORK}.{HOSTS[host]}"

    def build(self) -> None:
        self._add("net")
        self._ip("net", "link add br0 type bridge")
        self._ip("net", "link set br0 up")
        for host in HOSTS:
            self._add(host)
            self._ip("net", f"link add to-{host} type veth peer name eth0 netns {self.namespace(host)}")
            self._ip("net", f"link set to-{host} master br0 up")
            self._ip(host, f"addr add {self.address(host)}/24 dev eth0")
            self._ip(host, "link set eth0 up")
            self._ip(host, "link set lo up")
            for own in ("tmp", "shm"):
                (self.folder / host / own).mkdir(parents=True)

    def link(self, host: str, state: str) -> None:
        """Cuts ("down") or restores ("up") the cable of a host."""
        self._ip("net", f"link set to-{host} {state}")

    def run(self, host: str, *command: str) -> None:
        """A command on a host: with its network, and its own /tmp and /dev/shm."""
        own = self.folder / host
        script = f'mount --bind {own}/shm /dev/shm && mount --bind {own}/tmp /tmp && exec "$@"'
        prefix = ["ip", "netns", "exec", self.namespace(host), "unshare", "--mount", "sh", "-c", script, "sh"]
        log = self.folder / f"{host}.log"  # not a pipe: what the command leaves running would keep it open
        with log.open("wb") as out:
            done = subprocess.run(
                [*prefix, *command], env={**os.environ, **ENV, **AUTH}, stdout=out, stderr=subprocess.STDOUT
            )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} on {host}:\n{log.read_text()}")

    def inside(self, host: str, call: Callable[[], T]) -> T:
        """What `call` returns in a thread that sees the host's network; threads that it starts see it as well."""
        results: list[T] = []
        errors: list[BaseException] = []

        def thread() -> None:
            try:
                with open(f"/run/netns/{self.namespace(host)}") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(call())
            except BaseException as error:
                errors.append(error)

        worker = threading.Thread(target=thread)
        worker.start()
        worker.join()
        if errors:
            raise errors[0]
        return results[0]

    def end(self, host: str) -> None:
        """Ends every process of a host."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            limit = time.monotonic() + 10
            while self._pids(host) and time.monotonic() < limit:
                time.sleep(0.2)

    def close(self) -> None:
        for name in self._made:
            self.end(name)
            subprocess.run(["ip", "netns", "del", self.namespace(name)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _add(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self.namespace(name)], check=True, capture_output=True)
        self._made.append(name)

    def _ip(self, name: str, command: str) -> None:
        subprocess.run(["ip", "-n", self.namespace(name), *command.split()], check=True, capture_output=True)

    def _pids(self, name: str) -> list[int]:
        told = subprocess.run(["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True)
        return [int(pid) for pid in told.stdout.split()]


class Hosts:
    """The service on a built network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.url = f"http://{network.address('head')}:{PORT}"

    def start_head(self) -> None:
        """The dashboard, through which code can be run, stays on the head's loopback."""
        self._ray("head", "--head", f"--port={GCS_PORT}", "--include-dashboard=true", "--labels=foveal=ingress")

    def start_worker(self, host: str) -> None:
        self._ray(host, f"--address={self._network.address('head')}:{GCS_PORT}", "--labels=foveal=gpu")

    def deploy(self) -> None:
        config = cluster_config()
        config["http_options"] |= {"host": self._network.address("head"), "port": PORT}
        file = self._network.folder / "head" / "tmp" / "config.yaml"
        file.write_text(json.dumps(config))
        self._network.run("head", str(BIN / "serve"), "deploy", "/tmp/config.yaml")

    def deployments(self) -> dict[str, list[dict[str, Any]]]:
        """Serve's record of the replicas of each deployment."""

        def told() -> dict[str, list[dict[str, Any]]]:
            api = dashboard("/api/serve/applications/")
            return {name: d["replicas"] for name, d in api["applications"]["foveal"]["deployments"].items()}

        return self._network.inside("head", told)

    def whole(self, without: str = "") -> bool:
        """Every deployment has replicas, all run, none on the host `without`, and /health says so."""
        replicas = self.deployments()
        away = self._network.address(without) if without else None
        if not {*POOLS, "Ingress"} <= set(replicas):
            return False
        if any(not rs or any(r["state"] != "RUNNING" or r["node_ip"] == away for r in rs) for rs in replicas.values()):
            return False
        return self._network.inside("client", self._health) == 200

    def host_of_pools(self) -> str:
        """The host that most pool replicas run on."""
        addresses = [r["node_ip"] for pool in POOLS for r in self.deployments()[pool]]
        return max(("a", "b"), key=lambda host: addresses.count(self._network.address(host)))

    def nodes(self) -> int:
        """Ray nodes that are alive."""

        def told() -> int:
            nodes = dashboard("/nodes?view=summary")["data"]["summary"]
            return sum(node["raylet"]["state"] == "ALIVE" for node in nodes)

        return self._network.inside("head", told)

    def _health(self) -> int:
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code
        except httpx.TransportError:
            return 0

    def _ray(self, host: str, *options: str) -> None:
        common = (f"--node-ip-address={self._network.address(host)}", "--num-cpus=2", "--disable-usage-stats")
        self._network.run(host, str(BIN / "ray"), "start", *common, "--object-store-memory=200000000", *options)


def dashboard(path: str) -> Any:
    """What Ray's dashboard answers, to be asked on the head."""
    token = {"Authorization": f"Bearer {AUTH['RAY_AUTH_TOKEN']}"}
    return httpx.get(f"http://127.0.0.1:8265{path}", headers=token, timeout=60).json()


def try_it(network: Network) -> dict[str, Any]:
    """The whole story; figures in seconds."""
    hosts = Hosts(network)
    hosts.start_head()
    for host in ("a", "b"):
        hosts.start_worker(host)
    hosts.deploy()
    figures: dict[str, Any] = {"start_s": eventually(lambda: quiet(hosts.whole), 400)}

    asked = [Request(s.name, s.data) for s in (png(256, 288, 1), mp4(128, 96, 8, 2), mp4(96, 96, 40, 3))]
    references = network.inside("client", lambda: first_answers(hosts.url, asked))
    figures["answers"] = {name: answer.status for name, answer in references.items()}

    load = CheckedLoad(hosts.url, asked, references, clients=3, pause_s=0.1)
    network.inside("client", load.__enter__)
    try:
        eventually(lambda: load.count("right") >= 10)
        cut, began = hosts.host_of_pools(), time.monotonic()
        network.link(cut, "down")
        figures["whole_after_cut_s"] = eventually(lambda: quiet(lambda: hosts.whole(without=cut)), 300)
        figures["attempts_from_cut_on"] = load.outcomes(began)
        network.link(cut, "up")
        network.end(cut)  # what was cut off was given up; the host starts anew
        hosts.start_worker(cut)
        figures["nodes_back_s"] = eventually(lambda: hosts.nodes() == 3, 120)
        answered = load.count("right")
        eventually(lambda: load.count("right") >= answered + 10)
    finally:
        load.__exit__()
    figures["load"] = load.summary()
    bad = load.count("wrong", "failed", "hang") + len(load.lost)
    figures["failures"] = bad + sum(status != 200 for status in figures["answers"].values())
    return figures


def quiet(condition: Callable[[], bool]) -> bool:
    """False where what it asks does not answer yet."""
    try:
        return condition()
    except (httpx.TransportError, KeyError, ValueError):
        return False


def main() -> int:
    network = Network()
    try:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            print("SKIPPED: network namespaces need root and the program `ip`")
            return SKIPPED
        try:
            network.build()
        except subprocess.CalledProcessError as error:
            print(f"SKIPPED: no network namespaces here: {error.stderr.decode().strip()}")
            return SKIPPED
        figures = try_it(network)
        print(json.dumps(figures, indent=1))
        return bool(figures["failures"])
    finally:
        network.close()


if __name__ == "__main__":
    sys.exit(main())
