"""Clients that leave, stall or come in too great a number: nothing of them stays, and others are served."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from benchmarks.service import Service
from tests.integration.media import mp4, png
from tests.integration.test_recovery import eventually

pytestmark = pytest.mark.integration

# Of each kind. The suite's number finds leaks of queue places and files; 1000 finds those of memory.
DISCONNECTS = int(os.environ.get("FOVEAL_DISCONNECTS", "20"))
AT_ONCE = 10
PHOTO = png(224, 224, 1).data
CLIP = mp4(512, 512, 40, 1).data  # goes to the eager pool, where it takes long
NOTHING = {"items": 0, "bytes": 0, "stopping": False}


def connect(service: Service) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def post(length: int, query: str = "") -> bytes:
    return f"POST /v1/encode{query} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def read_answer(connection: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    return answer


def held(client: httpx.Client) -> dict[str, Any]:
    """What the ingress and the pools hold of requests."""
    told = client.get("/v1/pools").json()
    return {"in_flight": told["in_flight"], **{pool["name"]: pool["queue"]["items"] for pool in told["pools"]}}


def open_files(service: Service) -> int:
    """Descriptors of Serve's proxy and the ingress, which a connection or a decoder that is left over would be."""
    pids = service.processes("ProxyActor") + service.processes("ServeReplica:foveal:Ingress")
    assert len(pids) >= 2
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


def leave_while_uploading(service: Service) -> socket.socket:
    connection = connect(service)
    connection.sendall(post(len(PHOTO)) + PHOTO[: len(PHOTO) // 2])
    return connection


def leave_while_queued(service: Service) -> socket.socket:
    connection = connect(service)
    connection.sendall(post(len(CLIP)) + CLIP)
    return connection


def leave_while_downloading(service: Service) -> socket.socket:
    connection = connect(service)
    connection.sendall(post(len(PHOTO), "?format=json&dtype=float32") + PHOTO)
    assert connection.recv(16).startswith(b"HTTP/1.1 200")
    return connection


@pytest.mark.parametrize("begin", [leave_while_uploading, leave_while_queued, leave_while_downloading])
def test_clients_that_leave_take_all_with_them(
    begin: Callable[[Service], socket.socket], service: Service, client: httpx.Client
) -> None:
    assert client.post("/v1/encode", content=PHOTO).status_code == 200
    eventually(lambda: held(client)["in_flight"] == NOTHING)
    before = open_files(service)
    for _ in range(0, DISCONNECTS, AT_ONCE):
        connections = [begin(service) for _ in range(AT_ONCE)]
        for connection in connections:
            connection.close()
    eventually(lambda: held(client) == {"in_flight": NOTHING, "image": 0, "video": 0, "eager": 0})
    # Channels between Ray's processes come and go by themselves.
    eventually(lambda: open_files(service) <= before + AT_ONCE)
    assert client.post("/v1/encode", content=PHOTO).status_code == 200


def test_clients_that_leave_take_nobody_elses_answer(service: Service, client: httpx.Client) -> None:
    """Items of those who leave and of those who stay share calls and batches."""
    expected = load(client.post("/v1/encode", content=PHOTO).content)["0.embeddings"]
    answers: list[httpx.Response] = []
    left = threading.Event()

    def stay() -> None:
        with httpx.Client(base_url=service.url, timeout=120) as session:
            while not left.is_set():
                answers.append(session.post("/v1/encode", content=PHOTO))

    staying = [threading.Thread(target=stay) for _ in range(4)]
    for thread in staying:
        thread.start()
    for _ in range(0, 3 * DISCONNECTS, AT_ONCE):
        connections = [connect(service) for _ in range(AT_ONCE)]
        for connection in connections:
            connection.sendall(post(len(PHOTO)) + PHOTO)
        eventually(lambda: held(client)["in_flight"]["items"] > 0)
        for connection in connections:
            connection.close()
    left.set()
    for thread in staying:
        thread.join()
    assert len(answers) >= 4
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers:
        np.testing.assert_allclose(load(answer.content)["0.embeddings"], expected, rtol=1e-4, atol=1e-5)


def test_uploads_that_stall_keep_nobody_out(service: Service, client: httpx.Client) -> None:
    """Eight announced bodies of the largest size, which together are all of limits.max_bytes_in_flight."""
    stalled = [connect(service) for _ in range(8)]
    for connection in stalled:
        connection.sendall(post(64 << 20) + b"some")
    eventually(lambda: held(client)["in_flight"]["bytes"] == 8 * len(b"some"))
    assert client.post("/v1/encode", content=PHOTO).status_code == 200
    assert held(client)["in_flight"]["items"] == 8
    for connection in stalled:
        answer = read_answer(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"upload_timeout"' in answer
        assert b"connection: close" in answer.lower()
        connection.close()
    assert held(client)["in_flight"] == NOTHING


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/pools", "/", "/docs", "/openapi.json"])
def test_head_tells_what_get_does(path: str, client: httpx.Client) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_header_values_that_serve_cannot_decode_are_no_fault(service: Service) -> None:
    with connect(service) as connection:
        names = (b"x-request-id", b"serve_multiplexed_model_id", b"x-session-id")
        headers = b"".join(name + b": \xff\xfe\r\n" for name in names)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
