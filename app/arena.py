"""The shared memory of an ingress replica: pixels that encoder replicas read, embeddings that they write.

A file without a name, as large as could be needed and empty: the system gives it a page when the page is first written.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from uuid import uuid4

import numpy as np

ARENA_BYTES = 8 << 30
# What stays in any case. A page that is there already is written ten times as fast as one that the system must find and
# clear first.
KEPT_BYTES = 64 << 20
_PAGE = 4096


class FreeList:
    """First fit over `size` bytes, in pages. Low places are preferred, so that the high ones can be given back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.holes = [(0, size)]  # start and size, ascending, never adjacent

    def take(self, size: int) -> int | None:
        """Where `size` bytes are free; None if nowhere."""
        wanted = _in_pages(size)
        for i, (start, room) in enumerate(self.holes):
            if room >= wanted:
                self.holes[i : i + 1] = [(start + wanted, room - wanted)] if room > wanted else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """`start` and `size` as of a `take`."""
        end = start + _in_pages(size)
        after = next((i for i, (hole, _) in enumerate(self.holes) if hole > start), len(self.holes))
        first, last = after, after
        if after < len(self.holes) and self.holes[after][0] == end:
            end, last = end + self.holes[after][1], after + 1
        if after and sum(self.holes[after - 1]) == start:
            start, first = self.holes[after - 1][0], after - 1
        self.holes[first:last] = [(start, end - start)]


def _in_pages(size: int) -> int:
    return max(-(-size // _PAGE), 1) * _PAGE


class Arena:
    """Belongs to one event loop; arrays may be dropped anywhere."""

    def __init__(self, size: int = ARENA_BYTES) -> None:
        self.name = uuid4().hex
        self.fd = os.memfd_create("foveal-arena")
        os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)
        self._base: int = np.frombuffer(self._memory, np.uint8, 1).ctypes.data
        self._free = FreeList(size)
        self._dropped: deque[tuple[int, int]] = deque()
        self._highest = 0  # past it there is no page
        self._reached = 0  # past it nothing has been taken since the last trim

    def take(self, size: int) -> np.ndarray | None:
        """uint8 [size], contents undefined, free again once no array shows it any more; None if there is no room."""
        self._collect()
        start = self._free.take(size)
        if start is None:
            return None
        array = np.frombuffer(self._memory, np.uint8, size, start)
        # Views of it keep this very object: numpy does not look through an array to what is no array.
        weakref.finalize(array, self._dropped.append, (start, size)).atexit = False
        self._reached = max(self._reached, start + _in_pages(size))
        self._highest = max(self._highest, self._reached)
        return array

    def start_of(self, array: np.ndarray) -> int | None:
        """Where `array` begins; None if it is not from here."""
        start = array.ctypes.data - self._base
        return start if 0 <= start < self._free.size and array.flags.c_contiguous else None

    def trim(self) -> None:
        """Gives the system back what is free, but for the first `KEPT_BYTES` and as much as was reached since the last
        trim: under a steady load the next requests find their pages."""
        self._collect()
        kept = max(KEPT_BYTES, self._reached)
        for start, room in self._free.holes:
            first, end = max(start, kept), min(start + room, self._highest)
            if first < end:
                self._memory.madvise(mmap.MADV_REMOVE, first, end - first)
        last, room = self._free.holes[-1] if self._free.holes else (self._free.size, 0)
        self._highest = min(self._highest, max(last if last + room == self._free.size else self._free.size, kept))
        self._reached = 0

    @property
    def grown(self) -> bool:
        """Whether there may be pages past `KEPT_BYTES`."""
        return self._highest > KEPT_BYTES

    @property
    def in_use(self) -> int:
        """Bytes, in pages."""
        self._collect()
        return self._free.size - sum(room for _, room in self._free.holes)

    def _collect(self) -> None:
        while self._dropped:
            self._free.give_back(*self._dropped.popleft())
