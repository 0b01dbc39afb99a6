"""The intake's corpus: a file of every kind that the world sends, with the outcome each must have.

`python -m tests.unit.media.corpus docs/media.md` rewrites the table in that page.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from app.errors import FovealError
from app.media.decode import decode
from app.media.types import DecodedMedia, MediaOptions
from configs.processor import ProcessorConfig
from configs.settings import Limits
from tests.unit.media import makers as m

LIMITS = Limits(max_pixels=20_000_000, max_seconds=7200)
SIZE = (48, 64)


@dataclass(frozen=True)
class Still:
    """The picture that an honest decode gives, uint8 [H, W, 3]."""

    rgb: np.ndarray


@dataclass(frozen=True)
class Clip:
    """Every frame that an honest decode shows and when, in seconds from the first."""

    frames: Sequence[np.ndarray]
    times: Sequence[Fraction]
    rate: Fraction
    constant: bool = True


@dataclass(frozen=True)
class Refused:
    code: str
    says: str = ""
    param: str | None = None


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    data: bytes
    expect: Still | Clip | Refused
    note: str = ""
    options: MediaOptions = field(default_factory=MediaOptions)
    limits: Limits = LIMITS


Cases = Iterator[Case]


def even(frames: Sequence[np.ndarray], rate: int | Fraction) -> Clip:
    return Clip(frames, [Fraction(i) / rate for i in range(len(frames))], Fraction(rate))


def seen(data: bytes, demuxer: str, rate: int | Fraction, stream: int = 0) -> Clip:
    """A constant-rate clip as transformers' loader decodes it."""
    return even(m.decoded(data, demuxer, stream)[0], rate)


def stamped(data: bytes, demuxer: str) -> Clip:
    """A variable-rate clip by its own time stamps."""
    frames, stamps, base = m.decoded(data, demuxer)
    times = [(s - stamps[0]) * base for s in stamps]  # type: ignore[operator]
    return Clip(frames, times, (len(frames) - 1) / times[-1], constant=False)


def delayed(frames: Sequence[np.ndarray], delays_ms: Sequence[int]) -> Clip:
    """An animation by its delays; its rate is frames over their sum."""
    starts = [0, *accumulate(delays_ms)]
    rate = Fraction(len(frames) * 1000, starts[-1])
    constant = all(abs(s - i * 1000 / rate) <= 1 for i, s in enumerate(starts[:-1]))
    return Clip(frames, [Fraction(s, 1000) for s in starts[:-1]], rate, constant)


def on_white(rgba: np.ndarray) -> np.ndarray:
    picture = Image.fromarray(rgba)
    white = Image.new("RGBA", picture.size, "white")
    return np.asarray(Image.alpha_composite(white, picture).convert("RGB"))


# Stills


