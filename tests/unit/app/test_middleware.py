"""The middleware around a bare ASGI app, without Serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from ray.exceptions import TaskCancelledError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import FovealError
from app.middleware import NOTES, SERVE_HEADERS, BodyCap, Envelope, access, at_proxy
from tests.unit.conftest import Recorded

Handler = Callable[[Request], Awaitable[Response]]


def asgi(handler: Handler) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await handler(Request(scope, receive)))(scope, receive, send)

    return app


def call(app: ASGIApp, **request: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/x", **request)

    return asyncio.run(run())


async def length(request: Request) -> Response:
    request.scope.setdefault(NOTES, {})["items"] = 1
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(access, "info", lambda line: made.append(json.loads(line)))
    return made


def test_one_log_line_a_request(records: list[dict[str, Any]]) -> None:
    assert call(Envelope(asgi(length)), content=b"12345", headers={"x-request-id": 'a"b'}).text == "5"
    (record,) = records
    assert record.pop("ms") >= 0
    assert record == {"id": 'a"b', "method": "POST", "path": "/x", "code": 200, "bytes_out": 1, "items": 1}


def test_errors_become_envelopes(records: list[dict[str, Any]]) -> None:
    async def full(request: Request) -> Response:
        raise FovealError("overloaded", "the queue is full", "file[0]", retry_after_s=3)

    answer = call(Envelope(asgi(full)))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json() == {
        "error": {"message": "the queue is full", "type": "server_error", "code": "overloaded", "param": "file[0]"}
    }
    assert (records[0]["code"], records[0]["error"]) == (503, "overloaded")


def test_the_unforeseen_tells_nothing(records: list[dict[str, Any]]) -> None:
    async def broken(request: Request) -> Response:
        raise ZeroDivisionError("secret")

    answer = call(Envelope(asgi(broken)))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret" not in answer.text
    assert records[0]["error"] == "internal"


def test_a_response_that_breaks_halfway_is_not_patched_up(records: list[dict[str, Any]], recorded: Recorded) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        call(Envelope(app))
    assert records[0]["error"] == "broken_response"
    assert recorded["foveal_errors"] == {("broken_response",): [1]}


def test_a_client_that_leaves_while_it_uploads_is_no_fault(records: list[dict[str, Any]], recorded: Recorded) -> None:
    messages = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError("nobody listens")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(Envelope(BodyCap(asgi(length), 10, 100))(scope, receive, send))
    assert (records[0]["code"], "error" in records[0]) == (499, False)
    assert recorded == {
        "foveal_bytes_in": {(): [1]},
        "foveal_requests_cancelled": {(): [1]},
    }


def test_an_upload_that_serve_gives_up_is_no_fault(records: list[dict[str, Any]], recorded: Recorded) -> None:
    async def receive() -> Message:
        raise TaskCancelledError

    async def send(message: Message) -> None:
        raise AssertionError("nobody listens")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(Envelope(BodyCap(asgi(length), 10, 100))(scope, receive, send))
    assert (records[0]["code"], "error" in records[0]) == (499, False)
    assert recorded["foveal_requests_cancelled"] == {(): [1]}


def test_an_impossible_length_is_refused(records: list[dict[str, Any]]) -> None:
    app = Envelope(BodyCap(asgi(length), 10, 100))
    answer = call(app, headers={"content-length": "9" * 5000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(("size", "status"), [(10, 200), (11, 413)])
@pytest.mark.parametrize("announced", [True, False])
def test_the_body_cap(size: int, status: int, announced: bool, records: list[dict[str, Any]]) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(size):
            yield b"x"

    app = Envelope(BodyCap(asgi(length), 10, 100))
    answer = call(app, content=b"x" * size if announced else chunks())
    assert answer.status_code == status
    assert answer.text == "10" if status == 200 else answer.json()["error"]["code"] == "body_too_large"


def test_an_announced_body_over_the_cap_is_never_read(records: list[dict[str, Any]]) -> None:
    async def receive() -> Message:
        raise AssertionError("the body was read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"11")]}
    asyncio.run(Envelope(BodyCap(asgi(length), 10, 100))(scope, receive, send))
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("announced", [True, False])
def test_the_bodies_in_flight_are_bounded(announced: bool, records: list[dict[str, Any]]) -> None:
    release = asyncio.Event()

    async def slow(request: Request) -> Response:
        await request.body()
        await release.wait()
        return PlainTextResponse("done")

    async def chunks() -> AsyncIterator[bytes]:
        yield b"123"
        yield b"456"

    async def run() -> list[int]:
        app = Envelope(BodyCap(asgi(slow), 10, 15))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            posts = [
                asyncio.create_task(client.post("/x", content=b"123456" if announced else chunks())) for _ in range(3)
            ]
            refused, waiting = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
            codes = [task.result().status_code for task in refused]
            assert [task.result().headers["retry-after"] for task in refused] == ["1"]
            release.set()
            codes += [(await task).status_code for task in waiting]
            return [*codes, (await client.post("/x", content=b"123456")).status_code]

    assert asyncio.run(run()) == [503, 200, 200, 200]


def test_the_proxy_drops_what_overrides_serve() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    for middleware in at_proxy():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    scope = {"type": "http", "headers": [(name, b"1") for name in SERVE_HEADERS] + [(b"accept", b"*/*")]}
    asyncio.run(app(scope, None, None))  # type: ignore[arg-type]
    assert seen == [(b"accept", b"*/*")]
