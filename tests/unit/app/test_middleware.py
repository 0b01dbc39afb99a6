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
from app.middleware import (
    HOLD_ITEMS,
    NOTES,
    Admission,
    BodyCap,
    BodyLimits,
    Envelope,
    HeadAsGet,
    InFlight,
    access,
    at_proxy,
)
from tests.unit.conftest import Recorded

Handler = Callable[[Request], Awaitable[Response]]


def asgi(handler: Handler) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await handler(Request(scope, receive)))(scope, receive, send)

    return app


def call(app: ASGIApp, path: str = "/x", method: str = "POST", **request: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, f"http://test{path}", **request)

    return asyncio.run(run())


async def turns() -> None:
    """Lets the other tasks go on until they wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


def body_cap(handler: Handler, max_in_flight: int = 100, idle_s: float = 60.0) -> BodyCap:
    return BodyCap(asgi(handler), lambda: BodyLimits(10, max_in_flight), lambda: idle_s, InFlight())


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
    asyncio.run(Envelope(body_cap(length))(scope, receive, send))
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
    asyncio.run(Envelope(body_cap(length))(scope, receive, send))
    assert (records[0]["code"], "error" in records[0]) == (499, False)
    assert recorded["foveal_requests_cancelled"] == {(): [1]}


def test_an_impossible_length_is_refused(records: list[dict[str, Any]]) -> None:
    app = Envelope(body_cap(length))
    answer = call(app, headers={"content-length": "9" * 5000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(("size", "status"), [(10, 200), (11, 413)])
@pytest.mark.parametrize("announced", [True, False])
def test_the_body_cap(size: int, status: int, announced: bool, records: list[dict[str, Any]]) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(size):
            yield b"x"

    app = Envelope(body_cap(length))
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
    asyncio.run(Envelope(body_cap(length))(scope, receive, send))
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
        app = Envelope(body_cap(slow, 15))
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


def test_an_upload_that_stalls_is_given_up_and_keeps_nobody_out(records: list[dict[str, Any]]) -> None:
    in_flight = InFlight()
    app = Envelope(BodyCap(asgi(length), lambda: BodyLimits(10, 12), lambda: 0.05, in_flight))

    async def stalling() -> AsyncIterator[bytes]:
        yield b"12345"
        await asyncio.sleep(60)

    async def run() -> tuple[httpx.Response, ...]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers = {"content-length": "10"}
            stalled = asyncio.create_task(client.post("/x", content=stalling(), headers=headers))
            await turns()
            assert in_flight.bytes == 5
            # Five bytes have come of ten: seven fit beside them, eight do not.
            fits, full = await client.post("/x", content=b"1234567"), await client.post("/x", content=b"12345678")
            return fits, full, await stalled

    fits, full, stalled = asyncio.run(run())
    assert [answer.status_code for answer in (fits, full, stalled)] == [200, 503, 408]
    assert stalled.json()["error"]["code"] == "upload_timeout"
    assert stalled.headers["connection"] == "close"
    assert in_flight == InFlight()


def test_a_complete_body_is_not_timed(records: list[dict[str, Any]]) -> None:
    """As Serve's own receive does after the body, the second message never comes."""
    first = [{"type": "http.request", "body": b"12", "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not first:
            await asyncio.sleep(60)
        return first.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await receive()
        await PlainTextResponse("ok")(scope, receive, send)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(BodyCap(app, lambda: BodyLimits(10, 10), lambda: 0.01, InFlight())(scope, receive, send))
    assert sent[0]["status"] == 200


class Admitted:
    """`Admission` around routes that the test holds open, each with a number of items."""

    def __init__(self, max_items: int) -> None:
        self.in_flight, self.release = InFlight(), asyncio.Event()
        self.app = Envelope(Admission(self._route, lambda: max_items, self.in_flight))

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            scope[HOLD_ITEMS](int(scope["query_string"] or b"1"))
            await self.release.wait()
        await PlainTextResponse("done")(scope, receive, send)

    async def __call__(self, method: str, *items: int) -> list[httpx.Response]:
        """One request after another, those that are not refused held until all are sent."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            tasks = []
            for count in items:
                tasks.append(asyncio.create_task(client.request(method, f"/x?{count}")))
                await turns()
            self.release.set()
            return list(await asyncio.gather(*tasks))


@pytest.mark.parametrize(
    ("method", "items", "codes"),
    [
        ("POST", [1, 1, 1, 1], [200, 200, 200, 503]),
        ("POST", [2, 1, 1], [200, 200, 503]),
        ("POST", [1, 3, 2], [200, 503, 200]),
        ("POST", [9, 1], [200, 503]),  # one that is alone is always taken
        ("GET", [1] * 9, [200] * 9),
    ],
)
def test_items_in_flight_are_bounded(
    method: str, items: list[int], codes: list[int], records: list[dict[str, Any]], recorded: Recorded
) -> None:
    async def run() -> None:
        admitted = Admitted(3)
        answers = await admitted(method, *items)
        assert [answer.status_code for answer in answers] == codes
        for answer in answers:
            if answer.status_code == 503:
                assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("overloaded", "1")
        assert admitted.in_flight == InFlight()

    asyncio.run(run())
    if method == "POST":
        assert recorded["foveal_items_in_flight"][()][-1] == 0


def test_one_that_stops_refuses_new_requests_and_finishes_those_that_it_has(records: list[dict[str, Any]]) -> None:
    async def run() -> None:
        admitted = Admitted(9)
        transport = httpx.ASGITransport(admitted.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            running = asyncio.create_task(client.post("/x?1"))
            await turns()
            admitted.in_flight.stopping = True
            refused, told = await client.post("/x?1"), await client.get("/x")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert told.status_code == 200
            assert admitted.in_flight.items == 1
            admitted.release.set()
            assert (await running).status_code == 200
            assert admitted.in_flight.items == 0

    asyncio.run(run())


def test_past_the_bound_a_body_is_not_read(records: list[dict[str, Any]]) -> None:
    async def receive() -> Message:
        raise AssertionError("the body was read")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(Envelope(Admission(asgi(length), lambda: 1, InFlight(items=1)))(scope, receive, send))
    assert sent[0]["status"] == 503


def test_a_request_that_is_given_up_holds_nothing() -> None:
    in_flight = InFlight()
    admission = Admission(
        BodyCap(asgi(length), lambda: BodyLimits(10, 10), lambda: 60, in_flight), lambda: 5, in_flight
    )
    first: list[Message] = [{"type": "http.request", "body": b"12", "more_body": True}]

    async def receive() -> Message:
        return first.pop(0) if first else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        raise AssertionError("nobody listens")

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        task = asyncio.create_task(admission(scope, receive, send))
        await turns()
        assert in_flight == InFlight(1, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert in_flight == InFlight()

    asyncio.run(run())


def test_head_is_get_without_a_body() -> None:
    seen = []

    async def method(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["method"])
        await PlainTextResponse("")(scope, receive, send)

    for verb in ("HEAD", "GET", "POST"):
        call(HeadAsGet(method), method=verb)
    assert seen == ["GET", "GET", "POST"]


class Proxy:
    """`Edge` as `at_proxy` makes it, around a stand-in for Serve's proxy. Records what that is given."""

    def __init__(self, inner: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FOVEAL_MAX_BODY_BYTES", "10")
        monkeypatch.setenv("FOVEAL_MAX_BYTES_IN_FLIGHT", "15")
        (middleware,) = at_proxy()
        self.app = middleware.cls(self._seen, *middleware.args, **middleware.kwargs)
        self._inner, self.headers = inner, list[tuple[bytes, bytes]]()

    async def _seen(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = scope["headers"]
        await self._inner(scope, receive, send)


def test_the_proxy_drops_what_overrides_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(asgi(length), monkeypatch)
    headers = [
        (b"X-Request-Timeout-Seconds", b"0.5"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"serve-multiplexed-model-id", b"\xff"),
        (b"X-Session-Id", b"a"),
        (b"X-Request-Id", b"mine-1"),
        (b"Accept", b"image/*"),
    ]
    call(proxy.app, headers=headers)
    assert not [value for _, value in proxy.headers if value in {b"0.5", b"?1", b"\xff", b"a"}]
    assert {(b"accept", b"image/*"), (b"x-request-id", b"mine-1")} <= set(proxy.headers)


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"a b", b"x" * 129])
def test_the_proxy_makes_an_id_where_the_clients_is_of_no_use(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(asgi(length), monkeypatch)
    call(proxy.app, headers=[(b"x-request-id", value)])
    (made,) = [value for name, value in proxy.headers if name == b"x-request-id"]
    assert len(made) == 36


def serves_text(status: int, text: str, **headers: str) -> ASGIApp:
    return PlainTextResponse(text, status, headers)


@pytest.mark.parametrize(
    ("inner", "status", "code", "retry_after"),
    [
        (serves_text(404, "Path '/x' not found. Ping http://.../-/routes"), 404, "not_found", None),
        (serves_text(408, "Request 1 timed out after 60s."), 504, "deadline", None),
        (serves_text(503, "Request dropped due to backpressure (num_queued=1)"), 503, "overloaded", "1"),
        (serves_text(429, "Request dropped due to backpressure", **{"retry-after": "7"}), 503, "overloaded", "7"),
        (serves_text(503, "Deployment is unavailable because it failed to deploy."), 503, "unavailable", "5"),
        (serves_text(500, "Internal Server Error"), 500, "internal", None),
    ],
)
def test_what_serve_answers_itself_gets_the_envelope(
    inner: ASGIApp,
    status: int,
    code: str,
    retry_after: str | None,
    monkeypatch: pytest.MonkeyPatch,
    records: list[dict[str, Any]],
) -> None:
    answer = call(Proxy(inner, monkeypatch).app, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert (answer.json()["error"]["code"], answer.headers.get("retry-after")) == (code, retry_after)
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert (records[0]["id"], records[0]["code"], records[0]["error"]) == ("mine", status, code)


def test_serves_own_routes_and_the_applications_answers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(serves_text(503, "This node is being drained."), monkeypatch)
    assert call(proxy.app, path="/-/healthz").text == "This node is being drained."
    assert call(Proxy(serves_text(200, "5"), monkeypatch).app).text == "5"
    refused = Envelope(body_cap(length))
    assert call(Proxy(refused, monkeypatch).app, headers={"content-length": "x"}).status_code == 400


def test_an_answer_that_never_comes_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    answer = call(Proxy(dies, monkeypatch).app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(("size", "status"), [(10, 200), (11, 413)])
@pytest.mark.parametrize("announced", [True, False])
def test_the_proxy_caps_bodies(
    size: int, status: int, announced: bool, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]]
) -> None:
    taken = 0

    async def buffers(scope: Scope, receive: Receive, send: Send) -> None:
        """As Serve's proxy: reads all, and answers nothing once the client is gone."""
        nonlocal taken
        while (message := await receive())["type"] != "http.disconnect":
            taken += len(message["body"])
            if not message["more_body"]:
                await PlainTextResponse("ok")(scope, receive, send)
                return

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(size):
            yield b"x"

    answer = call(Proxy(buffers, monkeypatch).app, content=b"x" * size if announced else chunks())
    assert answer.status_code == status
    assert taken == (10 if status == 200 or not announced else 0)
    if status == 413:
        error = answer.json()["error"]
        assert error["code"] == "body_too_large"
        assert "FOVEAL_MAX_BODY_BYTES (10)" in error["message"]


def test_the_proxy_bounds_all_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    release = asyncio.Event()

    async def slow(request: Request) -> Response:
        await request.body()
        await release.wait()
        return PlainTextResponse("done")

    async def run() -> list[int]:
        app = Proxy(asgi(slow), monkeypatch).app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            posts = [asyncio.create_task(client.post("/x", content=b"12345678")) for _ in range(2)]
            (refused,), (waiting,) = await asyncio.wait(posts, return_when=asyncio.FIRST_COMPLETED)
            assert refused.result().json()["error"]["code"] == "overloaded"
            release.set()
            return [(await waiting).status_code, (await client.post("/x", content=b"12345678")).status_code]

    assert asyncio.run(run()) == [200, 200]


def test_the_proxy_breaks_a_response_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        call(Proxy(app, monkeypatch).app)


def test_an_exception_of_the_proxy_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "secret")

    answer = call(Proxy(app, monkeypatch).app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text
