"""Keys in files that come, change and break, and requests with and without them."""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from app.auth import MIN_LENGTH, Auth, KeyFile
from app.middleware import Envelope
from tests.unit.app.test_middleware import call

FIRST = "first-key-with-enough-characters"
SECOND = "c2Vjb25kLWtleS1pbi1iYXNlNjQ+/w=="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def write(file: Path, text: str) -> None:
    """As an operator should: a new file in the place of the old one."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def test_each_line_is_a_key(file: Path) -> None:
    write(file, f"# keys\n\n  {FIRST}  # of the first client\n{SECOND}\n")
    keys = KeyFile(file)
    assert keys.accepts(FIRST)
    assert keys.accepts(SECOND)
    for wrong in ("", FIRST[:-1], FIRST + "x", FIRST.upper(), "# keys", "é"):
        assert not keys.accepts(wrong)


def test_a_line_may_be_a_digest(file: Path) -> None:
    write(file, f"sha256:{sha256(FIRST.encode()).hexdigest()}\n")
    keys = KeyFile(file)
    assert keys.accepts(FIRST)
    assert not keys.accepts(file.read_text().strip())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("", "no key"),
        ("# none\n\n", "no key"),
        (f"{FIRST}\n{'k' * (MIN_LENGTH - 1)}\n", "line 2"),
        (f"{FIRST} {SECOND}\n", "line 1"),
        ("sha256:abc\n", "line 1"),
        ("schlüssel-mit-umlauten-und-länge\n", "ASCII"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(file: Path, text: str | None, says: str) -> None:
    if text is not None:
        write(file, text)
    with pytest.raises(ValueError, match=says) as caught:
        KeyFile(file)
    assert str(file) in str(caught.value)
    assert "key-with" not in str(caught.value)
    assert "kkk" not in str(caught.value)


def test_keys_are_rotated_without_a_restart(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, FIRST)
    keys = KeyFile(file)
    write(file, f"{FIRST}\n{SECOND}")
    assert keys.accepts(SECOND)
    write(file, SECOND)
    assert keys.accepts(SECOND)
    assert not keys.accepts(FIRST)
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        write(file, "short")
        assert [keys.accepts(SECOND) for _ in range(3)] == [True] * 3
        file.unlink()
        assert [keys.accepts(SECOND) for _ in range(3)] == [True] * 3
    assert len(caplog.records) == 2, "each broken state is told once"
    assert "line 1" in caplog.text
    assert SECOND not in caplog.text
    write(file, FIRST)
    assert keys.accepts(FIRST)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("authorization", f"Bearer {FIRST}")], 200),
        ([("authorization", f"bearer  {FIRST}")], 200),
        ([("authorization", FIRST)], 401),
        ([("authorization", f"Basic {FIRST}")], 401),
        ([("authorization", "Bearer")], 401),
        ([("authorization", f"Bearer {SECOND}")], 401),
        ([("authorization", f"Bearer {FIRST}")] * 2, 401),
        ([("authorization", b"Bearer \xff\xfe")], 401),
        ([("x-api-key", FIRST)], 401),
    ],
)
def test_requests(file: Path, headers: list[tuple[str, str]], status: int) -> None:
    write(file, FIRST)
    answer = call(Envelope(Auth(PlainTextResponse("in"), KeyFile(file))), headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "unauthorized"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert FIRST not in answer.text


@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/health/", 401), ("/v1/pools", 401), ("//health", 401)]
)
def test_only_health_is_open(file: Path, path: str, status: int) -> None:
    write(file, FIRST)
    assert call(Envelope(Auth(PlainTextResponse("in"), KeyFile(file))), path=path).status_code == status
