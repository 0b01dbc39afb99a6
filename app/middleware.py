"""Plain ASGI middleware around the routes: the body cap, the error envelope with the log line, and the proxy's edge."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any

from ray.exceptions import TaskCancelledError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import CODES, FovealError
from app.metrics import BYTES_IN, BYTES_OUT, CANCELLED, ERRORS

NOTES = "foveal.notes"  # scope key: what a route adds to its request's log line
SERVE_HEADERS = {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}

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


class BodyCap:
    """Bounds the bytes of one body, and of all bodies that are being received or worked on.

    A body is refused at once if its length is announced, else as soon as the bytes passed are too many.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_bytes_in_flight: int) -> None:
        self._app, self._max_bytes, self._max_in_flight = app, max_bytes, max_bytes_in_flight
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or len(announced) > 18:
            raise FovealError("malformed_request", "Content-Length is not a possible number")
        held = received = 0

        def hold(size: int) -> None:
            nonlocal held
            more = max(size - held, 0)
            if size > self._max_bytes:
                raise FovealError(
                    "body_too_large", f"the body has more than limits.max_body_bytes ({self._max_bytes}) bytes"
                )
            if self._in_flight + more > self._max_in_flight:
                raise FovealError("overloaded", "the bodies in flight fill limits.max_bytes_in_flight", None, 1)
            self._in_flight += more
            held += more

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            hold(received)
            return message

        try:
            hold(int(announced))
            await self._app(scope, counted, send)
        finally:
            self._in_flight -= held
            BYTES_IN.record(received)


class StripServeHeaders:
    """Drops the headers by which a client could override Serve's own time-out and disconnect rules."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "headers": [(k, v) for k, v in scope["headers"] if k.lower() not in SERVE_HEADERS]}
        await self._app(scope, receive, send)


def at_proxy() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: what runs in Serve's proxy, before a request is routed."""
    return [Middleware(StripServeHeaders)]


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
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(error.envelope(), error.status, headers)
