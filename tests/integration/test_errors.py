"""What a client can do wrong: a 4xx envelope that names the trouble, and a service that goes on."""

from __future__ import annotations

import base64
import io
import socket
from collections.abc import Callable, Iterator
from typing import Any

import av
import httpx
import numpy as np
import pytest

from benchmarks.service import Service
from tests.integration.media import Sample, jpeg, mp4, png, webp_animation
from tests.integration.test_encode import assert_close

pytestmark = pytest.mark.integration

PNG = png(256, 256, 1).data
JPEG = jpeg(640, 480, 1).data
MP4 = mp4(96, 96, 8, 1).data
HTML = b"<!doctype html><html><body><h1>404 Not Found</h1></body></html>"


def clip_without_frames() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={"movflags": "empty_moov"}) as container:
        stream = container.add_stream("libx264", rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        container.start_encoding()
    return file.getvalue()


def data_uri(data: bytes) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


def form(*files: bytes, **fields: str) -> dict[str, Any]:
    return {"files": [("file", (f"{i}.bin", data)) for i, data in enumerate(files)], "data": fields}


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        pytest.param({"content": b""}, 400, "empty_body", "body", id="empty body"),
        pytest.param({"content": JPEG[: len(JPEG) // 2]}, 400, "undecodable_media", "body", id="truncated JPEG"),
        pytest.param({"content": MP4[: len(MP4) // 2]}, 400, "undecodable_media", "body", id="truncated MP4"),
        pytest.param({"content": clip_without_frames()}, 400, "undecodable_media", "body", id="zero-frame video"),
        pytest.param(
            {"files": [("file", ("a.jpg", b"just some words", "image/jpeg"))]},
            415,
            "unsupported_media",
            "file[0]",
            id="text named .jpg",
        ),
        pytest.param(
            {"content": HTML, "headers": {"content-type": "image/png"}},
            415,
            "unsupported_media",
            "body",
            id="HTML as image/png",
        ),
        pytest.param(form(PNG, PNG, JPEG[:300]), 400, "undecodable_media", "file[2]", id="one bad of three"),
        pytest.param(form(PNG, b""), 400, "empty_body", "file[1]", id="an empty part"),
        pytest.param(form(*[PNG] * 65), 413, "too_many_items", None, id="65 files"),
        pytest.param({"content": PNG, "params": {"format": "xml"}}, 422, "invalid_option", "format", id="format"),
        pytest.param({"content": PNG, "params": {"frobnicate": "1"}}, 422, "invalid_option", "frobnicate", id="name"),
        pytest.param({"content": PNG, "params": {"main_only": "maybe"}}, 422, "invalid_option", "main_only", id="bool"),
        pytest.param(form(PNG, pooling="max"), 422, "invalid_option", "pooling", id="wrong field of the form"),
        pytest.param(
            {"content": MP4, "params": {"fps": 2, "num_frames": 8}}, 422, "invalid_option", None, id="fps, num_frames"
        ),
        pytest.param({"content": MP4, "params": {"fps": "nan"}}, 422, "invalid_option", "fps", id="fps NaN"),
        pytest.param(
            {"content": MP4, "params": {"num_frames": 769}}, 422, "invalid_option", "num_frames", id="too many"
        ),
        pytest.param(
            {"content": PNG, "params": {"max_pixels": 10**9}}, 422, "invalid_option", "max_pixels", id="too large"
        ),
        pytest.param(
            {"content": PNG, "params": {"modality": "video"}}, 422, "modality_mismatch", "modality", id="a still"
        ),
        pytest.param(
            {"content": MP4, "params": {"modality": "image"}}, 422, "modality_mismatch", "modality", id="a clip"
        ),
        pytest.param({"content": png(4096, 16, 1).data}, 422, "aspect_ratio", "body", id="aspect over 200"),
        pytest.param({"json": {"input": []}}, 400, "malformed_request", "input", id="no parts"),
        pytest.param(
            {"content": b"{", "headers": {"content-type": "application/json"}},
            400,
            "malformed_request",
            None,
            id="JSON",
        ),
        pytest.param(
            {"json": {"input": [{"type": "text", "text": "hi"}]}}, 400, "malformed_request", "input[0]", id="part type"
        ),
        pytest.param(
            {"json": {"input": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}},
            422,
            "fetch_forbidden",
            "input[0]",
            id="fetching is off",
        ),
        pytest.param(
            {"json": {"input": [{"type": "video_url", "video_url": {"url": data_uri(PNG)}}]}},
            422,
            "modality_mismatch",
            "input[0]",
            id="a still as video_url",
        ),
        pytest.param(
            {"json": {"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}]}},
            400,
            "malformed_request",
            "input[0]",
            id="bad base64",
        ),
        pytest.param(
            {
                "content": b"--x\r\nA: b\r\n\r\nc\r\n--x--\r\n",
                "headers": {"content-type": "multipart/form-data; boundary=x"},
            },
            400,
            "malformed_request",
            None,
            id="broken multipart",
        ),
        pytest.param(
            {"content": PNG, "headers": {"content-type": "multipart/form-data"}},
            400,
            "malformed_request",
            None,
            id="multipart without a boundary",
        ),
    ],
)
def test_bad_requests(
    client: httpx.Client, request_: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    answer = client.post("/v1/encode", **request_)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) > 5
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/encode", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
def test_wrong_routes(client: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


def test_an_announced_body_over_the_cap_is_refused_before_it_is_sent(service: Service) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        answer = b""
        while b"body_too_large" not in answer and (chunk := connection.recv(65536)):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_a_chunked_body_over_the_cap_is_refused(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(66):
            yield bytes(1 << 20)

    answer = client.post("/v1/encode", content=chunks())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_the_service_still_serves(client: httpx.Client, reference: Callable[[Sample], np.ndarray]) -> None:
    from safetensors.numpy import load

    assert client.get("/health").status_code == 200
    for sample in (png(320, 256, 77), webp_animation(64, 64, 5, 78), mp4(64, 64, 18, 79)):
        answer = client.post("/v1/encode", content=sample.data)
        assert_close(load(answer.content)["0.embeddings"], reference(sample))
