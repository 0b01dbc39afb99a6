"""A time limit that decoding checks between the library calls it makes."""

from __future__ import annotations

import io
import time

from app.errors import FovealError


class Deadline:
    """Ends a decode that has run for `seconds`.

    A call into a codec cannot be interrupted from here; what bounds that one is the process the call runs in.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def check(self) -> None:
        """Raises:
        FovealError: `decode_timeout` when the time is over.
        """
        if time.monotonic() > self._end:
            raise timeout_error(self.seconds)


def timeout_error(seconds: float) -> FovealError:
    return FovealError("decode_timeout", f"decoding took longer than limits.decode_timeout_s = {seconds:g} s")


class WatchedBytes(io.BytesIO):
    """Bytes as a file whose every read checks the deadline: decoders that read as they go can then be stopped."""

    def __init__(self, data: bytes | memoryview, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1) -> bytes:
        self._deadline.check()
        return super().read(size)
