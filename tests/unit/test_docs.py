"""The tables in the documentation are what the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.tables import FILES, filled


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_tables_are_current(path: Path) -> None:
    assert path.read_text() == filled(path), "run `python -m scripts.tables`"
