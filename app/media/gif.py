"""GIF as it is shown: frames composed by their disposal over a transparent canvas (GIF89a, W3C copy of the 1990 text).

Pillow decodes each frame by itself. Its own composition is not used: it paints what a frame of an opaque animation
leaves behind in a palette colour where every viewer leaves it clear, and lets a frame enlarge the canvas.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from app.media.deadline import Deadline
from app.media.image import check_pixels
from app.media.library import library_call, undecodable

_EXTENSION, _IMAGE, _GRAPHIC_CONTROL = 0x21, 0x2C, 0xF9
_BACKGROUND, _PREVIOUS = 2, 3


@dataclass(frozen=True)
class _Frame:
    """Where one frame goes and the bytes of a GIF that holds it alone."""

    left: int
    top: int
    width: int
    height: int
    delay_ms: int
    disposal: int
    alone: bytes


class GifAnimation:
    """A GIF of one frame or more.

    Raises:
        FovealError: `undecodable_media` when it is cut short or has no frame; `too_many_pixels`.
    """

    def __init__(self, data: bytes, max_pixels: int) -> None:
        self._frames: list[_Frame] = []
        try:
            self._parse(data, max_pixels)
        except (IndexError, struct.error):
            raise undecodable("GIF", "it ends inside a block") from None
        if not self._frames:
            raise undecodable("GIF", "it has no frame")

    def __len__(self) -> int:
        return len(self._frames)

    def delays(self, deadline: Deadline) -> list[int]:
        """Milliseconds that each frame is shown."""
        return [frame.delay_ms for frame in self._frames]

    def frames(self, deadline: Deadline) -> Iterator[Image.Image]:
        """The canvas as each frame leaves it, RGBA; one image that changes.

        Raises:
            FovealError: `undecodable_media`; `decode_timeout`.
        """
        canvas = Image.new("RGBA", (self.width, self.height))
        for frame in self._frames:
            deadline.check()
            box = (frame.left, frame.top, frame.left + frame.width, frame.top + frame.height)
            with library_call("GIF"):
                before = canvas.crop(box) if frame.disposal == _PREVIOUS else None
                patch = Image.open(io.BytesIO(frame.alone), formats=("GIF",)).convert("RGBA")
                canvas.paste(patch, box, mask=patch.getchannel("A"))
            yield canvas
            if before is not None:
                canvas.paste(before, box)
            elif frame.disposal == _BACKGROUND:
                canvas.paste((0, 0, 0, 0), box)

    def _parse(self, data: bytes, max_pixels: int) -> None:
        self.width, self.height, flags = struct.unpack("<HHB", data[6:11])
        check_pixels(self.width, self.height, max_pixels)
        if not self.width or not self.height:
            raise undecodable("GIF", "its canvas has no size")
        at = 13 + _table_size(flags)
        table, packed = data[13:at], data[10:11]
        control = b"\0\0\0\0"
        while at < len(data):
            kind = data[at]
            if kind == _EXTENSION:
                end = _skip_blocks(data, at + 2)
                if data[at + 1] == _GRAPHIC_CONTROL and data[at + 2] == 4:
                    control = data[at + 3 : at + 7]
                at = end
            elif kind == _IMAGE:
                left, top, width, height, local = struct.unpack("<HHHHB", data[at + 1 : at + 10])
                end = _skip_blocks(data, at + 10 + _table_size(local) + 1)
                check_pixels(width, height, max_pixels)
                delay = struct.unpack("<H", control[1:3])[0]
                size = struct.pack("<HH", width, height)
                alone = b"".join((
                    b"GIF89a", size, packed, b"\0\0", table,
                    b"\x21\xf9\x04", bytes([control[0] & 1]), b"\0\0", control[3:], b"\0",
                    b",\0\0\0\0", size, data[at + 9 : end], b";",
                ))  # fmt: skip
                # A delay of 0 asks for as fast as possible; viewers take 100 ms.
                shown = delay * 10 or 100
                self._frames.append(_Frame(left, top, width, height, shown, control[0] >> 2 & 7, alone))
                control, at = b"\0\0\0\0", end
            else:
                return


def _table_size(flags: int) -> int:
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_blocks(data: bytes, at: int) -> int:
    """The offset after a chain of sub-blocks and its terminator."""
    while data[at]:
        at += data[at] + 1
    return at + 1
