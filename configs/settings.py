"""The one schema of `args:` in serve_config.yaml. Unknown keys and impossible combinations are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, IPvAnyNetwork, PositiveFloat, PositiveInt, model_validator

BYTES_PER_TOKEN = 2 * 3 * 32 * 32  # uint8 RGB pixels under one token of a video


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Queued(_Strict):
    """Bounds of one replica's queue; past either of them an item is refused as `overloaded`."""

    max_queued_items: PositiveInt = 256
    max_queued_bytes: Annotated[PositiveInt, Field(description="bytes of the uint8 frames that wait")] = 512 * 1024**2


class GraphSettings(_Queued):
    """Budgets of one graph pool. Sizes are in output tokens (one token is 2x2 patches of 16x16 pixels)."""

    token_budgets: Annotated[tuple[PositiveInt, ...], Field(description="captured budgets; empty: generated")] = ()
    min_tokens: PositiveInt = 64
    max_tokens: Annotated[
        PositiveInt | None, Field(description="largest generated budget; null: 1024 on a CPU, 16384 on a GPU")
    ] = None
    max_batch_size: Annotated[PositiveInt, Field(description="items in one replay")] = 8

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.token_budgets and list(self.token_budgets) != sorted(set(self.token_budgets)):
            raise ValueError("token_budgets must be strictly ascending")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens ({self.max_tokens}) is below min_tokens ({self.min_tokens})")
        largest = self.token_budgets[-1] if self.token_budgets else self.max_tokens
        if largest is not None and largest < self.max_batch_size:
            raise ValueError(f"max_batch_size ({self.max_batch_size}) is over the largest budget ({largest} tokens)")
        return self


class VideoSettings(GraphSettings):
    t_capture: Annotated[PositiveInt, Field(description="temporal patches a video may have in a graph")] = 8


class EagerSettings(_Queued):
    """The pool without graphs: batches are bounded by tokens so that a long video cannot exhaust memory."""

    max_batch_size: PositiveInt = 4
    max_batch_tokens: PositiveInt = 16384


class Limits(_Strict):
    """Ceilings. A request over one of them is refused with a 4xx, never clamped."""

    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    max_bytes_in_flight: Annotated[
        PositiveInt, Field(description="bytes received of all request bodies that one ingress replica holds")
    ] = 512 * 1024 * 1024
    max_items_in_flight: Annotated[
        PositiveInt, Field(description="items that one ingress replica works on; how to choose it: operations.md")
    ] = 256
    upload_idle_s: Annotated[PositiveFloat, Field(description="time in which no byte of an unfinished body comes")] = (
        10.0
    )
    max_pixels: Annotated[PositiveInt, Field(description="pixels of one source picture, read from its header")] = (
        100_000_000
    )
    max_frames: Annotated[PositiveInt, Field(description="frames sampled from one video")] = 768
    max_seconds: Annotated[PositiveFloat, Field(description="duration of one video")] = 7200.0
    max_tokens: Annotated[PositiveInt, Field(description="visual tokens of one item")] = 16384
    max_items: Annotated[PositiveInt, Field(description="items of one request")] = 64
    decode_timeout_s: Annotated[PositiveFloat, Field(description="decode time of one item")] = 30.0
    decode_processes: Annotated[
        PositiveInt, Field(description="processes of an ingress replica that decode; one more decodes pictures only")
    ] = 2
    deadline_s: Annotated[PositiveFloat, Field(description="time a request may take in all")] = 120.0


class FetchSettings(_Strict):
    """URLs in `image_url` and `video_url`. Off by default: only data: URIs are read."""

    enabled: bool = False
    schemes: tuple[Literal["https", "http"], ...] = ("https",)
    allow_hosts: Annotated[
        tuple[str, ...], Field(description='host names, or "*.example.org"; empty: any public host')
    ] = ()
    max_bytes: PositiveInt = 64 * 1024 * 1024
    allow_networks: Annotated[
        tuple[IPvAnyNetwork, ...], Field(description="networks that may be reached although they are not public")
    ] = ()
    timeout_s: PositiveFloat = 15.0
    max_redirects: Annotated[int, Field(ge=0)] = 3


