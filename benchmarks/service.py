"""Starts the service as `make serve` does, on a config file, on free ports and a Ray instance of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

ROOT = Path(__file__).resolve().parent.parent
# The same on a Ray instance that is started here, without the dashboard.
BARE = """
import sys
import ray
from app.__main__ import main
ray.init("local", namespace="serve", include_dashboard=False)
main(sys.argv[1])
"""


class Service:
    """A running service; a context manager that leaves no process and no file behind.

    Args:
        change: edits the decoded serve_config.yaml before it is used.
        env: environment variables over the present ones.
        timeout_s: seconds until every pool must be well.
        haproxy: HAProxy in place of Serve's own proxy.
        dashboard: Ray's dashboard runs too, as it does by default.
    """

    def __init__(
        self,
        change: Callable[[dict[str, Any]], None] | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 120.0,
        haproxy: bool = False,
        dashboard: bool = True,
    ) -> None:
        # Ray's sockets live under this folder, and a socket's path has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="fov", dir="/tmp"))
        config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        config["http_options"]["port"] = free_port()
        if change is not None:
            change(config)
        (self._folder / "config.yaml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{config['http_options']['port']}"
        self.log = self._folder / "log.txt"
        self._timeout_s = timeout_s
        self._env = {
            **os.environ,
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(self._folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.middleware.at_proxy",
            **(_haproxy(self._folder) if haproxy else {}),
            **(env or {}),
        }
        self._command = [sys.executable, *(["-m", "app"] if dashboard else ["-c", BARE])]
        self.start_seconds = 0.0

    def __enter__(self) -> Self:
        started = time.monotonic()
        command = [*self._command, str(self._folder / "config.yaml")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            while not self._healthy():
                if self._process.poll() is not None:
                    raise RuntimeError(f"the service ended:\n{self.log.read_text()}")
                if time.monotonic() - started > self._timeout_s:
                    raise RuntimeError(f"the service did not start in {self._timeout_s} s:\n{self.log.read_text()}")
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        self.start_seconds = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        family = self.processes()
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid in family:
            if _parent(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def signal(self, signum: int) -> None:
        """Sends a signal to the process that a supervisor would have started."""
        self._process.send_signal(signum)

    def running(self) -> bool:
        return self._process.poll() is None

    def processes(self, title: str = "") -> list[int]:
        """Process ids of the service, the one started and all that descend from it, whose command line has `title`."""
        parents = {int(path.name): _parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
        family = [self._process.pid]
        for pid in family:
            family.extend(child for child, parent in parents.items() if parent == pid)
        return [pid for pid in family if title in _command_line(pid)]

    def log_records(self, request_id: str) -> list[dict[str, Any]]:
        """The log lines of a request, decoded. Ray forwards them to the driver's output a moment later."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            lines = [line for line in self.log.read_text().splitlines() if f'{{"id": "{request_id}"' in line]
            if lines:
                return [json.loads(line[line.index("{") :]) for line in lines]
            time.sleep(0.1)
        return []

    def pss_bytes(self) -> dict[int, int]:
        """Proportional set size of each process: shared pages are counted once over all of them."""
        sizes = {}
        for pid in self.processes():
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            sizes[pid] = sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
        return sizes

    def metrics(self) -> str:
        """What Ray exports for Prometheus, the text of every place that it names; a few seconds behind what happens."""
        places = self._folder / "ray" / "session_latest" / "prom_metrics_service_discovery.json"
        addresses = [address for group in json.loads(places.read_text()) for address in group["targets"]]
        return "".join(httpx.get(f"http://{address}/metrics", timeout=30).text for address in addresses)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def _haproxy(folder: Path) -> dict[str, str]:
    """Environment for HAProxy as `make serve HAPROXY=1` has it, on files and ports that no other service uses."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy" / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "haproxy" / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder / "haproxy"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "haproxy" / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "haproxy" / "metrics.sock"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }


def token_auth() -> dict[str, str]:
    """An environment with which Ray answers only to who has it too."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int | None:
    """The parent's id, or None if the process is gone or a zombie."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)
