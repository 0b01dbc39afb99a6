"""Parts that die and clients that leave."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from benchmarks.service import Service
from tests.integration.media import Sample, mp4, png
from tests.integration.test_encode import assert_close

pytestmark = pytest.mark.integration


def eventually(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def test_items_of_clients_that_left_are_dropped(service: Service, client: httpx.Client) -> None:
    def cancelled() -> int:
        return client.get("/v1/pools").json()["pools"][2]["queue"]["cancelled"]

    before, clip = cancelled(), mp4(512, 512, 60, 1).data
    head = f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: {len(clip)}\r\n\r\n".encode()
    host, port = service.url.removeprefix("http://").split(":")
    connections = [socket.create_connection((host, int(port)), timeout=30) for _ in range(24)]
    for connection in connections:
        connection.sendall(head + clip)
    eventually(lambda: client.get("/v1/pools").json()["pools"][2]["queue"]["items"] >= 2)
    for connection in connections:
        connection.close()
    eventually(lambda: cancelled() > before)
    eventually(lambda: client.get("/v1/pools").json()["pools"][2]["queue"]["items"] == 0)


def test_a_killed_replica_costs_no_request(
    service: Service, client: httpx.Client, reference: Callable[[Sample], np.ndarray]
) -> None:
    (replica,) = service.processes("ServeReplica:foveal:ImageGraph")
    os.kill(replica, signal.SIGKILL)
    sample = png(256, 288, 5)
    answer = client.post("/v1/encode", content=sample.data)
    assert answer.status_code == 200, answer.text
    assert_close(load(answer.content)["0.embeddings"], reference(sample))
    assert service.processes("ServeReplica:foveal:ImageGraph") != [replica]
    eventually(lambda: client.get("/health").status_code == 200)