class StoreSettings(_Strict):
    """`deliver=store`: embeddings as files in a folder that their readers share. Off by default."""

    root: Annotated[
        str | None,
        Field(
            pattern="^/", description="folder for `deliver=store`, the same path for all ingress replicas; null: off"
        ),
    ] = None
    max_bytes: Annotated[
        PositiveInt, Field(description="bytes of all files; the least recently used go first to make room")
    ] = 16 * 1024**3
    lease_s: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="time since its last use in which a file is never removed")
    ] = 300.0


class AuthSettings(_Strict):
    """Who may use the service. Off by default: everyone who reaches it."""

    api_keys_file: Annotated[
        str | None,
        Field(
            pattern="^/", description="file of the keys that `Authorization: Bearer` may have; null: none is asked for"
        ),
    ] = None


class PoolUserConfig(_Strict):
    """`user_config` of a pool: settings of its batcher that change without a restart; absent ones are as in `args`."""

    max_batch_size: PositiveInt | None = None
    max_batch_tokens: Annotated[PositiveInt | None, Field(description="of the eager pool")] = None
    max_queued_items: PositiveInt | None = None
    max_queued_bytes: PositiveInt | None = None


class IngressUserConfig(_Strict):
    """`user_config` of the ingress: those of `limits` that change without a restart; absent ones are as in `args`."""

    max_body_bytes: PositiveInt | None = None
    max_bytes_in_flight: PositiveInt | None = None
    max_items_in_flight: PositiveInt | None = None
    upload_idle_s: PositiveFloat | None = None
    max_items: PositiveInt | None = None
    decode_timeout_s: PositiveFloat | None = None
    deadline_s: PositiveFloat | None = None


class Settings(_Strict):
    """Arguments of `app.main:build`. Replicas, autoscaling and actor resources stay under `deployments:`."""

    model: Annotated[str, Field(description='"tiny", a Hugging Face id, or a local folder')] = "tiny"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description='"auto", "cpu", "cuda", "cuda:N"')
    ] = "auto"
    image: GraphSettings = GraphSettings()
    video: VideoSettings = VideoSettings()
    eager: EagerSettings = EagerSettings()
    long_video: Annotated[Literal["eager"], Field(description="where videos over t_capture go")] = "eager"
    limits: Limits = Limits()
    fetch: FetchSettings = FetchSettings()
    auth: AuthSettings = AuthSettings()
    store: StoreSettings = StoreSettings()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.eager.max_batch_tokens < self.limits.max_tokens:
            raise ValueError(
                f"eager.max_batch_tokens ({self.eager.max_batch_tokens}) is below limits.max_tokens "
                f"({self.limits.max_tokens}): an item that is accepted could not run"
            )
        if self.limits.max_bytes_in_flight < self.limits.max_body_bytes:
            raise ValueError(
                f"limits.max_bytes_in_flight ({self.limits.max_bytes_in_flight}) is below limits.max_body_bytes "
                f"({self.limits.max_body_bytes})"
            )
        largest_item = self.limits.max_tokens * BYTES_PER_TOKEN
        for name in ("image", "video", "eager"):
            room = getattr(self, name).max_queued_bytes
            if room < largest_item:
                raise ValueError(
                    f"{name}.max_queued_bytes ({room}) is below the {largest_item} bytes of one item of "
                    f"limits.max_tokens ({self.limits.max_tokens})"
                )
        return self


def change_pool(settings: Settings, pool: Literal["image", "video", "eager"], user_config: dict[str, Any]) -> Settings:
    """`settings` with the fields of `PoolUserConfig` put in their place.

    Raises:
        pydantic.ValidationError: names the field that is unknown or impossible.
    """
    return _change(settings, pool, PoolUserConfig.model_validate(user_config))


def change_limits(settings: Settings, user_config: dict[str, Any]) -> Settings:
    """`settings` with the fields of `IngressUserConfig` put in the place of those of `limits`.

    Raises:
        pydantic.ValidationError: names the field that is unknown or impossible.
    """
    return _change(settings, "limits", IngressUserConfig.model_validate(user_config))


def _change(settings: Settings, section: str, changes: _Strict) -> Settings:
    values = settings.model_dump()
    return Settings.model_validate({**values, section: {**values[section], **changes.model_dump(exclude_none=True)}})
