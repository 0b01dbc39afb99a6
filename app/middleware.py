"""Plain ASGI middleware around the routes: the body cap, the error envelope with the log line, and the proxy's edge."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ray.exceptions import TaskCancelledError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import CODES, FovealError
from app.metrics import BYTES_IN, BYTES_IN_FLIGHT, BYTES_OUT, CANCELLED, ERRORS, ITEMS_IN_FLIGHT
from configs.settings import Limits

NOTES = "foveal.notes"  # scope key: what a route adds to its request's log line
HOLD_ITEMS = "foveal.hold_items"  # scope key: how a route tells the number of its request's items
HEADERS = {"unauthorized": {"www-authenticate": "Bearer"}, "upload_timeout": {"connection": "close"}}  # by error code
# For Serve's proxy, which does not know the settings of the applications behind it.
MAX_BODY_BYTES = "FOVEAL_MAX_BODY_BYTES"
MAX_BYTES_IN_FLIGHT = "FOVEAL_MAX_BYTES_IN_FLIGHT"
# Names of headers, with _ for -, as Serve takes either for some.
REQUEST_ID = b"x_request_id"
OVERRIDES = {
    b"x_request_timeout_seconds",
    b"x_request_disconnect_disabled",
    b"serve_multiplexed_model_id",
    b"x_session_id",
}
PROXY_BODIES = 32  # of the largest size, in the default of FOVEAL_MAX_BYTES_IN_FLIGHT
NO_ANSWER = "the replica that had the request ended before it answered"
ID = re.compile(rb"[\x21-\x7e]{1,128}")

access = logging.getLogger("foveal.access")


def log_to_stdout() -> None:
    """Sends the log lines of requests to stdout, one JSON object a line and nothing else on it."""
    access.handlers = [logging.StreamHandler(sys.stdout)]
    access.setLevel(logging.INFO)
    access.propagate = False


class Envelope:
    """Turns every error into the envelope, and writes one JSON log line a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, code, sent = time.perf_counter(), 0, 0
        notes: dict[str, Any] = scope.setdefault(NOTES, {})

        async def counted(message: Message) -> None:
            nonlocal code, sent
            if message["type"] == "http.response.start":
                code = message["status"]
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except (ClientDisconnect, TaskCancelledError):
            # It left before its body was here, as starlette or Serve's proxy tells it: nobody is there to answer.
            code = 499
        except asyncio.CancelledError:
            code = 499
            raise
        except Exception as error:
            if code:  # The status is already on the wire: only breaking the connection can tell the client.
                notes["error"] = "broken_response"
                raise
            known = to_foveal_error(error)
            notes["error"] = known.code
            await error_response(known)(scope, receive, counted)
        finally:
            BYTES_OUT.record(sent)
            CANCELLED.record(code == 499)
            if "error" in notes:
                ERRORS.record(1, notes["error"])
            record = {
                "id": Headers(scope=scope).get("x-request-id"),
                "method": scope["method"],
                "path": scope["path"],
                "code": code,
                "ms": round((time.perf_counter() - started) * 1000, 1),
                "bytes_out": sent,
                **notes,
            }
            access.info(json.dumps(record))


@dataclass
class InFlight:
    """What one ingress replica works on now: items of requests, and bytes of their bodies that have come."""

    items: int = 0
    bytes: int = 0
    stopping: bool = False  # refuses new requests

    def hold_items(self, items: int, held: int, max_items: int) -> int:
        """Holds `items` for a request that holds `held` of them so far, and gives `items`.

        Raises:
            FovealError: `overloaded`, with others in flight they would be over `max_items`; `unavailable`, on a new
                request once it is stopping.
        """
        if self.stopping and not held:
            raise FovealError("unavailable", "the service is stopping", None, 5)
        others = self.items - held
        if others and others + items > max_items:
            raise FovealError("overloaded", "the items in flight are limits.max_items_in_flight", None, 1)
        self.items = others + items
        return items

    def record(self) -> None:
        ITEMS_IN_FLIGHT.record(self.items)
        BYTES_IN_FLIGHT.record(self.bytes)


