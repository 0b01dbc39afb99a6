"""Requests of every kind, parsed without a service."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from app.errors import FovealError
from app.inputs import Source, read_request
from app.schemas import EncodeOptions
from configs.settings import Limits


def read(
    body: bytes, content_type: str | None = None, query: str = "", limits: Limits | None = None
) -> tuple[EncodeOptions, list[Source]]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query.encode(), "headers": headers}
    return asyncio.run(read_request(Request(scope, receive), limits or Limits()))


def form(*parts: tuple[str, str | None, bytes]) -> bytes:
    lines = []
    for name, filename, data in parts:
        extra = "" if filename is None else f'; filename="{filename}"'
        lines.append(f'--B\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + data + b"\r\n")
    return b"".join(lines) + b"--B--\r\n"


FORM = "multipart/form-data; boundary=B"


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "image/png", "nonsense"])
def test_a_raw_body_is_one_item(content_type: str | None) -> None:
    options, sources = read(b"\xff\xd8 bytes", content_type, "pooling=mean")
    assert (options.pooling, sources) == ("mean", [Source("body", b"\xff\xd8 bytes")])


def test_a_form() -> None:
    body = form(("file", "a.jpg", b"\x00\r\n--first"), ("dtype", None, b"float16"), ("file", "b.mp4", b"second"))
    options, sources = read(body, FORM, "format=json")
    assert (options.dtype, options.format) == ("float16", "json")
    assert sources == [Source("file[0]", b"\x00\r\n--first"), Source("file[1]", b"second")]


def test_a_json_body() -> None:
    body = {
        "input": [
            {"type": "image_url", "image_url": {"url": "data:a", "detail": "auto"}},
            {"type": "video_url", "video_url": {"url": "data:b"}},
            {"type": "video", "video": ["data:c", "data:d"]},
        ],
        "num_frames": 4,
        "main_only": True,
    }
    options, sources = read(json.dumps(body).encode(), "application/json; charset=utf-8")
    assert (options.num_frames, options.main_only) == (4, True)
    assert sources == [
        Source("input[0]", url="data:a", claims="image"),
        Source("input[1]", url="data:b", claims="video"),
        Source("input[2]", claims="video", frame_urls=("data:c", "data:d")),
    ]


@pytest.mark.parametrize(
    ("body", "content_type", "query", "code", "param"),
    [
        (b"", None, "", "empty_body", "body"),
        (b"", "application/json", "", "empty_body", None),
        (form(), FORM, "", "empty_body", None),
        (form(("file", "a", b"x"), ("file", "b", b"")), FORM, "", "empty_body", "file[1]"),
        (form(("image", "a", b"x")), FORM, "", "invalid_option", "image"),
        (form(("file", None, b"x")), FORM, "", "malformed_request", "file"),
        (form(("file", "a", b"x"), ("dtype", None, b"float16")), FORM, "dtype=float16", "invalid_option", "dtype"),
        (form(*[("file", "a", b"x")] * 4), FORM, "", "too_many_items", None),
        (form(*[("file", "a", b"x")] * 5), FORM, "", "too_many_items", None),
        (b'{"input": [1, 2, 3, 4]}', "application/json", "", "too_many_items", None),
        (b"--B\r\n\r\n", FORM, "", "malformed_request", None),
        (b"x", "multipart/form-data", "", "malformed_request", None),
        (form(("file", "a", b"x")), f"{FORM}; charset=undefined", "", "malformed_request", None),
        (
            b'{"input": [{"type": "video", "video": ["data:"]}], "fps": "1"}',
            "application/json",
            "",
            "invalid_option",
            "fps",
        ),
        (b'{"input": [' + b"[" * 100_000, "application/json", "", "malformed_request", None),
        (b"\xff", "application/json", "", "malformed_request", None),
        (
            b'{"input": [{"type": "image_url", "image_url": {"url": "data:"}}], "modality": "video"}',
            "application/json",
            "",
            "invalid_option",
            "modality",
        ),
    ],
)
def test_refusals(body: bytes, content_type: str | None, query: str, code: str, param: str | None) -> None:
    with pytest.raises(FovealError) as caught:
        read(body, content_type, query, Limits(max_items=3))
    assert (caught.value.code, caught.value.param) == (code, param)


CUT = form(("file", "a", b"first"), ("file", "b", b"second"))


@pytest.mark.parametrize("size", range(len(CUT) - len("--\r\n")))
def test_a_form_that_is_cut_short_is_not_taken_for_a_shorter_one(size: int) -> None:
    with pytest.raises(FovealError) as caught:
        read(CUT[:size], FORM)
    assert caught.value.code == "malformed_request"


def test_a_form_may_have_an_epilogue() -> None:
    assert len(read(CUT + b"epilogue", FORM)[1]) == 2


@pytest.mark.parametrize(
    "filename", ["café.jpg".encode(), "café.jpg".encode("latin-1"), "画像.jpg".encode("shift-jis")]
)
def test_file_names_of_any_charset(filename: bytes) -> None:
    body = form(("file", "NAME", b"x")).replace(b"NAME", filename)
    assert read(body, FORM)[1] == [Source("file[0]", b"x")]


@given(st.binary(max_size=300), st.sampled_from([FORM, "application/json", "multipart/form-data; boundary="]))
def test_garbage_is_a_4xx(body: bytes, content_type: str) -> None:
    with pytest.raises(FovealError) as caught:
        read(body, content_type)
    assert 400 <= caught.value.status < 500
