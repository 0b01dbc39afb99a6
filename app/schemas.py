"""The options of a request and the parts of its JSON body, as pydantic models that refuse what they do not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from app.errors import FovealError
from app.media.types import MediaOptions
from configs.settings import BYTES_PER_TOKEN, Limits


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EncodeOptions(_Strict):
    """Options of `POST /v1/encode`: query parameters, or fields of the JSON or the form."""

    format: Annotated[Literal["safetensors", "json"], Field(description="response format")] = "safetensors"
    modality: Annotated[
        Literal["auto", "image", "video"],
        Field(description="auto: told by the bytes; image: an animation's first frame"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], Field(description="auto: the compute dtype")
    ] = "auto"
    pooling: Annotated[Literal["none", "mean"], Field(description="mean: one row over the item's tokens")] = "none"
    main_only: Annotated[bool, Field(description="leave the deepstack columns out")] = False
    deliver: Annotated[
        Literal["inline", "store"], Field(description="store: as a file in the server's store, by its hash")
    ] = "inline"
    min_pixels: Annotated[
        PositiveInt | None, Field(description="least pixels of a resized image, or of all frames of a resized video")
    ] = None
    max_pixels: Annotated[
        PositiveInt | None, Field(description="most pixels of a resized image, or of all frames of a resized video")
    ] = None
    fps: Annotated[
        float | None, Field(gt=0, allow_inf_nan=False, description="frames sampled from a second of video")
    ] = None
    num_frames: Annotated[PositiveInt | None, Field(description="frames sampled from a video")] = None

    @model_validator(mode="after")
    def _one_sampling(self) -> Self:
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("fps and num_frames cannot both be given")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels ({self.min_pixels}) is over max_pixels ({self.max_pixels})")
        return self

    def media(self) -> MediaOptions:
        return MediaOptions(self.modality, self.min_pixels, self.max_pixels, self.fps, self.num_frames)


class _Url(_Strict):
    url: str
    detail: Annotated[Literal["auto"], Field(description="only auto; pixels are set by the options")] = "auto"


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: _Url


class VideoPart(_Strict):
    type: Literal["video_url"]
    video_url: _Url


class FramesPart(_Strict):
    """A video as a list of stills of one size, in Qwen's own chat form; `fps` says how they were taken."""

    type: Literal["video"]
    video: Annotated[list[str], Field(min_length=1)]


class EncodeBody(BaseModel):
    """The JSON body: `input`, and the options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    input: Annotated[
        list[Annotated[ImagePart | VideoPart | FramesPart, Field(discriminator="type")]], Field(min_length=1)
    ]


def parse_options(
    pairs: Iterable[tuple[str, Any]], limits: Limits, typed: Iterable[tuple[str, Any]] = ()
) -> EncodeOptions:
    """The options from (name, value) pairs of all places where a request may put them.

    Args:
        pairs: from where every value is text, which is converted.
        typed: from JSON, where a value must have its option's own type.

    Raises:
        FovealError: 422 `invalid_option` names an option that is unknown, given twice, not allowed or over a ceiling.
    """
    values: dict[str, Any] = {}
    own = dict(typed)
    for name, value in [*pairs, *own.items()]:
        if name in values:
            raise FovealError("invalid_option", f"{name} is given twice", name)
        values[name] = value
    try:
        EncodeOptions.model_validate(own, strict=True)
        options = EncodeOptions.model_validate(values)
    except ValidationError as error:
        raise _invalid(error, "invalid_option") from None
    ceilings = {
        "num_frames": (limits.max_frames, "limits.max_frames"),
        "min_pixels": (limits.max_tokens * BYTES_PER_TOKEN // 3, "what limits.max_tokens allows"),
        "max_pixels": (limits.max_tokens * BYTES_PER_TOKEN // 3, "what limits.max_tokens allows"),
    }
    for name, (ceiling, source) in ceilings.items():
        value = getattr(options, name)
        if value is not None and value > ceiling:
            raise FovealError("invalid_option", f"{name} ({value}) is over {source} ({ceiling})", name)
    if options.deliver == "store" and options.main_only:
        message = "deliver: the readers of the store need all columns, so main_only cannot be given with it"
        raise FovealError("invalid_option", message, "deliver")
    return options


def parse_body(decoded: Any) -> EncodeBody:
    """The parts of a decoded JSON body.

    Raises:
        FovealError: 400 `malformed_request`, naming the field that is missing or wrong.
    """
    try:
        return EncodeBody.model_validate(decoded)
    except ValidationError as error:
        raise _invalid(error, "malformed_request") from None


def _invalid(error: ValidationError, code: str) -> FovealError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # `input[1]` names a part as every other error does; what lies below it goes into the message.
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    param = where.split("]")[0] + "]" if "]" in where else where
    message = "unknown name" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return FovealError(code, f"{where}: {message}" if where else message, param or None)
