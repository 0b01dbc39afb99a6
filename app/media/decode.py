"""Bytes -> uint8 frames, as the reference processors would have them after an honest decode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

import numpy as np
from PIL import Image

from app.errors import FovealError
from app.media.deadline import Deadline
from app.media.detect import Detected, detect
from app.media.gif import GifAnimation
from app.media.image import PillowAnimation, open_picture, still_rgb, to_rgb
from app.media.library import library_call
from app.media.resize import resize_into, smart_resize_image, smart_resize_video
from app.media.sampling import Clock, choose, count_sampled, make_clock, pair_timestamps
from app.media.types import DecodedMedia, MediaOptions
from app.media.video import decode_clip
from configs.processor import PixelRange, ProcessorConfig
from configs.settings import Limits


def decode(data: bytes | memoryview, options: MediaOptions, processor: ProcessorConfig, limits: Limits) -> DecodedMedia:
    """One still, animation or clip.

    `fps` and `num_frames` mean nothing for a still and are not looked at.

    Raises:
        FovealError: a 4xx; its `param` names the option at fault, if one is.
    """
    deadline = Deadline(limits.decode_timeout_s)
    data = bytes(data)
    detected = detect(data)
    if detected.reader == "ffmpeg":
        if options.modality == "image":
            raise FovealError("modality_mismatch", f"modality is image, the content is {detected.name}", "modality")
        pixels = _pixel_range("video", options, processor, limits)
        frames, clock, indices = decode_clip(
            data,
            detected,
            limits.max_pixels,
            _counter(options, processor, limits),
            _sizer(pixels, processor, limits),
            deadline,
        )
        return _video(frames, [clock.seconds(i) for i in indices], processor)
    picture, animation = _open(data, detected, limits, deadline)
    if options.modality != "image" and len(animation) > 1:
        return _decode_animation(animation, detected, options, processor, limits, deadline)
    if options.modality == "video":
        raise FovealError("modality_mismatch", f"modality is video, the content is a {detected.name} still", "modality")
    return _decode_still(picture, options, processor, limits)


def decode_frames(
    images: list[bytes], options: MediaOptions, processor: ProcessorConfig, limits: Limits
) -> DecodedMedia:
    """A video posted as a list of stills, which must be of one size.

    `fps` is the rate at which they were taken (the checkpoint's by default) and only makes the time stamps;
    `num_frames` takes that many of them, evenly spaced. An animation or a clip in the list is refused.

    Raises:
        FovealError: as `decode`; `malformed_request` for an empty list or frames that differ in size.
    """
    deadline = Deadline(limits.decode_timeout_s)
    if not images:
        raise FovealError("malformed_request", "the list of frames is empty")
    if options.modality == "image":
        raise FovealError("modality_mismatch", "modality is image, the content is a list of frames", "modality")
    pixels = _pixel_range("video", options, processor, limits)
    _check_options(options, limits)
    rate = processor.fps if options.fps is None else options.fps
    clock = Clock(range(len(images)), 1 / Fraction(rate), Fraction(rate), True)
    wanted = len(images) if options.num_frames is None else min(options.num_frames, len(images))
    _check_num_frames(wanted, replace(options, fps=None), limits)
    indices = choose(clock, wanted)
    size = _sizer(pixels, processor, limits)
    frames: np.ndarray | None = None
    shape: tuple[int, ...] = ()
    for slot, index in enumerate(indices):
        detected = detect(images[index])
        if detected.reader == "ffmpeg":
            raise FovealError("modality_mismatch", f"frame {index} of the list is {detected.name}, not a still")
        still, animation = _open(images[index], detected, limits, deadline)
        if len(animation) > 1:
            raise FovealError("modality_mismatch", f"frame {index} of the list is an animated {detected.name}")
        picture = still.rgb()
        if frames is None:
            shape = picture.shape
            frames = np.empty((wanted, 3, *size(wanted, *shape[:2])), dtype=np.uint8)
        elif picture.shape != shape:
            found, first = f"{picture.shape[1]}x{picture.shape[0]}", f"{shape[1]}x{shape[0]}"
            raise FovealError("malformed_request", f"frame {index} of the list is {found}, the first is {first}")
        resize_into(picture, frames[slot])
        deadline.check()
    assert frames is not None
    return _video(frames, [clock.seconds(i) for i in indices], processor)


class _Animation(Protocol):
    width: int
    height: int

    def __len__(self) -> int: ...

    def delays(self, deadline: Deadline) -> list[int]: ...

    def frames(self, deadline: Deadline) -> Iterator[Image.Image]: ...


@dataclass(frozen=True)
class _Still:
    """A picture whose header has been read; `rgb()` decodes it to uint8 [H, W, 3]."""

    width: int
    height: int
    rgb: Callable[[], np.ndarray]


def _open(data: bytes, detected: Detected, limits: Limits, deadline: Deadline) -> tuple[_Still, _Animation]:
    """The same bytes as a still and as an animation, nothing decoded yet."""
    if detected.name == "GIF":
        gif = GifAnimation(data, limits.max_pixels)
        return _Still(gif.width, gif.height, lambda: to_rgb(next(gif.frames(deadline)))), gif
    image = open_picture(data, detected, limits.max_pixels, deadline)
    return _Still(image.width, image.height, lambda: still_rgb(image, detected)), PillowAnimation(image, detected)


def _decode_still(still: _Still, options: MediaOptions, processor: ProcessorConfig, limits: Limits) -> DecodedMedia:
    pixels = _pixel_range("image", options, processor, limits)
    # Refused before any pixel is decoded; turning the picture upright swaps the sides and changes neither check.
    _check_tokens((1, *smart_resize_image(still.height, still.width, processor.factor, pixels)), processor, limits)
    picture = still.rgb()
    height, width = smart_resize_image(picture.shape[0], picture.shape[1], processor.factor, pixels)
    frames = np.empty((1, 3, height, width), dtype=np.uint8)
    resize_into(picture, frames[0])
    return DecodedMedia("image", frames)


def _decode_animation(
    animation: _Animation,
    detected: Detected,
    options: MediaOptions,
    processor: ProcessorConfig,
    limits: Limits,
    deadline: Deadline,
) -> DecodedMedia:
    pixels = _pixel_range("video", options, processor, limits)
    count = _counter(options, processor, limits)
    starts = [0, *accumulate(animation.delays(deadline))]
    clock = make_clock(starts[:-1], Fraction(1, 1000), None, length=starts[-1])
    indices = choose(clock, count(clock))
    height, width = _sizer(pixels, processor, limits)(len(indices), animation.height, animation.width)
    frames = np.empty((len(indices), 3, height, width), dtype=np.uint8)
    slot = 0
    for index, shown in enumerate(animation.frames(deadline)):
        while slot < len(indices) and indices[slot] == index:
            with library_call(detected.name):
                picture = to_rgb(shown)
            resize_into(picture, frames[slot])
            slot += 1
        if slot == len(indices):
            break
    return _video(frames, [clock.seconds(i) for i in indices], processor)


def _video(frames: np.ndarray, times: list[Fraction], processor: ProcessorConfig) -> DecodedMedia:
    return DecodedMedia("video", frames, pair_timestamps(times, processor.temporal_patch_size))


def _pixel_range(modality: str, options: MediaOptions, processor: ProcessorConfig, limits: Limits) -> PixelRange:
    """The checkpoint's range with the request's bounds in it.

    Raises:
        FovealError: `invalid_option` for a bound that is not positive, over what `limits.max_tokens` allows, or a
            minimum above the maximum.
    """
    temporal = processor.temporal_patch_size if modality == "video" else 1
    ceiling = limits.max_tokens * processor.factor**2 * temporal
    for name in ("min_pixels", "max_pixels"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= ceiling:
            raise FovealError("invalid_option", f"{name} must be 1 to {ceiling} (limits.max_tokens)", name)
    default = processor.video if modality == "video" else processor.image
    pixels = replace(
        default,
        **{n: getattr(options, n) for n in ("min_pixels", "max_pixels") if getattr(options, n) is not None},
    )
    if pixels.min_pixels > pixels.max_pixels:
        name = "max_pixels" if options.max_pixels is not None else "min_pixels"
        raise FovealError(
            "invalid_option", f"min_pixels {pixels.min_pixels} is above max_pixels {pixels.max_pixels}", name
        )
    return pixels


def _counter(options: MediaOptions, processor: ProcessorConfig, limits: Limits) -> Callable[[Clock], int]:
    """How many frames to take of a clip, with the limits on its length and on their number.

    Raises:
        FovealError: `invalid_option`; the returned function: `too_long`, `too_many_frames`, `invalid_option`.
    """
    _check_options(options, limits)

    def count(clock: Clock) -> int:
        if not clock.ticks:
            return 0
        if clock.duration > limits.max_seconds:
            raise FovealError(
                "too_long", f"the video lasts {clock.duration:.1f} s, over limits.max_seconds = {limits.max_seconds:g}"
            )
        frames = count_sampled(clock, options.fps, options.num_frames, processor)
        _check_num_frames(frames, options, limits)
        return frames

    return count


def _check_options(options: MediaOptions, limits: Limits) -> None:
    if options.fps is not None:
        if not math.isfinite(options.fps) or options.fps <= 0:
            raise FovealError("invalid_option", "fps must be a finite number above 0", "fps")
        if options.num_frames is not None:
            raise FovealError("invalid_option", "fps and num_frames exclude each other", "num_frames")
    if options.num_frames is not None:
        if options.num_frames < 1:
            raise FovealError("invalid_option", "num_frames must be at least 1", "num_frames")
        _check_num_frames(options.num_frames, options, limits)


def _check_num_frames(frames: int, options: MediaOptions, limits: Limits) -> None:
    if frames > limits.max_frames:
        option = "num_frames" if options.num_frames is not None else "fps" if options.fps is not None else None
        message = f"{frames} frames would be sampled, over limits.max_frames = {limits.max_frames}"
        raise FovealError("invalid_option" if option else "too_many_frames", message, option)


def _sizer(
    pixels: PixelRange, processor: ProcessorConfig, limits: Limits
) -> Callable[[int, int, int], tuple[int, int]]:
    """Target (height, width) of (frames, height, width), within the limit on tokens."""

    def size(num_frames: int, height: int, width: int) -> tuple[int, int]:
        new = smart_resize_video(num_frames, height, width, processor.factor, processor.temporal_patch_size, pixels)
        _check_tokens((num_frames, *new), processor, limits)
        return new

    return size


def _check_tokens(shape: tuple[int, int, int], processor: ProcessorConfig, limits: Limits) -> None:
    tokens = processor.num_tokens(processor.grid_thw(*shape))
    if tokens > limits.max_tokens:
        raise FovealError(
            "too_many_tokens", f"the item has {tokens} tokens, over limits.max_tokens = {limits.max_tokens}"
        )