def jpegs() -> Cases:
    g, rgb = "JPEG", m.scene(*SIZE)
    grey = rgb[..., 0]

    def shown(name: str, data: bytes, note: str = "", **kw: Any) -> Case:
        return Case(g, name, data, Still(m.pillow_rgb(data, **kw)), note)

    base = m.save(rgb, "JPEG")
    yield shown("baseline 4:2:0", base)
    yield shown("baseline 4:2:2", m.save(rgb, "JPEG", subsampling=1))
    yield shown("baseline 4:4:4", m.save(rgb, "JPEG", subsampling=0))
    yield shown("quality 5", m.save(rgb, "JPEG", quality=5))
    yield shown("progressive", m.save(rgb, "JPEG", progressive=True))
    yield shown("optimised, restart markers", m.save(rgb, "JPEG", optimize=True, restart_marker_rows=1))
    yield shown("greyscale", m.save(grey, "JPEG"))
    yield shown("RGB without colour transform", m.save(rgb, "JPEG", keep_rgb=True), "Adobe transform 0")
    yield shown("odd size 51x37", m.save(m.scene(37, 51), "JPEG"))
    cmyk = m.save(Image.fromarray(rgb).convert("CMYK"), "JPEG")
    yield shown("CMYK, Adobe marker", cmyk, "inverted samples, as Photoshop writes them")
    yield shown("CMYK, no Adobe marker", m.jpeg_without(cmyk, 0xEE), "samples taken as they are")
    adobe = cmyk.index(b"Adobe") + 11
    yield shown("YCCK, Adobe marker", m.patch(cmyk, adobe, b"\2"))
    yield shown("bytes after the end", base + b"trailing" * 10, "ignored")
    comment = base[:2] + b"\xff\xfe\0\x0ahello \xff\0" + base[2:]
    yield shown("comment segment", comment)
    yield shown("ICC profile", m.save(rgb, "JPEG", icc_profile=_srgb()), "profile not applied")
    mpo = io.BytesIO()
    Image.fromarray(rgb).save(mpo, "MPO", save_all=True, append_images=[Image.fromarray(m.scene(*SIZE, seed=5))])
    yield shown("MPO, two views", mpo.getvalue(), "the first view, a still")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = m.save(rgb, "JPEG", exif=exif)
        turned = _orient(m.pillow_rgb(data), orientation)
        yield Case(g, f"EXIF orientation {orientation}", data, Still(turned), "shown upright")
    exif = Image.Exif()
    exif[0x0112] = 9
    yield shown("EXIF orientation 9", m.save(rgb, "JPEG", exif=exif), "not a value: ignored")
    frame = m.jpeg_frame_header(base)
    yield Case(g, "12 bits a sample", m.patch(base, frame + 4, b"\x0c"), Refused("unsupported_media", "12 bits"))
    yield Case(g, "lossless", m.patch(base, frame + 1, b"\xc3"), Refused("unsupported_media", "lossless"))
    cut = "cut short, however little: refused, as in the reference"
    yield Case(g, "end marker missing", base[:-2], Refused("undecodable_media", "JPEG"), cut)
    yield Case(g, "ten bytes missing", base[:-10], Refused("undecodable_media"), cut)
    yield Case(g, "half missing", base[: len(base) // 2], Refused("undecodable_media"), cut)
    yield Case(
        g, "progressive, half missing", m.save(rgb, "JPEG", progressive=True)[:700], Refused("undecodable_media")
    )
    yield Case(g, "signature only", base[:20], Refused("undecodable_media", "its header cannot be read"))
    huge = m.patch(base, frame + 5, struct.pack(">HH", 65000, 65000))
    yield Case(g, "header says 65000x65000", huge, Refused("too_many_pixels", "65000x65000"), "refused from the header")
    yield Case(g, "header says 0x64", m.patch(base, frame + 5, b"\0\0"), Refused("undecodable_media"))


def pngs() -> Cases:
    g, rgb = "PNG", m.scene(*SIZE)
    alpha = np.tile(np.linspace(0, 255, SIZE[1]).astype(np.uint8), (SIZE[0], 1))
    rgba = np.dstack([rgb, alpha])
    grey = rgb[..., 0]
    wide = (rgb.astype(np.uint16) << 8) | 0xA5
    ramp = np.arange(SIZE[0] * SIZE[1], dtype=np.uint16).reshape(SIZE) * 21
    base = m.save(rgb, "PNG")
    yield Case(g, "RGB", base, Still(rgb))
    yield Case(g, "greyscale", m.save(grey, "PNG"), Still(np.dstack([grey] * 3)))
    yield Case(g, "RGBA", m.save(rgba, "PNG"), Still(on_white(rgba)), "composited on white")
    la = np.dstack([grey, alpha])
    white_la = on_white(np.dstack([grey, grey, grey, alpha]))
    yield Case(g, "greyscale and alpha", m.save(Image.fromarray(la, "LA"), "PNG"), Still(white_la))
    palette = Image.fromarray(rgb).quantize(64)
    yield Case(g, "palette", m.save(palette, "PNG"), Still(np.asarray(palette.convert("RGB"))))
    small = Image.fromarray(rgb).quantize(4)
    yield Case(g, "palette, 2 bits", m.save(small, "PNG", bits=2), Still(np.asarray(small.convert("RGB"))))
    indices = np.asarray(palette)
    clear = np.asarray(palette.convert("RGB")).copy()
    clear[indices == 3] = 255
    yield Case(g, "palette, one index transparent", m.save(palette, "PNG", transparency=3), Still(clear))
    table = bytes(i * 4 for i in range(64))
    with_table = np.dstack([np.asarray(palette.convert("RGB")), np.frombuffer(table, np.uint8)[indices]])
    yield Case(g, "palette with alpha table", m.save(palette, "PNG", transparency=table), Still(on_white(with_table)))
    bits = Image.fromarray(grey).convert("1")
    yield Case(g, "1 bit", m.save(bits, "PNG"), Still(np.asarray(bits.convert("RGB"))))
    key = rgb[5, 5]
    keyed = rgb.copy()
    keyed[(rgb == key).all(-1)] = 255
    trns = m.png_chunk(b"tRNS", struct.pack(">HHH", *key.tolist()))
    yield Case(g, "RGB with colour key", m.png(rgb, 8, 2, trns), Still(keyed))
    high = "the high byte is kept"
    yield Case(
        g, "16-bit greyscale", m.png(ramp[..., None], 16, 0), Still(np.dstack([ramp >> 8] * 3).astype(np.uint8)), high
    )
    grey_key = (ramp >> 8).astype(np.uint8)
    grey_key[ramp == ramp[3, 3]] = 255
    trns = m.png_chunk(b"tRNS", struct.pack(">H", int(ramp[3, 3])))
    yield Case(g, "16-bit greyscale with key", m.png(ramp[..., None], 16, 0, trns), Still(np.dstack([grey_key] * 3)))
    yield Case(g, "16-bit RGB", m.png(wide, 16, 2), Still(rgb), high)
    wide_alpha = np.dstack([wide, alpha.astype(np.uint16) << 8])
    yield Case(g, "16-bit RGBA", m.png(wide_alpha, 16, 6), Still(on_white(rgba)), high)
    wide_la = np.dstack([grey.astype(np.uint16) << 8, alpha.astype(np.uint16) << 8])
    yield Case(g, "16-bit greyscale and alpha", m.png(wide_la, 16, 4), Still(white_la), high)
    yield Case(g, "interlaced", m.png_interlaced(rgb), Still(rgb), "Adam7")
    yield Case(g, "ICC profile", m.save(rgb, "PNG", icc_profile=_srgb()), Still(rgb), "profile not applied")
    exif = Image.Exif()
    exif[0x0112] = 6
    yield Case(g, "EXIF orientation 6", m.save(rgb, "PNG", exif=exif), Still(_orient(rgb, 6)))
    yield Case(g, "bytes after the end", base + b"x" * 100, Still(rgb))
    yield Case(g, "cut short", base[:-60], Refused("undecodable_media", "PNG"))
    at = base.index(b"IDAT") + 40
    yield Case(g, "bad checksum", m.patch(base, at, b"\0\0\0\0"), Refused("undecodable_media"))
    yield Case(g, "signature only", base[:8], Refused("undecodable_media"))
    row = np.zeros((1, 1, 3), np.uint8)
    huge = "refused from the header"
    yield Case(g, "header says 60000x60000", m.png(row, 8, 2, size=(60000, 60000)), Refused("too_many_pixels"), huge)
    yield Case(g, "text chunk that unpacks to 100 MB", m.png(rgb, 8, 2, _text_bomb()), Refused("undecodable_media"))
    yield Case(g, "profile that unpacks to 100 MB", m.png(rgb, 8, 2, _profile_bomb()), Refused("undecodable_media"))


def apngs() -> Cases:
    g, frames = "APNG", m.movie(9)
    data = m.animate(frames, "PNG", 100)
    yield Case(g, "constant delay", data, delayed(frames, [100] * 9))
    delays = [100, 300, 50, 50, 700, 100, 100, 20, 400]
    yield Case(g, "per-frame delays", m.animate(frames, "PNG", delays), delayed(frames, delays), "nearest in time")
    default = m.animate(frames, "PNG", 100, default_image=True)
    yield Case(g, "default image apart", default, delayed(frames[1:], [100] * 8), "not part of the animation")
    first = MediaOptions(modality="image")
    yield Case(g, "default image apart, as image", default, Still(frames[0]), "modality=image", first)
    yield Case(g, "as image", data, Still(frames[0]), "modality=image: the first frame", first)
    one = m.animate(frames[:1], "PNG", 100)
    yield Case(g, "one frame", one, Still(frames[0]), "a still")
    zero = m.animate(frames, "PNG", 0)
    yield Case(g, "delay 0", zero, delayed(frames, [100] * 9), "counts 100 ms")
    parts = [_sprite(i) for i in range(5)]
    blended = m.animate(parts, "PNG", 200, disposal=1, blend=0)
    yield Case(g, "alpha, disposal to background", blended, delayed([on_white(p) for p in parts], [200] * 5))
    lying = m.png_set_chunk(data, b"acTL", 0, struct.pack(">I", 50))
    yield Case(g, "says 50 frames, has 9", lying, Refused("undecodable_media"), "frames are missing")
    yield Case(g, "cut short", data[: len(data) * 2 // 3], Refused("undecodable_media"))


def webps() -> Cases:
    g, rgb = "WebP", m.scene(*SIZE)
    rgba = np.dstack([rgb, m.scene(*SIZE, seed=3)[..., 1]])
    frames = m.movie(6)
    lossy = m.save(rgb, "WEBP", quality=80)
    yield Case(g, "lossy", lossy, Still(m.pillow_rgb(lossy)))
    yield Case(g, "lossless", m.save(rgb, "WEBP", lossless=True), Still(rgb))
    yield Case(g, "lossless, alpha", m.save(rgba, "WEBP", lossless=True, exact=True), Still(on_white(rgba)))
    lossy_alpha = m.save(rgba, "WEBP", quality=70)
    whitened = on_white(np.asarray(Image.open(io.BytesIO(lossy_alpha)).convert("RGBA")))
    yield Case(g, "lossy, alpha", lossy_alpha, Still(whitened), "composited on white")
    exif = Image.Exif()
    exif[0x0112] = 8
    yield Case(g, "EXIF orientation 8", m.save(rgb, "WEBP", lossless=True, exif=exif), Still(_orient(rgb, 8)))
    animation = m.animate(frames, "WEBP", 100, lossless=True)
    yield Case(g, "animated", animation, delayed(frames, [100] * 6))
    delays = [40, 400, 80, 1000, 40, 40]
    varied = m.animate(frames, "WEBP", delays, lossless=True)
    yield Case(g, "animated, per-frame delays", varied, delayed(frames, delays), "nearest in time")
    parts = [_sprite(i) for i in range(5)]
    see_through = m.animate([Image.fromarray(p) for p in parts], "WEBP", 100, lossless=True, exact=True)
    yield Case(g, "animated, alpha", see_through, delayed([on_white(p) for p in parts], [100] * 5))
    yield Case(g, "animated, as image", animation, Still(frames[0]), "", MediaOptions(modality="image"))
    yield Case(g, "cut short", lossy[: len(lossy) // 2], Refused("undecodable_media", "WebP"))
    yield Case(g, "animated, cut short", animation[:-100], Refused("undecodable_media"))


def gifs() -> Cases:
    g = "GIF"
    palette = np.stack([np.arange(256), 255 - np.arange(256), np.arange(256) * 7 % 256], -1)
    full = [np.full(SIZE, 10 + 20 * i) + np.arange(SIZE[1]) // 8 for i in range(8)]
    patch = np.full((10, 12), 200)
    width_height = (SIZE[1], SIZE[0])

    def made(frames: list[m.GifFrame], **kw: Any) -> bytes:
        return m.gif(width_height, palette, frames, **kw)

    def paint(*layers: tuple[np.ndarray, int, int]) -> np.ndarray:
        canvas = np.full((*SIZE, 3), 255, np.uint8)
        for pixels, left, top in layers:
            canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = palette[pixels]
        return canvas

    rgb8 = [palette[f].astype(np.uint8) for f in full]
    yield Case(g, "one frame", made([m.GifFrame(full[0])]), Still(rgb8[0]), "a still")
    yield Case(g, "one frame, without trailer", made([m.GifFrame(full[0])], trailer=b""), Still(rgb8[0]))
    keyed = made([m.GifFrame(full[0], clear=12)])
    clear = rgb8[0].copy()
    clear[full[0] == 12] = 255
    yield Case(g, "one frame, transparent index", keyed, Still(clear), "on white")
    interlaced = m.save(Image.fromarray(m.scene(*SIZE)).quantize(32), "GIF", interlace=1)
    yield Case(g, "interlaced", interlaced, Still(m.pillow_rgb(interlaced)))
    constant = made([m.GifFrame(f, delay=10) for f in full])
    yield Case(g, "animated", constant, delayed(rgb8, [100] * 8))
    yield Case(g, "animated, as image", constant, Still(rgb8[0]), "", MediaOptions(modality="image"))
    delays = [5, 50, 10, 10, 100, 5, 5, 30]
    varied = made([m.GifFrame(f, delay=d) for f, d in zip(full, delays, strict=True)])
    yield Case(g, "per-frame delays", varied, delayed(rgb8, [d * 10 for d in delays]), "nearest in time")
    yield Case(g, "delay 0", made([m.GifFrame(f, delay=0) for f in full]), delayed(rgb8, [100] * 8), "counts 100 ms")
    base = m.GifFrame(full[0], disposal=1)

    def moved(disposal: int) -> list[m.GifFrame]:
        return [base, *[m.GifFrame(patch + 10 * i, 5 * i, 6 * i, disposal=disposal) for i in range(1, 5)]]

    patches = [(patch + 10 * i, 5 * i, 6 * i) for i in range(1, 5)]
    whole = (full[0], 0, 0)
    kept = [paint(whole, *patches[:n]) for n in range(5)]
    yield Case(g, "disposal: keep", made(moved(1)), delayed(kept, [100] * 5))
    restored = [paint(whole), *[paint(whole, p) for p in patches]]
    yield Case(g, "disposal: previous", made(moved(3)), delayed(restored, [100] * 5))
    holes = []
    for n in range(5):
        canvas = paint(whole)
        for pixels, left, top in patches[: max(n - 1, 0)]:
            canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = 255
        if n:
            pixels, left, top = patches[n - 1]
            canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = palette[pixels]
        holes.append(canvas)
    cleared = [base, *[m.GifFrame(patch + 10 * i, 5 * i, 6 * i, disposal=2, clear=0) for i in range(1, 5)]]
    yield Case(g, "disposal: background", made(cleared), delayed(holes, [100] * 5), "the background is white")
    late = [m.GifFrame(patch, 2, 3, disposal=1, clear=0), m.GifFrame(patch + 20, 20, 8, disposal=1, clear=0)]
    yield Case(
        g,
        "first frame smaller than the canvas",
        made(late),
        delayed([paint((patch, 2, 3)), paint((patch, 2, 3), (patch + 20, 20, 8))], [100] * 2),
    )
    yield Case(g, "cut short", made([m.GifFrame(full[0])])[:1500], Refused("undecodable_media", "GIF"))
    canvas = m.gif((60000, 60000), palette, [m.GifFrame(patch)])
    yield Case(g, "canvas of 60000x60000", canvas, Refused("too_many_pixels"))
    huge = made([m.GifFrame(full[0]), m.GifFrame(patch)])
    at = huge.rindex(b"," + struct.pack("<HHHH", 0, 0, 12, 10))
    huge = m.patch(huge, at + 5, struct.pack("<HH", 60000, 60000))
    yield Case(g, "second frame of 60000x60000", huge, Refused("too_many_pixels"))
    outside = made([base, m.GifFrame(patch, 58, 44, disposal=1)])
    shown = [rgb8[0], paint(whole, (patch[:4, :6], 58, 44))]
    yield Case(g, "frame over the canvas's edge", outside, delayed(shown, [100] * 2), "clipped")


def other_stills() -> Cases:
    rgb = m.scene(*SIZE)
    grey = rgb[..., 0]
    rgba = np.dstack([rgb, m.scene(*SIZE, seed=3)[..., 1]])
    palette = Image.fromarray(rgb).quantize(32)
    flat = np.asarray(palette.convert("RGB"))
    bits = Image.fromarray(grey).convert("1")

    g = "BMP"
    bmp = m.save(rgb, "BMP")
    yield Case(g, "24 bits", bmp, Still(rgb))
    yield Case(g, "8 bits, palette", m.save(palette, "BMP"), Still(flat))
    yield Case(g, "1 bit", m.save(bits, "BMP"), Still(np.asarray(bits.convert("RGB"))))
    yield Case(
        g, "32 bits with alpha", m.save(rgba, "BMP"), Still(m.pillow_rgb(m.save(rgba, "BMP"))), "no mask: opaque"
    )
    upside = m.patch(bmp, 22, struct.pack("<i", -SIZE[0]))
    yield Case(g, "rows from the top", upside, Still(rgb[::-1]))
    yield Case(g, "run lengths", _bmp_rle8(), Still(_bmp_rle8_pixels()))
    yield Case(g, "cut short", bmp[:-500], Refused("undecodable_media", "BMP"))
    yield Case(
        g, "header says 60000x60000", m.patch(bmp, 18, struct.pack("<ii", 60000, 60000)), Refused("too_many_pixels")
    )
    yield Case(g, "text that starts with BM", b"BMX racing is fun to watch", Refused("unsupported_media", "text"))

    g = "TIFF"
    tiff = m.save(rgb, "TIFF")
    yield Case(g, "uncompressed", tiff, Still(rgb))
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
        yield Case(g, compression.removeprefix("tiff_"), m.save(rgb, "TIFF", compression=compression), Still(rgb))
    as_jpeg = m.save(rgb, "TIFF", compression="jpeg")
    yield Case(g, "JPEG inside", as_jpeg, Still(m.pillow_rgb(as_jpeg)))
    yield Case(g, "greyscale", m.save(grey, "TIFF"), Still(np.dstack([grey] * 3)))
    yield Case(g, "alpha", m.save(rgba, "TIFF"), Still(on_white(rgba)))
    yield Case(g, "palette", m.save(palette, "TIFF"), Still(flat))
    cmyk = Image.fromarray(rgb).convert("CMYK")
    yield Case(g, "CMYK", m.save(cmyk, "TIFF"), Still(np.asarray(cmyk.convert("RGB"))))
    fax = m.save(bits, "TIFF", compression="group4")
    yield Case(g, "1 bit, fax coding", fax, Still(np.asarray(bits.convert("RGB"))))
    ramp = np.arange(SIZE[0] * SIZE[1], dtype=np.uint16).reshape(SIZE) * 21
    sixteen = m.save(Image.fromarray(ramp), "TIFF")
    yield Case(
        g, "16-bit greyscale", sixteen, Still(np.dstack([ramp >> 8] * 3).astype(np.uint8)), "the high byte is kept"
    )
    yield Case(g, "big", m.save(rgb, "TIFF", big_tiff=True), Still(rgb), "BigTIFF")
    pages = m.save(rgb, "TIFF", save_all=True, append_images=[Image.fromarray(m.scene(20, 30))])
    yield Case(g, "two pages", pages, Still(rgb), "the first page")
    yield Case(g, "orientation 3", m.save(rgb, "TIFF", tiffinfo={0x0112: 3}), Still(rgb[::-1, ::-1]))
    as_float = m.save(Image.fromarray(grey.astype(np.float32)), "TIFF")
    yield Case(g, "floating point", as_float, Refused("unsupported_media", "floating point"))
    as_int = m.save(Image.fromarray(grey.astype(np.int32)), "TIFF")
    yield Case(g, "32-bit integers", as_int, Refused("unsupported_media", "32 bits"))
    raw = m.save(rgb, "TIFF", tiffinfo={50706: b"\1\4\0\0"})
    yield Case(g, "DNG", raw, Refused("unsupported_media", "raw photograph"), "only a thumbnail would be read")
    yield Case(g, "cut short", m.save(rgb, "TIFF", compression="tiff_lzw")[:900], Refused("undecodable_media", "TIFF"))

    g = "AVIF"
    avif = m.save(rgb, "AVIF", quality=80, speed=9)
    yield Case(g, "lossy", avif, Still(m.pillow_rgb(avif)))
    exact = m.save(rgb, "AVIF", quality=100, subsampling="4:4:4", speed=9)
    yield Case(g, "4:4:4", exact, Still(m.pillow_rgb(exact)))
    with_alpha = m.save(rgba, "AVIF", quality=90, speed=9)
    whitened = on_white(np.asarray(Image.open(io.BytesIO(with_alpha)).convert("RGBA")))
    yield Case(g, "alpha", with_alpha, Still(whitened), "composited on white")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = m.save(rgb, "AVIF", quality=80, speed=9, exif=exif)
    yield Case(g, "rotation property", turned, Still(_orient(m.pillow_rgb(turned), 6)))
    frames = m.movie(5)
    sequence = m.animate(frames, "AVIF", 200, quality=80, speed=9)
    shown = _pillow_frames(sequence)
    yield Case(g, "sequence", sequence, delayed(shown, [200] * 5), "a video")
    yield Case(g, "cut short", avif[: len(avif) // 2], Refused("undecodable_media", "AVIF"))

    g = "JPEG 2000"
    jp2 = m.save(rgb, "JPEG2000")
    yield Case(g, "lossless", jp2, Still(rgb))
    yield Case(g, "bare code stream", m.save(rgb, "JPEG2000", no_jp2=True), Still(rgb))
    lossy = m.save(rgb, "JPEG2000", irreversible=True, quality_mode="rates", quality_layers=[10])
    yield Case(g, "lossy", lossy, Still(m.pillow_rgb(lossy)))
    yield Case(g, "alpha", m.save(rgba, "JPEG2000"), Still(on_white(rgba)))
    yield Case(g, "greyscale", m.save(grey, "JPEG2000"), Still(np.dstack([grey] * 3)))
    yield Case(
        g,
        "16-bit greyscale",
        m.save(Image.fromarray(ramp), "JPEG2000"),
        Still(np.dstack([ramp >> 8] * 3).astype(np.uint8)),
    )
    yield Case(g, "cut short", jp2[: len(jp2) // 3], Refused("undecodable_media", "JPEG 2000"))


def heifs() -> Cases:
    """Only where the optional package is installed."""
    import pillow_heif

    pillow_heif.register_heif_opener()
    g, rgb = "HEIC", m.scene(*SIZE)
    heic = m.save(rgb, "HEIF", quality=80)
    yield Case(g, "lossy", heic, Still(m.pillow_rgb(heic)), "needs pillow-heif")
    rgba = np.dstack([rgb, m.scene(*SIZE, seed=3)[..., 1]])
    alpha = m.save(rgba, "HEIF", quality=80)
    whitened = on_white(np.asarray(Image.open(io.BytesIO(alpha)).convert("RGBA")))
    yield Case(g, "alpha", alpha, Still(whitened), "needs pillow-heif")
    yield Case(g, "cut short", heic[: len(heic) // 2], Refused("undecodable_media", "HEIC"), "needs pillow-heif")


def shapes() -> Cases:
    g = "Sizes"
    for height, width in (
        (1, 1),
        (1, 2),
        (3, 200),
        (1, 200),
        (200, 1),
        (31, 33),
        (16, 48),
        (500, 7),
        (257, 255),
        (600, 1000),
    ):
        rgb = m.scene(height, width)
        yield Case(g, f"{width}x{height}", m.save(rgb, "PNG"), Still(rgb))
    for height, width in ((1, 201), (402, 2), (4000, 10)):
        data = m.save(np.zeros((height, width, 3), np.uint8), "PNG")
        yield Case(g, f"{width}x{height}", data, Refused("aspect_ratio", f"{width}x{height}"), "over 200 to 1")
    big = np.kron(m.scene(40, 60), np.ones((75, 100, 1), np.uint8))
    yield Case(
        g, "6000x3000 greyscale", m.save(big[..., 0], "PNG"), Still(np.dstack([big[..., 0]] * 3)), "huge but legal"
    )
    over = m.save(Image.new("1", (6000, 4000)), "PNG")
    yield Case(g, "6000x4000, limit 20 megapixels", over, Refused("too_many_pixels", "6000x4000"))


def not_media() -> Cases:
    g = "Not an image or video"

    def no(name: str, data: bytes, says: str) -> Case:
        return Case(g, name, data, Refused("unsupported_media", says))

    yield Case(g, "nothing", b"", Refused("empty_body"))
    yield no("plain text", b"Dear service, this is a photo.\n" * 4, "plain text")
    yield no("text in UTF-8", "Grüße aus Zürich, ein Foto".encode(), "plain text")
    yield no("HTML", b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML")
    yield no("HTML without doctype", b"<html><head></head></html>", "HTML")
    yield no("XML", b"<?xml version='1.0'?><a/>", "XML")
    yield no("SVG", b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG")
    yield no("JSON", json.dumps({"image": "none"}).encode(), "JSON")
    yield no("base64 of a picture", base64.b64encode(m.save(m.scene(8, 8), "PNG")), "text")
    yield no("PDF", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "PDF")
    yield no("ZIP", b"PK\3\4" + bytes(30), "ZIP")
    yield no("gzip", b"\x1f\x8b\x08" + bytes(30), "gzip")
    yield no("Zstandard", b"\x28\xb5\x2f\xfd" + bytes(30), "Zstandard")
    yield no("executable", b"\x7fELF\2\1\1" + bytes(60), "ELF")
    yield no("NumPy array", b"\x93NUMPY\1\0" + bytes(60), "NumPy")
    yield no("ICO", m.save(Image.new("RGB", (16, 16)), "ICO"), "ICO")
    yield no("Photoshop", b"8BPS\0\1" + bytes(40), "Photoshop")
    yield no("JPEG XL", b"\xff\x0a" + bytes(40), "JPEG XL")
    yield no("HLS playlist", b"#EXTM3U\n#EXTINF:9,\nfile:///etc/passwd\n", "HLS")
    yield no("concat script", b"ffconcat version 1.0\nfile /etc/passwd\n", "concat")
    yield no("WAVE audio", m.sound("wav", "pcm_s16le"), "WAVE")
    yield no("MP3 audio", m.sound("mp3", "libmp3lame"), "audio")
    yield no("Ogg", b"OggS\0\2" + bytes(40), "Ogg")
    yield no("Flash video", b"FLV\1\5\0\0\0\x09" + bytes(20), "Flash")
    yield no("Windows Media", bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c") + bytes(40), "WMV")
    yield no("MPEG program stream", b"\0\0\1\xba" + bytes(40), "program stream")
    yield no("bare H.264", m.clip(m.movie(3), "h264", "libx264"), "bare H.264")
    yield no("zeros", bytes(500), "unknown")
    yield no("noise", np.random.default_rng(0).bytes(2000), "unknown")
    yield no("HEIF of an unknown coding", b"\0\0\0\x14ftypmif1\0\0\0\0mif1" + bytes(40), "HEIF")
    yield no("Canon raw", b"\0\0\0\x14ftypcrx \0\0\0\0crx " + bytes(40), "raw")


# Clips


_HIDDEN = {"auto-alt-ref": "1", "lag-in-frames": "16"}


def codings() -> Cases:
    g, frames = "Containers and codecs", m.movie(40)
    for name, muxer, demuxer, codec, pix_fmt, options in (
        ("MP4, H.264", "mp4", "mov", "libx264", "yuv420p", {}),
        ("MOV, H.264", "mov", "mov", "libx264", "yuv420p", {}),
        ("MKV, H.264", "matroska", "matroska", "libx264", "yuv420p", {}),
        ("AVI, H.264, no B-frames", "avi", "avi", "libx264", "yuv420p", {"bf": "0"}),
        ("MPEG-TS, H.264", "mpegts", "mpegts", "libx264", "yuv420p", {}),
        ("MP4, H.264 4:4:4", "mp4", "mov", "libx264", "yuv444p", {}),
        ("MP4, H.264 10 bit", "mp4", "mov", "libx264", "yuv420p10le", {}),
        ("MP4, H.264 full range", "mp4", "mov", "libx264", "yuvj420p", {}),
        ("MP4, H.264 BT.709", "mp4", "mov", "libx264", "yuv420p", {"colorspace": "bt709", "color_range": "tv"}),
        ("MP4, HEVC", "mp4", "mov", "libx265", "yuv420p", {}),
        ("MP4, HEVC 10 bit", "mp4", "mov", "libx265", "yuv420p10le", {}),
        ("MKV, HEVC", "matroska", "matroska", "libx265", "yuv420p", {}),
        ("MPEG-TS, HEVC", "mpegts", "mpegts", "libx265", "yuv420p", {}),
        ("WebM, VP8", "webm", "matroska", "libvpx", "yuv420p", {}),
        ("WebM, VP9", "webm", "matroska", "libvpx-vp9", "yuv420p", {}),
        ("MP4, VP9", "mp4", "mov", "libvpx-vp9", "yuv420p", {}),

        ("WebM, AV1", "webm", "matroska", "libsvtav1", "yuv420p", {}),
        ("MP4, AV1 10 bit", "mp4", "mov", "libsvtav1", "yuv420p10le", {}),
        ("AVI, MPEG-4", "avi", "avi", "mpeg4", "yuv420p", {}),
        ("AVI, Motion JPEG", "avi", "avi", "mjpeg", "yuvj420p", {}),
        ("MPEG-TS, MPEG-2", "mpegts", "mpegts", "mpeg2video", "yuv420p", {}),
        ("MOV, ProRes", "mov", "mov", "prores_ks", "yuv422p10le", {}),
        ("WebM, VP8 with hidden frames", "webm", "matroska", "libvpx", "yuv420p", _HIDDEN),
        ("WebM, VP9 with hidden frames", "webm", "matroska", "libvpx-vp9", "yuv420p", _HIDDEN),
    ):  # fmt: skip
        data = m.clip(frames, muxer, codec, pix_fmt=pix_fmt, **options)
        expect = seen(data, demuxer, 30)
        if len(expect.frames) != len(frames):
            raise AssertionError(f"{name}: {len(expect.frames)} of {len(frames)} frames")
        yield Case(g, name, data, expect)
    fast = m.index_first(m.clip(frames, "mp4", "libx264"))
    yield Case(g, "MP4, index first", fast, seen(fast, "mov", 30))
    pieces = m.clip(frames, "mp4", "libx264", muxer={"movflags": "frag_keyframe+empty_moov"}, g="10")
    yield Case(g, "MP4, fragmented", pieces, seen(pieces, "mov", 30))
    bframes = m.clip(frames, "mp4", "libx264", bf="3", g="40")
    yield Case(g, "MP4, three B-frames", bframes, seen(bframes, "mov", 30))
    avi = m.clip(frames, "avi", "libx264", bf="3", g="40")
    note = "AVI stores no presentation times: the header's rate rules"
    yield Case(g, "AVI, H.264 with B-frames", avi, seen(avi, "avi", 30), note)
    odd = m.clip(m.movie(8, 49, 65), "webm", "libvpx-vp9")
    yield Case(g, "odd size 65x49", odd, seen(odd, "matroska", 30))
    wide = m.clip(frames, "mp4", "libx264", sample_aspect=Fraction(4, 3))
    yield Case(g, "pixels of 4:3", wide, seen(wide, "mov", 30), "coded size, not stretched")
    for name, codec, muxer, demuxer, options in (
        ("interlaced H.264", "libx264", "mp4", "mov", {"x264-params": "interlaced=1"}),
        ("interlaced MPEG-2", "mpeg2video", "mpegts", "mpegts", {"flags": "+ildct+ilme"}),
    ):
        woven = m.clip(frames, muxer, codec, **options)
        yield Case(g, name, woven, seen(woven, demuxer, 30), "both fields woven, as in the reference")
    for codec, muxer in (("ffv1", "matroska"), ("rawvideo", "avi"), ("huffyuv", "avi")):
        pix = "yuv422p" if codec == "huffyuv" else "yuv420p"
        other = m.clip(frames[:4], muxer, codec, pix_fmt=pix)
        yield Case(g, f"{muxer}, {codec}", other, Refused("unsupported_media", codec), "no codec for sending")


def rates() -> Cases:
    g = "Rates and lengths"
    for rate in (1, 2, 5, 24, 25, 50, 120, Fraction(30000, 1001), Fraction(24000, 1001), Fraction(15, 2)):
        for muxer, demuxer in (("mp4", "mov"), ("matroska", "matroska")):
            count = 33 if rate in (24, Fraction(30000, 1001)) else 21
            data = m.clip(m.movie(count), muxer, "libx264", rate=rate, preset="ultrafast")
            yield Case(g, f"{count} frames at {rate} fps, {muxer}", data, seen(data, demuxer, rate))
    for count in (1, 2, 3, 4, 5):
        data = m.clip(m.movie(count), "mp4", "libx264")
        yield Case(g, f"{count} frame{'s' * (count > 1)}", data, seen(data, "mov", 30))
    long = [np.full((16, 16, 3), i * 3 % 256, np.uint8) for i in range(3600 * 2)]
    hour = m.clip(long, "mp4", "libx264", rate=2, preset="ultrafast", g="60")
    note = "7200 frames, 768 of them taken"
    yield Case(g, "one hour at 2 fps", hour, seen(hour, "mov", 2), note, MediaOptions(max_pixels=768 * 32 * 32))


def stamps() -> Cases:
    g, frames = "Time stamps", m.movie(30)
    irregular = list(
        accumulate([40, 10, 200, 33, 33, 500, 20, 20, 20, 900, 40, 41, 39, 40, 5, 5, 5, 700, 33] + [60] * 11)
    )
    ms = Fraction(1, 1000)
    near = "nearest to an even grid in time"
    for muxer, demuxer, codec in (
        ("mp4", "mov", "libx264"),
        ("matroska", "matroska", "libx264"),
        ("webm", "matroska", "libvpx-vp9"),
        ("mpegts", "mpegts", "libx264"),
    ):
        data = m.clip(frames, muxer, codec, stamps=irregular, time_base=ms, bf="0")
        yield Case(g, f"variable rate, {muxer}", data, stamped(data, demuxer), near)
    data = m.clip(frames, "mp4", "libx264", stamps=irregular, time_base=ms)
    yield Case(g, "variable rate, 3 fps asked", data, stamped(data, "mov"), near, MediaOptions(fps=3))
    yield Case(g, "variable rate, 7 frames asked", data, stamped(data, "mov"), near, MediaOptions(num_frames=7))
    gap = [*range(0, 10 * 33, 33), *range(9000, 9000 + 20 * 33, 33)]
    data = m.clip(frames, "matroska", "libx264", stamps=gap, time_base=ms)
    yield Case(g, "a nine-second pause", data, stamped(data, "matroska"), near, MediaOptions(num_frames=12))
    shaky = [i * 33 + (i * 7 % 5) * 3 for i in range(30)]
    data = m.clip(frames, "matroska", "libx264", stamps=shaky, time_base=ms)
    yield Case(g, "jitter of 12 ms", data, stamped(data, "matroska"), near, MediaOptions(num_frames=9))
    late = m.clip(frames, "mpegts", "libx264", stamps=[10_000_000 + i for i in range(30)])
    yield Case(
        g, "first time stamp far from 0", late, seen(late, "mpegts", 30), "times count from the first shown frame"
    )
    negative = m.clip(
        frames, "matroska", "libx264", stamps=list(range(-15, 15)), muxer={"avoid_negative_ts": "disabled"}
    )
    yield Case(g, "negative time stamps", negative, seen(negative, "matroska", 30))
    plain = m.clip(frames, "mp4", "libx264", bf="0")
    hundred = plain.index(b"elst")
    skip = m.patch(plain, hundred + 4 + 4 + 4 + 4, struct.pack(">i", 12 * 512))
    yield Case(g, "edit list skips 12 frames", skip, seen(skip, "mov", 30), "only what the edit shows")
    live = m.clip(frames, "webm", "libvpx", sink=m.NoSeek())
    yield Case(g, "WebM without duration", live, seen(live, "matroska", 30))
    longer = m.box_field(m.box_field(plain, b"mvhd", 16, 10_000_000), b"mdhd", 16, 400_000_000)
    yield Case(g, "MP4 header says hours", longer, seen(longer, "mov", 30), "counted by decoding")
    avi = m.clip(frames, "avi", "mpeg4")
    at = avi.index(b"avih") + 8 + 16
    lying = m.patch(avi, at, struct.pack("<I", 4_000_000_000))
    yield Case(g, "AVI header says 4e9 frames", lying, seen(lying, "avi", 30), "counted by decoding")
    at = avi.index(b"strh") + 8 + 32
    fewer = m.patch(avi, at, struct.pack("<I", 3))
    yield Case(g, "AVI header says 3 frames", fewer, seen(fewer, "avi", 30), "counted by decoding")
    ends = m.clip(frames[:2], "mp4", "libx264", stamps=[0, 3 * 3600], time_base=Fraction(1))
    yield Case(g, "two frames three hours apart", ends, Refused("too_long", "7200"))


def turned() -> Cases:
    g = "Display matrix"
    data = m.clip(m.movie(6, 48, 80), "mp4", "libx264")
    frames = m.decoded(data, "mov")[0]
    for name, matrix, turn in (
        ("quarter turn clockwise", (0, 1, -1, 0), lambda f: np.rot90(f, -1)),
        ("half turn", (-1, 0, 0, -1), lambda f: np.rot90(f, 2)),
        ("quarter turn counter-clockwise", (0, -1, 1, 0), lambda f: np.rot90(f, 1)),
        ("mirrored", (-1, 0, 0, 1), lambda f: f[:, ::-1]),
        ("upside down", (1, 0, 0, -1), lambda f: f[::-1]),
        ("transposed", (0, 1, 1, 0), lambda f: f.transpose(1, 0, 2)),
        ("transposed and turned", (0, -1, -1, 0), lambda f: np.rot90(f, 2).transpose(1, 0, 2)),
    ):
        yield Case(g, name, m.display_matrix(data, *matrix), even([turn(f) for f in frames], 30), "shown upright")


def streams() -> Cases:
    g, frames = "Streams", m.movie(12)
    other = [f[::-1] for f in m.movie(10, 64, 48)]
    for muxer, codec in (("mp4", "aac"), ("matroska", "aac"), ("mpegts", "aac"), ("avi", "pcm_s16le")):
        yield Case(g, f"audio only, {muxer}", m.sound(muxer, codec), Refused("unsupported_media", "audio only"))
    for default in (0, 1):
        data = m.two_streams(frames, other, default)
        yield Case(g, f"two videos, number {default} default", data, seen(data, "matroska", 30, default))
    neither = m.two_streams(frames, other, None)
    yield Case(g, "two videos, none default", neither, seen(neither, "matroska", 30, 0), "the first")
    cover = m.scene(40, 40, seed=9)
    yield Case(g, "audio with cover art", m.with_cover(cover, None), Refused("unsupported_media", "audio only"))
    both = m.with_cover(cover, frames)
    yield Case(g, "clip with cover art", both, seen(both, "mov", 30, _first_clip(both)), "the art is no frame")
    a, b = m.clip(frames, "mpegts", "libx264"), m.clip(m.movie(12, 80, 96), "mpegts", "libx264")
    changing = a + b
    first = m.decoded(changing, "mpegts")[0]
    yield Case(
        g,
        "size changes half-way",
        changing,
        even(first, 30),
        "all frames to the first one's target; time stamps restart",
    )


def damage() -> Cases:
    g, frames = "Damage", m.movie(40)
    mp4 = m.index_first(m.clip(frames, "mp4", "libx264", g="10"))
    rule = "the file itself says that bytes are missing: refused"
    for name, data in (
        ("MP4", m.clip(frames, "mp4", "libx264")),
        ("MP4, index first", mp4),
        ("MKV", m.clip(frames, "matroska", "libx264")),
        ("WebM", m.clip(frames, "webm", "libvpx")),
        ("AVI", m.clip(frames, "avi", "mpeg4")),
    ):
        yield Case(
            g, f"{name}, cut at two thirds", data[: len(data) * 2 // 3], Refused("undecodable_media", "bytes"), rule
        )
        yield Case(g, f"{name}, last bytes missing", data[:-7], Refused("undecodable_media", "bytes"), rule)
    ts = m.clip(frames, "mpegts", "libx264", g="10", bf="0")
    partial = ts[: len(ts) * 2 // 3]
    keeps = "a stream has no end to miss: what decodes is used"
    yield Case(g, "MPEG-TS, cut at two thirds", partial, seen(partial, "mpegts", 30), keeps)
    live = m.clip(frames, "webm", "libvpx", sink=m.NoSeek())
    partial = live[: len(live) * 2 // 3]
    yield Case(g, "WebM of unknown length, cut", partial, seen(partial, "matroska", 30), keeps)
    index = ts.index(b"\x47\x41\x00", 188 * 20) // 188 * 188
    tail = ts[index - 188 * 2 :]
    skipped = "frames before the first key frame are not shown"
    yield Case(g, "MPEG-TS, starts between key frames", tail, seen(tail, "mpegts", 30), skipped)
    yield Case(g, "MPEG-TS, starts inside a packet", ts[100:], seen(ts[100:], "mpegts", 30), skipped)
    sizes = _packet_places(mp4)
    blank = m.patch(mp4, sizes[0][0], bytes(sizes[0][1]))
    yield Case(
        g, "MP4, first key frame zeroed", blank, seen(blank, "mov", 30) if m.decoded(blank, "mov")[0] else _no_frame()
    )
    middle = m.patch(mp4, sizes[15][0] + 4, bytes(sizes[15][1] - 4))
    expect = stamped(middle, "mov") if len(m.decoded(middle, "mov")[0]) < 40 else seen(middle, "mov", 30)
    yield Case(g, "MP4, one packet zeroed", middle, expect, "the frames around it count")
    all_blank = mp4
    for at, size in sizes:
        all_blank = m.patch(all_blank, at, bytes(size))
    yield Case(g, "MP4, every packet zeroed", all_blank, _no_frame())
    no_index = mp4.replace(b"moov", b"abcd", 1)
    yield Case(g, "MP4 without index", no_index, Refused("undecodable_media", "MP4"))
    fragmented = m.clip(frames, "mp4", "libx264", muxer={"movflags": "frag_keyframe+empty_moov"})
    empty = fragmented[: fragmented.index(b"moof") - 4]
    yield Case(g, "MP4 of zero frames", empty, Refused("undecodable_media"))
    yield Case(g, "ftyp alone", mp4[: mp4.index(b"moov") - 4], Refused("undecodable_media"))
    header = live[: live.index(b"\x1f\x43\xb6\x75")]
    yield Case(g, "WebM of zero frames", header, Refused("undecodable_media"))
    vp8 = m.clip(frames, "webm", "libvpx")
    frame = vp8.index(b"\x9d\x01\x2a")
    inside = m.patch(vp8, frame + 3, struct.pack("<HH", 16383, 16383))
    yield Case(g, "VP8 frame says 16383x16383", inside, _no_frame(), "no picture of that size is made")
    square = m.clip(m.movie(2, 512, 512), "webm", "libvpx")
    at = square.index(b"\xb0\x82\x02\0\xba\x82\x02\0")
    outside = m.patch(square, at, b"\xb0\x82\x7f\xff\xba\x82\x7f\xff")
    yield Case(
        g, "WebM says 32767x32767, its frames 512x512", outside, seen(outside, "matroska", 30), "the frames rule"
    )


def options() -> Cases:
    g, rgb = "Options", m.scene(300, 400)
    still, frames = m.save(rgb, "PNG"), m.movie(90)
    clip = m.clip(frames, "mp4", "libx264", preset="ultrafast")
    all_seen = seen(clip, "mov", 30)
    shown = Still(rgb)
    yield Case(g, "min_pixels", still, shown, "300000 pixels at least", MediaOptions(min_pixels=300_000))
    yield Case(
        g,
        "min_pixels below the checkpoint's",
        m.save(rgb[:50, :50], "PNG"),
        Still(rgb[:50, :50]),
        "",
        MediaOptions(min_pixels=1024),
    )
    yield Case(g, "max_pixels", still, shown, "70000 pixels at most", MediaOptions(max_pixels=70_000))
    yield Case(
        g,
        "min above max",
        still,
        Refused("invalid_option", param="max_pixels"),
        "",
        MediaOptions(min_pixels=90_000, max_pixels=80_000),
    )
    yield Case(
        g,
        "max below the checkpoint's min",
        still,
        Refused("invalid_option", param="max_pixels"),
        "",
        MediaOptions(max_pixels=1000),
    )
    yield Case(
        g,
        "max_pixels over the ceiling",
        still,
        Refused("invalid_option", param="max_pixels"),
        "",
        MediaOptions(max_pixels=10**9),
    )
    yield Case(g, "min_pixels 0", still, Refused("invalid_option", param="min_pixels"), "", MediaOptions(min_pixels=0))
    few = Limits(max_tokens=100)
    yield Case(g, "more tokens than the limit", still, Refused("too_many_tokens", "100"), "", MediaOptions(), few)
    yield Case(
        g,
        "video for a still",
        still,
        Refused("modality_mismatch", param="modality"),
        "",
        MediaOptions(modality="video"),
    )
    yield Case(
        g, "image for a clip", clip, Refused("modality_mismatch", param="modality"), "", MediaOptions(modality="image")
    )
    yield Case(g, "image for a still", still, shown, "", MediaOptions(modality="image"))
    yield Case(g, "fps for a still", still, shown, "not looked at", MediaOptions(fps=1))
    yield Case(g, "video for a clip", clip, all_seen, "", MediaOptions(modality="video"))
    for fps in (0.5, 1.0, 3.7, 10.0, 1e300):
        yield Case(g, f"fps={fps:g}", clip, all_seen, "", MediaOptions(fps=fps))
    for fps in (0.0, -1.0, float("nan"), float("inf")):
        yield Case(g, f"fps={fps:g}", clip, Refused("invalid_option", param="fps"), "", MediaOptions(fps=fps))
    for count in (1, 2, 7, 90, 500):
        yield Case(
            g,
            f"num_frames={count}",
            clip,
            all_seen,
            "every frame once" if count > 90 else "",
            MediaOptions(num_frames=count),
        )
    yield Case(g, "num_frames=0", clip, Refused("invalid_option", param="num_frames"), "", MediaOptions(num_frames=0))
    yield Case(
        g,
        "num_frames over the ceiling",
        clip,
        Refused("invalid_option", param="num_frames"),
        "",
        MediaOptions(num_frames=769),
    )
    yield Case(
        g,
        "fps and num_frames",
        clip,
        Refused("invalid_option", param="num_frames"),
        "",
        MediaOptions(fps=1, num_frames=4),
    )
    low = Limits(max_frames=4)
    yield Case(g, "more frames than the limit", clip, Refused("too_many_frames", "6 frames"), "", MediaOptions(), low)
    yield Case(
        g, "fps for more than the limit", clip, Refused("invalid_option", param="fps"), "", MediaOptions(fps=20), low
    )
    yield Case(g, "max_pixels of a clip", clip, all_seen, "over all sampled frames", MediaOptions(max_pixels=8192))
    yield Case(g, "min_pixels of a clip", clip, all_seen, "over all sampled frames", MediaOptions(min_pixels=100_000))
    short = Limits(max_seconds=2)
    yield Case(g, "longer than the limit", clip, Refused("too_long", "3.0 s"), "", MediaOptions(), short)


def _orient(rgb: np.ndarray, orientation: int) -> np.ndarray:
    """Upright by EXIF orientation (Exif 2.3, 4.6.4)."""
    turns: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, 1),
    }
    return turns[orientation](rgb)


def _srgb() -> bytes:
    from PIL import ImageCms

    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def _sprite(i: int) -> np.ndarray:
    rgba = np.zeros((*SIZE, 4), np.uint8)
    rgba[4 * i : 4 * i + 12, 8 * i : 8 * i + 20] = (200, 30 * i, 90, 128 + 20 * i)
    return rgba


def _text_bomb() -> bytes:
    return m.png_chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(100_000_000), 9))


def _profile_bomb() -> bytes:
    return m.png_chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(100_000_000), 9))


def _pillow_frames(data: bytes) -> list[np.ndarray]:
    image = Image.open(io.BytesIO(data))
    frames = []
    for i in range(image.n_frames):  # type: ignore[attr-defined]
        image.seek(i)
        frames.append(np.asarray(image.convert("RGB")))
    return frames


def _bmp_rle8_pixels() -> np.ndarray:
    rows = [[i * 20 + j // 8 * 3 for j in range(16)] for i in range(8)]
    return np.dstack([np.array(rows, np.uint8)] * 3)


def _bmp_rle8() -> bytes:
    pixels = _bmp_rle8_pixels()[..., 0]
    body = b"".join(bytes([8, row[0], 8, row[8], 0, 0]) for row in pixels[::-1]) + b"\0\1"
    palette = b"".join(bytes([i, i, i, 0]) for i in range(256))
    info = struct.pack("<IiiHHIIiiII", 40, 16, 8, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(body), 0, 0, 54 + 1024) + info + palette + body


def _first_clip(data: bytes) -> int:
    import av

    with av.open(io.BytesIO(data), format="mov") as container:
        art = av.stream.Disposition.attached_pic
        return next(i for i, s in enumerate(container.streams.video) if not s.disposition & art)


def _packet_places(data: bytes) -> list[tuple[int, int]]:
    """(offset, size) of an MP4's video packets, in coding order."""
    import av

    with av.open(io.BytesIO(data), format="mov") as container:
        return [(p.pos, p.size) for p in container.demux(video=0) if p.size and p.pos is not None]


def _no_frame() -> Refused:
    return Refused("undecodable_media", "no frame")


GROUPS: tuple[Callable[[], Cases], ...] = (
    jpegs, pngs, apngs, webps, gifs, other_stills, heifs, shapes, not_media,
    codings, rates, stamps, turned, streams, damage, options,
)  # fmt: skip


def build() -> dict[str, list[Case]]:
    """The cases by the name of the function that makes them; HEIC's only where its package is installed."""
    cases: dict[str, list[Case]] = {}
    for group in GROUPS:
        try:
            cases[group.__name__] = list(group())
        except ModuleNotFoundError as e:
            if e.name != "pillow_heif":
                raise
    return cases


def outcome(case: Case) -> DecodedMedia | FovealError:
    try:
        return decode(case.data, case.options, ProcessorConfig(), case.limits)
    except FovealError as e:
        return e


def table(cases: Iterable[Case]) -> str:
    """Markdown, one row a file, from what decoding gives; the tests hold that against `expect`."""
    lines = ["| group | file | options | outcome | note |", "| --- | --- | --- | --- | --- |"]
    defaults = MediaOptions()
    for case in cases:
        names = [n for n in vars(defaults) if getattr(case.options, n) != getattr(defaults, n)]
        given = ", ".join(f"`{n}={getattr(case.options, n)}`" for n in names)
        lines.append(f"| {case.group} | {case.name} | {given} | {_describe(outcome(case))} | {case.note} |")
    return "\n".join(lines) + "\n"


def _describe(result: DecodedMedia | FovealError) -> str:
    if isinstance(result, FovealError):
        return f"{result.status} `{result.code}`"
    grid = ProcessorConfig().grid_thw(result.num_frames, result.height, result.width)
    if result.timestamps is None:
        return f"image, grid {grid}"
    first, last = float(result.timestamps[0]), float(result.timestamps[-1])
    return f"video, {result.num_frames} frames, grid {grid}, time stamps {first:.3f} to {last:.3f} s"


BEGIN, END = "<!-- corpus: begin -->\n", "<!-- corpus: end -->\n"


def page_with(table: str, page: str) -> str:
    return page[: page.index(BEGIN) + len(BEGIN)] + table + page[page.index(END) :]


if __name__ == "__main__":
    logging.disable()
    path = Path(sys.argv[1])
    path.write_text(page_with(table(chain(*build().values())), path.read_text()))
