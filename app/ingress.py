"""The HTTP routes. One short method each; the work is in pipeline.py, the errors in middleware.py."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Security
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from app import metrics
from app.auth import Auth, KeyFile
from app.errors import FovealError
from app.formats import FORMATS, SLOW
from app.formats.types import Rendered
from app.inputs import read_call, read_request
from app.middleware import (
    HOLD_ITEMS,
    NOTES,
    Admission,
    BodyCap,
    BodyLimits,
    Envelope,
    HeadAsGet,
    InFlight,
    error_response,
    log_to_stdout,
    to_foveal_error,
)
from app.openapi import ENCODE, ERRORS
from app.pipeline import Pipeline, Timings
from app.pools import Pools
from app.store import Store
from app.threads import in_thread
from configs.processor import ProcessorConfig
from configs.settings import Settings, change_limits
from deployments.batcher import SWITCH_INTERVAL_S
from encoder.checkpoint import digest_checkpoint, read_vision_config, resolve_checkpoint

GRACE_S = 120.0  # limits.deadline_s, by default: who stops a replica waits for what is under way


class IngressReplica:
    """Takes HTTP requests, decodes their media and has the pools encode them."""

    def __init__(
        self, settings: Settings, image: DeploymentHandle, video: DeploymentHandle, eager: DeploymentHandle
    ) -> None:
        log_to_stdout()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._args = self._settings = settings
        self._folder = resolve_checkpoint(settings.model)
        self._pools = Pools({"image": image, "video": video, "eager": eager})
        store = None if settings.store.root is None else _open_store(settings, self._folder)
        self._pipeline = Pipeline(settings, ProcessorConfig.from_checkpoint(self._folder), self._pools, store)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it with the deployment's `user_config` at the start and when it changes.

        Raises:
            ValueError: a name that is no field of `IngressUserConfig`, or a value that the settings refuse.
        """
        self._settings = change_limits(self._args, user_config)
        self._pipeline.configure(self._settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        api = FastAPI(
            title="Foveal",
            summary="Images and videos in, Qwen3-VL visual tokens out.",
            version="1",
            docs_url=None,
            redoc_url=None,
        )
        keys_file = self._settings.auth.api_keys_file
        # `Auth` asks for the key, before anything is read; this only states it in /openapi.json.
        stated = [] if keys_file is None else [Security(HTTPBearer(auto_error=False))]
        api.add_api_route(
            "/v1/encode",
            self.post_encode,
            methods=["POST"],
            dependencies=stated,
            openapi_extra=ENCODE,
            responses=ERRORS,
            response_model=None,
        )
        api.add_api_route("/v1/models", self.models, dependencies=stated)
        api.add_api_route("/v1/pools", self.pools, dependencies=stated)
        api.add_api_route("/health", self.health, responses={503: {"description": "a pool is not well"}})
        api.add_api_route("/docs", _page("docs.html"), include_in_schema=False)
        api.add_api_route("/", _page("index.html"), include_in_schema=False)
        api.add_exception_handler(HTTPException, _http_error)
        # The last one added is the outermost.
        self._in_flight = InFlight()
        api.add_middleware(
            BodyCap,
            limits=self._body_limits,
            idle_s=lambda: self._settings.limits.upload_idle_s,
            in_flight=self._in_flight,
        )
        api.add_middleware(
            Admission, max_items=lambda: self._settings.limits.max_items_in_flight, in_flight=self._in_flight
        )
        if keys_file is not None:
            api.add_middleware(Auth, keys=KeyFile(Path(keys_file)))
        api.add_middleware(HeadAsGet)
        api.add_middleware(Envelope)
        return api

    async def post_encode(self, request: Request) -> Response:
        """Encodes the items of the body and gives their visual-token embeddings."""
        notes, timings = request.scope[NOTES], Timings()
        async with self._deadline():
            options, sources = await read_request(request, self._settings.limits)
            notes["items"] = len(sources)
            request.scope[HOLD_ITEMS](len(sources))
            items = await self._pipeline.run(sources, options, timings)
            notes["pools"] = [item.pool for item in items]
            if options.deliver == "store":
                notes["stored"] = [item.stored for item in items]
            started = time.perf_counter()
            render = partial(FORMATS[options.format], self._settings.model, items)
            rendered = await in_thread(render) if options.format in SLOW else render()
            timings.note(format=time.perf_counter() - started)
            timings.note(total=time.perf_counter() - timings.started)
        return PieceResponse(rendered, {"server-timing": timings.header()})

    async def encode(self, media: bytes | list[bytes], **options: Any) -> list[dict[str, Any]]:
        """The embeddings of one or several media as arrays, for callers inside the cluster: no HTTP.

        `serve.get_app_handle("foveal").encode.remote(media, **options)`; the options are those of `POST /v1/encode`
        but `format`, each of its own type. The limits and metrics are the same.

        Returns:
            For each item, in order, a dict of its facts and arrays: see `EncodedItem.arrays`.

        Raises:
            RuntimeError: its text is the JSON object that is `error` in HTTP: message, type, code and param.
        """
        limits, timings, size, held = self._settings.limits, Timings(), 0, 0
        try:
            async with self._deadline():
                parsed, sources = read_call(media, options, limits)
                received = sum(len(source.data or b"") for source in sources)
                self._body_limits().check(received, self._in_flight.bytes)
                held = self._in_flight.hold_items(len(sources), 0, limits.max_items_in_flight)
                size = received
                self._in_flight.bytes += size
                self._in_flight.record()
                items = await self._pipeline.run(sources, parsed, timings)
                timings.note(total=time.perf_counter() - timings.started)
            metrics.BYTES_OUT.record(sum(item.embeddings.nbytes for item in items if item.embeddings is not None))
            return [item.arrays() for item in items]
        except asyncio.CancelledError:
            metrics.CANCELLED.record(1)
            raise
        except Exception as error:
            known = to_foveal_error(error)
            metrics.ERRORS.record(1, known.code)
            # A caller need not have our classes.
            raise RuntimeError(json.dumps(known.envelope()["error"])) from None
        finally:
            self._in_flight.items -= held
            self._in_flight.bytes -= size
            self._in_flight.record()
            metrics.BYTES_IN.record(size)

    async def models(self) -> dict[str, Any]:
        """The model served, as OpenAI lists it; `root` is the checkpoint's folder."""
        entry = {
            "id": self._settings.model,
            "object": "model",
            "created": int((self._folder / "config.json").stat().st_mtime),
            "owned_by": "foveal",
            "root": str(self._folder),
        }
        return {"object": "list", "data": [entry]}

    async def pools(self) -> dict[str, Any]:
        """What each pool is and has done, summed over its replicas; what the ingress replica that answers holds."""
        views = await self._pools.views()
        return {"pools": [view.summary() for view in views], "in_flight": asdict(self._in_flight)}

    async def health(self) -> JSONResponse:
        """200 while every pool has a healthy replica (or none on purpose) and none has latched a fault."""
        views = await self._pools.views()
        well = all(view.well for view in views) and not self._in_flight.stopping
        status = "stopping" if self._in_flight.stopping else "ok" if well else "unhealthy"
        body = {"status": status, "pools": {view.name: view.state for view in views}}
        return JSONResponse(body, 200 if well else 503)

    async def drain(self) -> int:
        """Refuses requests from now on, and tells how many items are still under way. For who stops the service."""
        self._in_flight.stopping = True
        return self._in_flight.items

    def _body_limits(self) -> BodyLimits:
        return BodyLimits(self._settings.limits.max_body_bytes, self._settings.limits.max_bytes_in_flight)

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        deadline_s = self._settings.limits.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError:
            raise FovealError("deadline", f"limits.deadline_s ({deadline_s:g} s) passed") from None


def _open_store(settings: Settings, folder: Path) -> Store:
    """Raises:
    ValueError: the largest item could never be stored.
    """
    root, max_bytes, max_tokens = settings.store.root, settings.store.max_bytes, settings.limits.max_tokens
    assert root is not None
    largest = max_tokens * read_vision_config(folder).width * 4
    if max_bytes < largest:
        item = f"the {largest} bytes of one item of limits.max_tokens ({max_tokens})"
        raise ValueError(f"store.max_bytes ({max_bytes}) is below {item}")
    return Store(Path(root), max_bytes, settings.store.lease_s, digest_checkpoint(folder))


Ingress = serve.deployment(
    name="Ingress",
    ray_actor_options={"num_cpus": 0.25},
    # Far over limits.max_items_in_flight, so that it is the ingress who refuses, in its own words, and before it reads.
    max_ongoing_requests=1024,
    # Serve's proxy holds the bodies of these. They wait only while there is no replica.
    max_queued_requests=128,
    health_check_period_s=1,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=GRACE_S,
)(serve.ingress()(IngressReplica))


class PieceResponse(Response):
    """Sends a rendered body piece by piece, its length announced."""

    def __init__(self, rendered: Rendered, headers: dict[str, str]) -> None:
        super().__init__(None, 200, {**headers, "content-length": str(rendered.length)}, rendered.media_type)
        self._pieces = rendered.pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            # Serve's own proxy pickles messages, which a memoryview does not survive.
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _page(name: str) -> Any:
    html = files("app").joinpath("web", name).read_text()

    async def page() -> HTMLResponse:
        return HTMLResponse(html)

    return page


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    known = to_foveal_error(error)
    request.scope[NOTES]["error"] = known.code
    return error_response(known)