class Admission:
    """Bounds the items that are being received or worked on. Past the bound a request is refused before it is read.

    A request counts as one item until its route tells their number: `scope[HOLD_ITEMS](number)`. One that is alone is
    always taken. max_items: the bound as it is now.
    """

    def __init__(self, app: ASGIApp, max_items: Callable[[], int], in_flight: InFlight) -> None:
        self._app, self._max_items, self._in_flight = app, max_items, in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        held = 0

        def hold(items: int) -> None:
            nonlocal held
            held = self._in_flight.hold_items(items, held, self._max_items())

        try:
            hold(1)
            self._in_flight.record()
            await self._app({**scope, HOLD_ITEMS: hold}, receive, send)
        finally:
            self._in_flight.items -= held
            self._in_flight.record()


@dataclass(frozen=True)
class BodyLimits:
    """Bounds of the bytes of one body, and of what has come of all bodies in flight. `where` names them to clients."""

    max_bytes: int
    max_in_flight: int
    where: tuple[str, str] = ("limits.max_body_bytes", "limits.max_bytes_in_flight")

    def check(self, size: int, others: int) -> None:
        """Raises:
        FovealError: `body_too_large` or `overloaded`, if a body of `size` bytes beside `others` is over a bound.
        """
        if size > self.max_bytes:
            raise FovealError("body_too_large", f"the body has more than {self.where[0]} ({self.max_bytes}) bytes")
        if others + size > self.max_in_flight:
            raise FovealError("overloaded", f"the bodies in flight fill {self.where[1]}", None, 1)


def announced_bytes(scope: Scope) -> int:
    """What Content-Length says; 0 without one.

    Raises:
        FovealError: `malformed_request`.
    """
    announced = Headers(scope=scope).get("content-length", "0")
    if not announced.isdecimal() or len(announced) > 18:
        raise FovealError("malformed_request", "Content-Length is not a possible number")
    return int(announced)


class BodyCap:
    """Bounds bodies in bytes, and the time in which nothing comes of one that is not complete.

    A body that is announced must fit beside what has come of the others, but holds only what has come of itself: an
    upload that stalls keeps nobody out. limits, idle_s: as they are now; a request keeps those that it came with.
    """

    def __init__(
        self, app: ASGIApp, limits: Callable[[], BodyLimits], idle_s: Callable[[], float], in_flight: InFlight
    ) -> None:
        self._app, self._limits, self._idle_s, self._in_flight = app, limits, idle_s, in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received, complete = 0, False
        limits, idle_s = self._limits(), self._idle_s()

        async def counted() -> Message:
            nonlocal received, complete
            try:
                async with asyncio.timeout(None if complete else idle_s):
                    message = await receive()
            except TimeoutError:
                why = f"nothing of the body came for limits.upload_idle_s ({idle_s:g} s)"
                raise FovealError("upload_timeout", why) from None
            complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            limits.check(received + size, self._in_flight.bytes - received)
            received += size
            self._in_flight.bytes += size
            return message

        try:
            limits.check(announced_bytes(scope), self._in_flight.bytes)
            await self._app(scope, counted, send)
        finally:
            self._in_flight.bytes -= received
            BYTES_IN.record(received)


