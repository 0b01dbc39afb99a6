from __future__ import annotations

from typing import Any

import pytest

from app.errors import FovealError
from app.media.types import MediaOptions
from app.openapi import ENCODE, ERRORS
from app.schemas import EncodeOptions, parse_body, parse_options
from configs.settings import Limits


def test_defaults_and_strings() -> None:
    assert parse_options([], Limits()) == EncodeOptions()
    options = parse_options(
        [("dtype", "bfloat16"), ("main_only", "true"), ("num_frames", "8"), ("min_pixels", "1024")], Limits()
    )
    assert (options.dtype, options.main_only) == ("bfloat16", True)
    assert options.media() == MediaOptions("auto", 1024, None, None, 8)
    assert parse_options([("fps", 1), ("pooling", "mean")], Limits()).fps == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fps", "1"),
        ("fps", True),
        ("num_frames", "4"),
        ("num_frames", 4.0),
        ("main_only", "yes"),
        ("main_only", 1),
        ("dtype", 5),
    ],
)
def test_values_of_json_are_of_their_own_type(name: str, value: Any) -> None:
    with pytest.raises(FovealError) as caught:
        parse_options([], Limits(), [(name, value)])
    assert (caught.value.code, caught.value.param) == ("invalid_option", name)


def test_query_and_json_are_one_set_of_options() -> None:
    options = parse_options([("num_frames", "4")], Limits(), [("main_only", True), ("max_pixels", None)])
    assert (options.num_frames, options.main_only, options.max_pixels) == (4, True, None)
    assert parse_options([], Limits(), [("fps", 2)]).fps == 2.0
    with pytest.raises(FovealError, match="twice"):
        parse_options([("fps", "2")], Limits(), [("fps", 2)])


@pytest.mark.parametrize(
    ("pairs", "param"),
    [
        ([("colour", "red")], "colour"),
        ([("format", "json"), ("format", "json")], "format"),
        ([("format", "XML")], "format"),
        ([("deliver", "shelf")], "deliver"),
        ([("deliver", "store"), ("main_only", "true")], "deliver"),
        ([("fps", "0")], "fps"),
        ([("fps", "inf")], "fps"),
        ([("num_frames", "2.5")], "num_frames"),
        ([("num_frames", -1)], "num_frames"),
        ([("main_only", [])], "main_only"),
        ([("min_pixels", 0)], "min_pixels"),
        ([("fps", 1), ("num_frames", 4)], None),
        ([("min_pixels", 5000), ("max_pixels", 4000)], None),
        ([("num_frames", 11)], "num_frames"),
        ([("max_pixels", 100 * 2048 + 1)], "max_pixels"),
    ],
)
def test_refusals_name_the_option(pairs: list[tuple[str, Any]], param: str | None) -> None:
    limits = Limits(max_frames=10, max_tokens=100)
    with pytest.raises(FovealError) as caught:
        parse_options(pairs, limits)
    assert (caught.value.code, caught.value.status, caught.value.param) == ("invalid_option", 422, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "input"),
        ({"input": "x"}, "input"),
        ({"input": [{"type": "image_url"}]}, "input[0]"),
        ({"input": [{"type": "image_url", "image_url": {"url": 5}}]}, "input[0]"),
        ({"input": [{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}]}, "input[0]"),
    ],
)
def test_malformed_bodies(body: Any, param: str | None) -> None:
    with pytest.raises(FovealError) as caught:
        parse_body(body)
    assert (caught.value.code, caught.value.status) == ("malformed_request", 400)
    assert caught.value.param == param


def test_openapi_tells_every_option_and_error() -> None:
    assert {parameter["name"] for parameter in ENCODE["parameters"]} == set(EncodeOptions.model_fields)
    for parameter in ENCODE["parameters"]:
        assert parameter["schema"]["description"]
    assert "too_many_tokens" in ERRORS[413]["description"]
