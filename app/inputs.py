"""An HTTP request -> its options and the sources of its items. The body has been capped before it gets here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from app.errors import FovealError
from app.schemas import EncodeOptions, FramesPart, ImagePart, VideoPart, parse_body, parse_options
from app.threads import in_thread
from configs.settings import Limits


@dataclass(frozen=True)
class Source:
    """One item as the client sent it: its bytes, or a URL (data: or https:) that gives them.

    param: how errors name it. claims: the modality that its JSON part states; None elsewhere.
    frame_urls: those of the stills that make up a video, in order.
    """

    param: str
    data: bytes | None = None
    url: str | None = None
    claims: Literal["image", "video"] | None = None
    frame_urls: tuple[str, ...] = ()


async def read_request(request: Request, limits: Limits) -> tuple[EncodeOptions, list[Source]]:
    """The options and the items of a request, in order.

    Raises:
        FovealError: 400 `malformed_request` or `empty_body`, 413 `too_many_items`, 422 `invalid_option`.
    """
    query: list[tuple[str, Any]] = list(request.query_params.multi_items())
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    fields: list[tuple[str, Any]] = []
    typed: list[tuple[str, Any]] = []
    if content_type == "multipart/form-data":
        fields, sources = await _read_form(request, limits)
    elif content_type == "application/json":
        typed, sources = await _read_json(request, limits)
    else:
        sources = [Source("body", await request.body())]
    options = parse_options([*query, *fields], limits, typed)
    return options, _checked(sources, options, limits)


def read_call(media: Any, options: Mapping[str, Any], limits: Limits) -> tuple[EncodeOptions, list[Source]]:
    """As `read_request`, of a call through a Serve handle: bytes, or a list of them, and the options by name.

    Raises:
        FovealError: as `read_request`; `format` is refused, as there is nothing to format.
    """
    files = [media] if isinstance(media, bytes) else media
    if not isinstance(files, list) or not files or not all(isinstance(file, bytes) for file in files):
        raise FovealError("malformed_request", "media: bytes or a list of bytes are wanted", "media")
    if "format" in options:
        raise FovealError("invalid_option", "format: a call through a handle is answered with arrays", "format")
    parsed = parse_options([], limits, options.items())
    return parsed, _checked([Source(f"media[{i}]", file) for i, file in enumerate(files)], parsed, limits)


def _too_many(limits: Limits) -> FovealError:
    return FovealError("too_many_items", f"the request has more than limits.max_items ({limits.max_items}) items")


def _checked(sources: list[Source], options: EncodeOptions, limits: Limits) -> list[Source]:
    if len(sources) > limits.max_items:
        raise _too_many(limits)
    for source in sources:
        if source.data == b"":
            raise FovealError("empty_body", f"{source.param} has no bytes", source.param)
        if source.claims and options.modality not in ("auto", source.claims):
            message = f"{source.param} says {source.claims}, but modality is {options.modality}"
            raise FovealError("invalid_option", message, "modality")
    return sources


class _FormParser(MultiPartParser):
    """Tells whether the closing boundary was there: starlette takes a form that is cut short for a shorter one."""

    ended = False

    def on_end(self) -> None:
        self.ended = True


async def _read_form(request: Request, limits: Limits) -> tuple[list[tuple[str, Any]], list[Source]]:
    parser = _FormParser(request.headers, request.stream(), max_files=limits.max_items + 1, max_fields=64)
    parser.spool_max_size = limits.max_body_bytes  # Parts stay in memory: they are bounded, and read at once.
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            raise _too_many(limits) from None
        raise FovealError("malformed_request", f"the multipart body cannot be parsed: {error.message}") from None
    except KeyError:
        raise FovealError("malformed_request", "the multipart Content-Type has no boundary") from None
    except UnicodeError:
        raise FovealError("malformed_request", "a name or field is not in the charset of the Content-Type") from None
    fields: list[tuple[str, Any]] = []
    sources: list[Source] = []
    try:
        if not parser.ended:
            raise FovealError("malformed_request", "the multipart body ends before its closing boundary")
        for name, value in form.multi_items():
            if not isinstance(value, UploadFile):
                fields.append((name, value))
            elif name == "file":
                sources.append(Source(f"file[{len(sources)}]", await value.read()))
            else:
                raise FovealError("invalid_option", f"{name}: files are sent in parts named `file`", name)
    finally:
        await form.close()
    if any(name == "file" for name, _ in fields):
        raise FovealError("malformed_request", "a `file` part has no filename, so it is a plain field", "file")
    if not sources:
        raise FovealError("empty_body", "the form has no `file` part")
    return fields, sources


async def _read_json(request: Request, limits: Limits) -> tuple[list[tuple[str, Any]], list[Source]]:
    raw = await request.body()
    if not raw:
        raise FovealError("empty_body", "the request carries no bytes")
    try:
        decoded = await in_thread(partial(json.loads, raw))
    except (ValueError, RecursionError) as error:
        raise FovealError("malformed_request", f"the body is not JSON: {error}") from None
    # Before the parts are validated one by one, which takes long if they are many.
    parts = decoded.get("input") if isinstance(decoded, dict) else None
    if isinstance(parts, list) and len(parts) > limits.max_items:
        raise _too_many(limits)
    body = parse_body(decoded)
    return list((body.model_extra or {}).items()), _part_sources(body.input)


def _part_sources(parts: Sequence[ImagePart | VideoPart | FramesPart]) -> list[Source]:
    return [_part_source(f"input[{i}]", part) for i, part in enumerate(parts)]


def _part_source(param: str, part: ImagePart | VideoPart | FramesPart) -> Source:
    if isinstance(part, FramesPart):
        return Source(param, claims="video", frame_urls=tuple(part.video))
    if isinstance(part, VideoPart):
        return Source(param, url=part.video_url.url, claims="video")
    return Source(param, url=part.image_url.url, claims="image")
