"""The boundary to Pillow and FFmpeg: whatever they raise over some bytes means that the bytes are bad."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import av
from PIL import UnidentifiedImageError

from app.errors import FovealError

_log = logging.getLogger(__name__)


@contextmanager
def library_call(name: str) -> Iterator[None]:
    """Turns a decoder's exception into a `FovealError`. Only calls into the libraries belong inside.

    Raises:
        FovealError: `undecodable_media`; `too_many_pixels` when the decoder ran out of the memory it may use.
    """
    try:
        yield
    except FovealError:
        raise
    except MemoryError:
        raise FovealError("too_many_pixels", f"decoding this {name} needs more memory than a decoder may use") from None
    except (OSError, SyntaxError, EOFError, ValueError, av.error.FFmpegError) as e:
        raise undecodable(name, e) from e
    except Exception as e:
        # Pillow's plugins let parsing accidents (IndexError, KeyError, TypeError, struct.error...) escape; what those
        # say is of no use to a client.
        _log.info("decoder raised %s on a %s", type(e).__name__, name)
        raise undecodable(name, "its structure cannot be followed") from e


def undecodable(name: str, reason: object) -> FovealError:
    if isinstance(reason, UnidentifiedImageError):
        reason = "its header cannot be read"
    elif isinstance(reason, av.error.FFmpegError):
        reason = reason.strerror
    detail = " ".join(str(reason).split())[:200]
    return FovealError("undecodable_media", f"the {name} is damaged or cut short: {detail}")
