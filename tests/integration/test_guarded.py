"""A service of its own with API keys and a low bound of items, which is stopped by SIGTERM in the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service import Service
from tests.integration.media import mp4, png
from tests.integration.test_admission import connect
from tests.integration.test_recovery import eventually

pytestmark = pytest.mark.integration

KEY, NEXT = "a-key-of-the-first-client", "a-key-of-the-first-client-2"
HEADERS = {"authorization": f"Bearer {KEY}"}
PHOTO = png(64, 64, 1).data
CLIP = mp4(256, 256, 30, 1).data


def post(length: int) -> bytes:
    head = f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# one\n{KEY}\n")
    return file


@pytest.fixture(scope="module")
def guarded(keys: Path) -> Iterator[Service]:
    def change(config: dict[str, Any]) -> None:
        arguments = config["applications"][0]["args"]
        arguments["auth"]["api_keys_file"] = str(keys)
        arguments["limits"] |= {"max_items_in_flight": 4, "upload_idle_s": 60, "max_body_bytes": 1 << 20}

    with Service(change, env={"FOVEAL_MAX_BODY_BYTES": str(1 << 19)}, timeout_s=300, dashboard=False) as running:
        yield running


@pytest.fixture(scope="module")
def client(guarded: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=120, headers=HEADERS) as session:
        yield session


def test_without_a_key_only_health_is_told(guarded: Service, client: httpx.Client) -> None:
    for path in ("/health", "/v1/pools", "/v1/models", "/", "/docs", "/openapi.json", "/v1/nothing"):
        answer = httpx.get(guarded.url + path, timeout=60)
        assert answer.status_code == (200 if path == "/health" else 401), path
    answer = httpx.post(
        f"{guarded.url}/v1/encode", content=PHOTO, headers={"authorization": "Bearer wrong"}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert client.post("/v1/encode", content=PHOTO).status_code == 200


def test_the_key_is_asked_for_before_the_body_comes(guarded: Service) -> None:
    with connect(guarded) as connection:
        connection.sendall(b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_openapi_states_the_scheme(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    (name,) = [n for n, s in document["components"]["securitySchemes"].items() if s["scheme"] == "bearer"]
    assert document["paths"]["/v1/encode"]["post"]["security"] == [{name: []}]
    assert "security" not in document["paths"]["/health"]["get"]


def test_keys_change_without_a_restart(guarded: Service, keys: Path, client: httpx.Client) -> None:
    keys.write_text(f"{KEY}\n{NEXT}\n")
    assert client.get("/v1/models", headers={"authorization": f"Bearer {NEXT}"}).status_code == 200
    keys.write_text("short\n")
    assert client.get("/v1/models", headers={"authorization": f"Bearer {NEXT}"}).status_code == 200
    keys.write_text(f"{KEY}\n")
    assert client.get("/v1/models", headers={"authorization": f"Bearer {NEXT}"}).status_code == 401
    assert KEY not in guarded.log.read_text()


def test_past_the_bound_requests_are_refused_before_they_are_read(guarded: Service, client: httpx.Client) -> None:
    head = (
        f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n".encode()
    )
    holding = [connect(guarded) for _ in range(4)]
    for connection in holding:
        connection.sendall(head)
    eventually(lambda: client.get("/v1/pools").json()["in_flight"]["items"] == 4)
    with connect(guarded) as connection:
        connection.sendall(head)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer.lower()
    for connection in holding:
        connection.close()
    eventually(lambda: client.get("/v1/pools").json()["in_flight"]["items"] == 0)
    assert client.post("/v1/encode", content=PHOTO).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
def test_the_proxy_has_a_cap_of_its_own(announced: bool, client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(9):
            yield bytes(1 << 16)

    answer = client.post("/v1/encode", content=bytes(9 << 16) if announced else chunks())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "FOVEAL_MAX_BODY_BYTES" in answer.json()["error"]["message"]
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_sigterm_lets_running_requests_finish(guarded: Service, client: httpx.Client) -> None:
    answers: list[httpx.Response] = []

    def encode() -> None:
        answers.append(httpx.post(f"{guarded.url}/v1/encode", content=CLIP, headers=HEADERS, timeout=120))

    encoding = [threading.Thread(target=encode) for _ in range(3)]
    for thread in encoding:
        thread.start()
    with connect(guarded) as uploading:
        uploading.sendall(post(len(PHOTO)) + PHOTO[:10])
        # All four are inside, or answered already.
        eventually(lambda: client.get("/v1/pools").json()["in_flight"]["items"] + len(answers) >= 4)
        guarded.signal(signal.SIGTERM)
        eventually(lambda: client.get("/v1/pools").json()["in_flight"]["stopping"])
        refused = client.post("/v1/encode", content=PHOTO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert client.get("/health").json()["status"] == "stopping"
        for thread in encoding:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert guarded.running()
        uploading.sendall(PHOTO[10:])
        assert uploading.recv(16).startswith(b"HTTP/1.1 200 ")
    eventually(lambda: not guarded.running())
