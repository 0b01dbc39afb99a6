"""`Authorization: Bearer KEY` (RFC 6750) against the keys of a file."""

from __future__ import annotations

import hmac
import logging
import re
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import FovealError

MIN_LENGTH = 22  # characters of a key: 128 random bits in base64
OPEN_PATH = "/health"

_KEY = re.compile(rf"[A-Za-z0-9\-._~+/]{{{MIN_LENGTH},}}=*")
_HASHED = re.compile(r"sha256:([0-9A-Fa-f]{64})")
_log = logging.getLogger("foveal")


class KeyFile:
    """The keys of a file, read again when it changes. A changed file that cannot be used leaves the former keys valid.

    Raises:
        ValueError: the file cannot be read, has no key, or has a line that is no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stat()
        self._digests = read_digests(path)

    def accepts(self, key: str) -> bool:
        """Whether `key` is one of the file's, in a time that does not tell which one or how much of it is right."""
        self._refresh()
        digest = sha256(key.encode()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def _refresh(self) -> None:
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = read_digests(self._path)
        except ValueError as error:
            _log.error("the former API keys stay valid: %s", error)
        else:
            _log.warning("%d API keys are valid from now on", len(self._digests))

    def _stat(self) -> tuple[int, int, int] | None:
        """Changes with the file, also with the target of a link, as Kubernetes swaps a mounted secret."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_digests(path: Path) -> list[bytes]:
    """SHA-256 of each key. A line is a key, `sha256:` and the hex digest of one, blank, or a comment after `#`.

    Raises:
        ValueError: names the file and the line, and never tells what is on it.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ValueError(f"auth.api_keys_file {path} cannot be read: {reason}") from None
    digests = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if hashed := _HASHED.fullmatch(text):
            digests.append(bytes.fromhex(hashed[1]))
        elif _KEY.fullmatch(text):
            digests.append(sha256(text.encode()).digest())
        elif text:
            raise ValueError(
                f"auth.api_keys_file {path}, line {number}: a key is {MIN_LENGTH} or more of A-Z a-z 0-9 - . _ ~ + /"
            )
    if not digests:
        raise ValueError(f"auth.api_keys_file {path} has no key")
    return digests


class Auth:
    """Lets only requests with a key of the file pass, and those for /health."""

    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) != OPEN_PATH:
            given = Headers(scope=scope).getlist("authorization")
            scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
            if scheme.lower() != "bearer" or not self._keys.accepts(key.strip()):
                raise FovealError("unauthorized", "`Authorization: Bearer KEY` with a valid key is needed")
        await self._app(scope, receive, send)