class HeadAsGet:
    """Answers HEAD as GET, whose body the HTTP server then leaves out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class Edge:
    """Stands before Serve's proxy: bounds the bodies that the proxy buffers, drops the headers by which a client could
    override Serve's own rules, and gives the envelope to what Serve would answer in plain text or not at all."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app, self._limits = app, limits
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "headers": edge_headers(scope["headers"])}
        serves_own = scope["path"].startswith("/-/")
        received, started, left = 0, False, False
        error: FovealError | None = None  # what the client is told instead of the inner answer
        plain: _PlainAnswer | None = None

        async def counted() -> Message:
            nonlocal received, error, left
            message = await receive()
            size = len(message.get("body", b""))
            try:
                self._limits.check(received + size, self._in_flight - received)
            except FovealError as refusal:
                error = refusal
                return {"type": "http.disconnect"}  # ends what the replica has begun
            received += size
            self._in_flight += size
            left = left or message["type"] == "http.disconnect"
            return message

        async def enveloped(message: Message) -> None:
            nonlocal started, plain
            if message["type"] == "http.response.start":
                if error is not None or (not serves_own and _PlainAnswer.is_one(message)):
                    plain = _PlainAnswer(message)
                    return
                started = True
            if plain is not None:
                plain.body += message.get("body", b"")
            else:
                await send(message)

        try:
            self._limits.check(announced_bytes(scope), self._in_flight)
            await self._app(scope, counted, enveloped)
        except FovealError as refusal:
            error = refusal
        except asyncio.CancelledError:
            if error is None and plain is None:
                raise
        except Exception as unforeseen:
            if started:
                raise
            error = to_foveal_error(unforeseen)
        finally:
            self._in_flight -= received
        if started or left:
            return
        error = error or (plain.error() if plain else FovealError("unavailable", NO_ANSWER, None, 1))
        request_id = Headers(scope=scope)["x-request-id"]
        access.info(
            json.dumps(
                {
                    "id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "code": error.status,
                    "error": error.code,
                    "at": "proxy",
                }
            )
        )
        response = error_response(error)
        response.headers["x-request-id"] = request_id
        await response(scope, receive, send)


class _PlainAnswer:
    """An answer of Serve's own instead of the application's, which never answers an error as plain text."""

    def __init__(self, start: Message) -> None:
        self.status, self.headers, self.body = start["status"], Headers(raw=start["headers"]), b""

    @staticmethod
    def is_one(start: Message) -> bool:
        return start["status"] >= 400 and Headers(raw=start["headers"]).get("content-type", "").startswith("text/plain")

    def error(self) -> FovealError:
        if self.status == 404:
            return FovealError("not_found", CODES["not_found"][1])
        if self.status == 408:
            return FovealError("deadline", "Serve's request_timeout_s passed")
        if self.status in (429, 503):
            full = b"backpressure" in self.body.lower()
            retry_after = self.headers.get("retry-after", "1" if full else "5")
            message = "Serve's queues are full" if full else "no replica of the service can take the request"
            return FovealError("overloaded" if full else "unavailable", message, None, int(retry_after))
        return FovealError("internal", CODES["internal"][1])


def edge_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without Serve's overrides, and with one request id that Serve can decode and logs can hold."""
    kept, ids = [], []
    for name, value in headers:
        plain = name.lower().replace(b"-", b"_")
        if plain == REQUEST_ID:
            ids.append(value)
        elif plain not in OVERRIDES:
            kept.append((name, value))
    request_id = ids[0] if len(ids) == 1 and ID.fullmatch(ids[0]) else str(uuid4()).encode()
    return [*kept, (b"x-request-id", request_id)]


def at_proxy() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: what runs in Serve's proxy, before a request is routed."""
    log_to_stdout()
    defaults = Limits()
    limits = BodyLimits(
        int(os.environ.get(MAX_BODY_BYTES, defaults.max_body_bytes)),
        int(os.environ.get(MAX_BYTES_IN_FLIGHT, PROXY_BODIES * defaults.max_body_bytes)),
        (MAX_BODY_BYTES, MAX_BYTES_IN_FLIGHT),
    )
    return [Middleware(Edge, limits=limits)]


def to_foveal_error(error: Exception) -> FovealError:
    """The client's view of an exception. What nobody foresaw is logged and tells nothing."""
    if isinstance(error, FovealError):
        return error
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "malformed_request")
        return FovealError(code, CODES[code][1])
    logging.getLogger("foveal").error("unforeseen error", exc_info=error)
    return FovealError("internal", CODES["internal"][1])


def error_response(error: FovealError) -> JSONResponse:
    headers = dict(HEADERS.get(error.code, {}))
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return JSONResponse(error.envelope(), error.status, headers)
