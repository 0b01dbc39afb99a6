"""What some bytes are, by their content alone.

The answer picks the one Pillow plugin or the one FFmpeg demuxer that will read the bytes, so neither library ever
guesses: a playlist or a script that FFmpeg would follow to other files is refused here. General detectors were
tried and are no help: `filetype` knows no text formats, and `puremagic` calls a run of zeros an embroidery design.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.errors import FovealError

READ = "JPEG, PNG, APNG, WebP, GIF, BMP, TIFF, AVIF, HEIC, JPEG 2000, MP4, MOV, MKV, WebM, AVI and MPEG-TS are read"


@dataclass(frozen=True)
class Detected:
    """A format that is read.

    reader: "pillow" (stills and animations) or "ffmpeg" (clips).
    formats: Pillow plugins to allow, or the FFmpeg demuxer.
    """

    name: str
    reader: Literal["pillow", "ffmpeg"]
    formats: tuple[str, ...]


_JPEG = Detected("JPEG", "pillow", ("JPEG",))
_PNG = Detected("PNG", "pillow", ("PNG",))
_GIF = Detected("GIF", "pillow", ("GIF",))
_WEBP = Detected("WebP", "pillow", ("WEBP",))
_BMP = Detected("BMP", "pillow", ("BMP",))
_TIFF = Detected("TIFF", "pillow", ("TIFF",))
_JPEG2000 = Detected("JPEG 2000", "pillow", ("JPEG2000",))
_AVIF = Detected("AVIF", "pillow", ("AVIF",))
_HEIF = Detected("HEIC", "pillow", ("HEIF",))
_MP4 = Detected("MP4/MOV", "ffmpeg", ("mov",))
_MATROSKA = Detected("MKV/WebM", "ffmpeg", ("matroska",))
_AVI = Detected("AVI", "ffmpeg", ("avi",))
_MPEGTS = Detected("MPEG-TS", "ffmpeg", ("mpegts",))

_READ_PREFIXES: tuple[tuple[bytes, Detected], ...] = (
    (b"\xff\xd8\xff", _JPEG),
    (b"\x89PNG\r\n\x1a\n", _PNG),
    (b"GIF87a", _GIF),
    (b"GIF89a", _GIF),
    (b"II*\0", _TIFF),
    (b"MM\0*", _TIFF),
    (b"II+\0", _TIFF),
    (b"MM\0+", _TIFF),
    (b"\0\0\0\x0cjP  \r\n\x87\n", _JPEG2000),
    (b"\xff\x4f\xff\x51", _JPEG2000),
    (b"\x1a\x45\xdf\xa3", _MATROSKA),
)

_REFUSED_PREFIXES: tuple[tuple[bytes, str], ...] = (
    (b"\0\0\1\0", "an ICO icon"),
    (b"\0\0\2\0", "a CUR cursor"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"8BPS", "a Photoshop document"),
    (b"FLV\1", "Flash video"),
    (b"OggS", "an Ogg stream"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "ASF/WMV"),
    (b"\0\0\1\xba", "an MPEG program stream"),
    (b"\0\0\1\xb3", "a bare MPEG video stream"),
    (b"\0\0\0\1", "a bare H.264 or HEVC stream"),
    (b"ID3", "MP3 audio"),
    (b"fLaC", "FLAC audio"),
    (b"#!AMR", "AMR audio"),
    (b"%PDF-", "a PDF document"),
    (b"%!PS", "PostScript"),
    (b"PK\3\4", "a ZIP archive or an office document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\0", "an xz archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"\x7fELF", "an ELF executable"),
    (b"MZ", "a Windows executable"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"#EXTM3U", "an HLS playlist"),
    (b"ffconcat", "an FFmpeg concat script"),
    (b"v=0\r\n", "an SDP session description"),
)

_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
_ATOMS_BEFORE_FTYP = {b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"}
_BMP_HEADERS = {12, 16, 40, 52, 56, 64, 108, 124}


def detect(data: bytes | memoryview) -> Detected:
    """The format of `data`.

    Raises:
        FovealError: `empty_body`; `unsupported_media`, with a message that names what was found.
    """
    if len(data) == 0:
        raise FovealError("empty_body", "the item has no bytes")
    head = bytes(data[:4096])
    for prefix, detected in _READ_PREFIXES:
        if head.startswith(prefix):
            return detected
    if head[:4] == b"RIFF":
        return _riff(head)
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return _BMP
    if head[4:8] == b"ftyp":
        return _iso_media(head)
    if head[4:8] in _ATOMS_BEFORE_FTYP:
        return _MP4
    if _is_transport_stream(head):
        return _MPEGTS
    raise unsupported(_name_of_refused(head))


def is_clip(data: bytes | memoryview) -> bool:
    """Whether a demuxer of videos reads `data`."""
    try:
        return detect(data).reader == "ffmpeg"
    except FovealError:
        return False


def unsupported(what: str) -> FovealError:
    return FovealError("unsupported_media", f"the content is {what}, which is not read; {READ}")


def _riff(head: bytes) -> Detected:
    kind = head[8:12]
    if kind == b"WEBP":
        return _WEBP
    if kind == b"AVI ":
        return _AVI
    raise unsupported("WAVE audio" if kind == b"WAVE" else f"a RIFF file of type {kind!r}")


def _iso_media(head: bytes) -> Detected:
    """ISO base media by brand: the major one decides unless it is the generic picture brand `mif1`/`msf1`."""
    size = min(int.from_bytes(head[:4], "big"), len(head))
    major, compatible = head[8:12], {head[i : i + 4] for i in range(16, size - 3, 4)}
    brands = {major} if major not in (b"mif1", b"msf1", b"miaf") else compatible
    if brands & {b"avif", b"avis"}:
        return _AVIF
    if brands & _HEIF_BRANDS:
        return _HEIF
    if major == b"crx ":
        raise unsupported("a Canon raw photograph")
    if major in (b"mif1", b"msf1", b"miaf"):
        raise unsupported("a HEIF file without a coding that is known")
    return _MP4


def _is_transport_stream(head: bytes) -> bool:
    """Sync bytes at the stride of plain (188), time-stamped (192) or error-protected (204) packets."""
    for stride in (188, 192, 204):
        for start in range(min(stride, len(head))):
            syncs = head[start::stride][:5]
            if len(syncs) >= (3 if start in (0, 4) else 5) and syncs.count(0x47) == len(syncs):
                return True
    return False


def _name_of_refused(head: bytes) -> str:
    for prefix, name in _REFUSED_PREFIXES:
        if head.startswith(prefix):
            return name
    if head[0] == 0xFF and head[1:2] and head[1] & 0xE0 == 0xE0:
        return "MPEG audio"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in text[:1024]:
        return "an SVG drawing"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page"
    if text.startswith(b"<?xml"):
        return "an XML document"
    if text.startswith((b"{", b"[")):
        return "JSON or other text"
    if text and all(byte >= 0x20 or byte in b"\t\r\n\f\x1b" for byte in head):
        return "plain text"
    return "of an unknown format"
