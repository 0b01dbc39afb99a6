"""Stills and animations through Pillow: bytes -> RGB frames as they are meant to be seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps

from app.errors import FovealError
from app.media.deadline import Deadline, WatchedBytes
from app.media.detect import Detected, unsupported
from app.media.library import library_call

# The limit is `limits.max_pixels`, checked on the header of every picture before its pixels are decoded.
Image.MAX_IMAGE_PIXELS = None

_EIGHT_BIT_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
_DNG_VERSION = 50706
_STRIP_BYTES = 1 << 20


def open_picture(data: bytes | memoryview, detected: Detected, max_pixels: int, deadline: Deadline) -> Image.Image:
    """Reads the header only.

    Raises:
        FovealError: `undecodable_media`, `unsupported_media`, `too_many_pixels`.
    """
    if detected.name == "JPEG":
        _refuse_odd_jpeg(data)
    if detected.name == "WebP" and data[12:16] == b"VP8X":
        # The plugin would allocate the canvas when it opens the file.
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        check_pixels(width, height, max_pixels)
    if detected.name == "HEIC":
        _register_heif()
    with library_call(detected.name):
        image = Image.open(WatchedBytes(data, deadline), formats=detected.formats)
    check_pixels(image.width, image.height, max_pixels)
    if detected.name == "TIFF" and _DNG_VERSION in getattr(image, "tag_v2", {}):
        raise unsupported("a camera's raw photograph")
    if image.mode not in _EIGHT_BIT_MODES and not image.mode.startswith("I;16"):
        raise unsupported(f"a {detected.name} with {image.mode!r} samples (32 bits or floating point)")
    return image


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise FovealError(
            "too_many_pixels", f"the picture is {width}x{height}, over limits.max_pixels = {max_pixels} pixels"
        )


class PillowAnimation:
    """A PNG, WebP or AVIF of one frame or more; a PNG's default image that is no part of its animation is left out.

    The pages of a TIFF and the views of an MPO are not shown one after the other: those are stills.
    """

    def __init__(self, image: Image.Image, detected: Detected) -> None:
        self._image, self._name = image, detected.name
        self.width, self.height = image.size
        with library_call(self._name):
            total = image.n_frames if detected.name in ("PNG", "WebP", "AVIF") else 1  # type: ignore[attr-defined]
            first = 1 if total > 1 and image.info.get("default_image") else 0
        self._indices = range(first, total)

    def __len__(self) -> int:
        return len(self._indices)

    def delays(self, deadline: Deadline) -> list[int]:
        """Milliseconds that each frame is shown; plugins tell them only while they decode."""
        return [round(float(image.info.get("duration") or 0)) or 100 for image in self.frames(deadline)]

    def frames(self, deadline: Deadline) -> Iterator[Image.Image]:
        """Each frame, composed on the canvas; one image that changes.

        Raises:
            FovealError: `undecodable_media` when a frame is damaged or missing; `decode_timeout`.
        """
        for index in self._indices:
            deadline.check()
            with library_call(self._name):
                self._image.seek(index)
                self._image.load()
            yield self._image


def still_rgb(image: Image.Image, detected: Detected) -> np.ndarray:
    """uint8 [H, W, 3] of a picture, or of an animation's default image: upright by EXIF, alpha over white.

    Raises:
        FovealError: `undecodable_media`.
    """
    with library_call(detected.name):
        image.load()
        return to_rgb(ImageOps.exif_transpose(image))


def to_rgb(image: Image.Image) -> np.ndarray:
    """uint8 [H, W, 3]: 16-bit samples keep their high byte, transparency is composited on white, colour profiles
    are not applied (the reference's `convert("RGB")` does not either)."""
    if image.mode.startswith("I;16"):
        return _sixteen_bit_to_rgb(image)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        background = Image.new("RGB", image.size, (255, 255, 255))
        background.paste(rgba, mask=rgba.getchannel("A"))
        image = background
    return _pixels(image if image.mode == "RGB" else image.convert("RGB"))


def _pixels(image: Image.Image) -> np.ndarray:
    """uint8 [H, W, 3] of an RGB image, by strips: in one piece Pillow would hold two more copies for a while."""
    pixels = np.empty((image.height, image.width, 3), dtype=np.uint8)
    rows = max(_STRIP_BYTES // (3 * image.width), 1)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        pixels[top:bottom] = np.asarray(image.crop((0, top, image.width, bottom)))
    return pixels


def _sixteen_bit_to_rgb(image: Image.Image) -> np.ndarray:
    samples = np.asarray(image)
    grey = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 255
    return np.repeat(grey[..., None], 3, axis=2)


def _refuse_odd_jpeg(data: bytes | memoryview) -> None:
    """Names the codings of JPEG that the decoder cannot read, which it would only call unidentified.

    Walks the marker segments up to the frame header (ITU-T T.81, B.2.2).
    """
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if data[at + 4] != 8:
                raise unsupported(f"a JPEG with {data[at + 4]} bits a sample")
            if marker not in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA):
                raise unsupported("a lossless or hierarchical JPEG")
            return
        if marker == 0xDA:
            return
        at += 2 + (data[at + 2] << 8 | data[at + 3])


def _register_heif() -> None:
    try:
        import pillow_heif
    except ImportError:
        raise unsupported("HEIC/HEIF, for which the optional package pillow-heif is not installed") from None
    pillow_heif.register_heif_opener()
