"""Embeddings in a folder that their readers share: `<root>/<hash>/encoder_cache.safetensors`, tensor `ec_cache`.

That is the layout that vLLM's example encoder-cache connector reads (`ECExampleConnector`,
vllm/distributed/ec_transfer/ec_connector/example_connector.py). What a repeated item is answered with lies in the
file's `__metadata__`, so nothing but files is shared: by processes of one host, or of several over NFS.

    put: reserve room, evicting ── write beside ── rename into place        exclusive lock for the first and the last
    get: touch, read the header                                             shared lock

A file's modification time is that of its last use. The lock file holds the bytes of all files as a number, so that a
write looks at the whole folder only to find what to evict, and then remembers it in order.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import heapq
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from app.errors import FovealError
from app.formats.safetensors import Tensor, pack
from app.formats.types import EncodedItem
from app.media.types import MediaOptions
from app.metrics import STORE_BYTES, STORE_EVICTIONS, STORE_ITEMS

FILE, TENSOR = "encoder_cache.safetensors", "ec_cache"
_RECORD = "foveal"  # key of what `get` answers with in the file's metadata
_VERSION = 1  # of the record, and of what the hash covers
_LOCK, _TEMP = ".lock", ".tmp-"
_HASH = re.compile(r"[0-9a-f]{64}")
_FACTS = ("modality", "grid_thw", "shape", "dtype", "pool", "execution", "reason", "budget")
_SIZES = ("num_tokens", "num_frames", "width", "height")
_MAX_HEADER = 1 << 20
# A folder that has just been looked at and had no room is not looked at again for every request.
_SCAN_HOLDS_S = 1.0


def item_hash(
    media: Sequence[bytes | memoryview],
    options: MediaOptions,
    *,
    frames: bool,
    checkpoint: str,
    compute_dtype: str,
    dtype: str,
    pooling: str,
) -> str:
    """The name of an item's embeddings: 64 lower-case hex digits, different for whatever makes the result different.

    Args:
        media: the file, or the stills of a list of frames in their order, as `frames` says.
        options: with the modality that the item's JSON part states, if it states one.
        checkpoint: `encoder.checkpoint.digest_checkpoint` of what encodes.
        dtype: of the embeddings as stored.
    """
    told = {
        "version": _VERSION,
        "checkpoint": checkpoint,
        "compute_dtype": compute_dtype,
        "dtype": dtype,
        "pooling": pooling,
        "options": asdict(options),
        "frames": frames,
        "sizes": [len(part) for part in media],
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for part in media:
        digest.update(part)
    return digest.hexdigest()


class _File(NamedTuple):
    """A file as a scan found it; they sort by their last use. `name` is its hash."""

    last_use_ns: int
    name: str
    size: int


class Store:
    """One folder. Every method may be called from any thread, and beside other processes' stores of the same folder.

    Files and folders that are not named as above are neither counted nor touched.

    Args:
        checkpoint: the digest that the names of its files cover.

    Raises:
        OSError: the folder cannot be made, written or locked.
    """

    def __init__(self, root: Path, max_bytes: int, lease_s: float, checkpoint: str = "") -> None:
        self._root, self._max_bytes, self._lease_s, self.checkpoint = root, max_bytes, lease_s, checkpoint
        # A heap of what the last scan found. What has changed or come since was used since.
        self._idle: list[_File] = []
        self._scanned = -math.inf
        root.mkdir(parents=True, exist_ok=True)
        with self._lock(fcntl.LOCK_EX) as ledger:
            # Whatever ended badly before this process is put right.
            self._set_used(ledger, self._scan())

    def get(self, name: str, index: int) -> EncodedItem | None:
        """The stored item without its embeddings, its lease begun anew; None if it is not here, or not whole."""
        with self._lock(fcntl.LOCK_SH):
            item = _read(self._path(name), name, index)
            if item is not None:
                os.utime(self._path(name))
        if item is not None:
            STORE_ITEMS.record(1, "hit")
        return item

    def put(self, name: str, item: EncodedItem) -> EncodedItem:
        """Stores the item's embeddings unless another writer was first. The item as `get` would give it, but "new".

        Raises:
            FovealError: `overloaded`, there is no room and every file is inside its lease.
        """
        assert item.embeddings is not None
        record = {key: getattr(item, key) for key in (*_FACTS, *_SIZES)}
        record["timestamps"] = None if item.timestamps is None else item.timestamps.tolist()
        tensors: list[Tensor] = [(TENSOR, item.dtype, item.embeddings)]
        body = pack(tensors, {_RECORD: json.dumps(record)})
        try:
            with self._reserved(body.length) as file:
                for piece in body.pieces:
                    file.write(piece)
                file.flush()
                # A rename may reach the disk before what was written does.
                os.fsync(file.fileno())
                self._publish(file, name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            STORE_ITEMS.record(1, "refused")
            raise FovealError("overloaded", "the file system of the store is full", None, 5) from None
        except FovealError:
            STORE_ITEMS.record(1, "refused")
            raise
        STORE_ITEMS.record(1, "new")
        return replace(item, embeddings=None, hash=name, stored="new")

    def _path(self, name: str) -> Path:
        return self._root / name / FILE

    @contextmanager
    def _lock(self, mode: int) -> Iterator[int]:
        """The open lock file, which is also the ledger. Each use opens it, so that threads exclude each other too."""
        ledger = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(ledger, mode)
            yield ledger
        finally:
            os.close(ledger)

    def _used(self, ledger: int) -> int:
        """Bytes of all files, the ones being written included. Too many after a crash or a deletion by hand."""
        text = os.pread(ledger, 20, 0)
        return int(text) if text.isdigit() else self._scan()

    def _set_used(self, ledger: int, used: int) -> None:
        os.pwrite(ledger, b"%020d" % used, 0)
        STORE_BYTES.record(used)

    @contextmanager
    def _reserved(self, size: int) -> Iterator[BufferedWriter]:
        """A new file that already counts as `size` bytes; it is removed unless it was published.

        Its own lock tells a scan that its writer is alive.
        """
        with self._lock(fcntl.LOCK_EX) as ledger:
            used = self._make_room(ledger, size)
            file = (self._root / f"{_TEMP}{uuid4().hex}").open("xb")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)  # a scan counts what it sees
            self._set_used(ledger, used + size)
        try:
            yield file
        finally:
            with file:
                if os.path.exists(file.name):
                    with self._lock(fcntl.LOCK_EX) as ledger:
                        os.unlink(file.name)
                        self._set_used(ledger, self._used(ledger) - size)

    def _publish(self, file: BufferedWriter, name: str) -> None:
        path = self._path(name)
        with self._lock(fcntl.LOCK_EX) as ledger:
            path.parent.mkdir(exist_ok=True)
            if _read(path, name, 0) is not None:
                os.utime(path)  # The other writer's is as good, and may be being read.
                return
            if path.exists():
                self._set_used(ledger, self._used(ledger) - path.stat().st_size)
            os.utime(file.fileno())
            os.replace(file.name, path)

    def _make_room(self, ledger: int, size: int) -> int:
        """Removes the least recently used files until `size` bytes more fit; the bytes then used."""
        used = self._used(ledger)
        scanned = time.monotonic() - self._scanned < min(_SCAN_HOLDS_S, self._lease_s)
        while used + size > self._max_bytes:
            oldest = self._oldest()
            idle_s = -math.inf if oldest is None else time.time() - oldest.last_use_ns / 1e9
            if oldest is not None and idle_s >= self._lease_s:
                self._remove(oldest)
                used -= oldest.size
            elif not scanned:
                used, scanned = self._scan(), True
            else:
                self._set_used(ledger, used)
                left_s = self._lease_s - max(idle_s, 0.0)
                message = f"the store has no room, and every file was used within store.lease_s ({self._lease_s:g} s)"
                raise FovealError("overloaded", message, None, max(1, math.ceil(left_s)))
        return used

    def _oldest(self) -> _File | None:
        """The least recently used file, if the last scan still tells."""
        while self._idle:
            oldest = self._idle[0]
            with suppress(FileNotFoundError):
                if self._path(oldest.name).stat().st_mtime_ns == oldest.last_use_ns:
                    return oldest
            heapq.heappop(self._idle)
        return None

    def _remove(self, file: _File) -> None:
        path = self._path(file.name)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # A reader that asks for a file makes its folder anew.
            path.parent.rmdir()
        STORE_EVICTIONS.record(1)

    def _scan(self) -> int:
        """Looks at every file, and removes what dead writers left; the bytes of all."""
        used = 0
        self._idle.clear()
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.startswith(_TEMP):
                    used += _temp_bytes(entry.path)
                elif _HASH.fullmatch(entry.name):
                    try:
                        info = self._path(entry.name).stat()
                    except FileNotFoundError:
                        with suppress(OSError):
                            if time.time() - entry.stat().st_mtime >= self._lease_s:
                                os.rmdir(entry.path)
                        continue
                    used += info.st_size
                    self._idle.append(_File(info.st_mtime_ns, entry.name, info.st_size))
        heapq.heapify(self._idle)
        self._scanned = time.monotonic()
        return used


def _read(path: Path, name: str, index: int) -> EncodedItem | None:
    """The item that a whole file of ours tells of, else None."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER:
                return None
            header = json.loads(file.read(length))
            record: dict[str, Any] = json.loads(header["__metadata__"][_RECORD])
            if os.fstat(file.fileno()).st_size != 8 + length + header[TENSOR]["data_offsets"][1]:
                return None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # Another program's file, or one that was cut short.
        return None
    stamps = record.pop("timestamps")
    record |= {"grid_thw": tuple(record["grid_thw"]), "shape": tuple(record["shape"])}
    record["timestamps"] = None if stamps is None else np.array(stamps, np.float32)
    return EncodedItem(index=index, embeddings=None, hash=name, stored="hit", **record)


def _temp_bytes(path: str) -> int:
    """Bytes of a file that is being written; 0 if its writer is dead, and then it is removed."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.fstat(file.fileno()).st_size
        os.unlink(path)
    return 0
