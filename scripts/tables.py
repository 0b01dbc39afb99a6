"""Writes the tables of README.md, docs/errors.md and docs/metrics.md out of the code: `python -m scripts.tables`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from app.errors import CODES
from app.metrics import METRICS
from configs.settings import Settings

ROOT = Path(__file__).parents[1]


def settings_rows(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted name, default, description) of every setting."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from settings_rows(value, f"{prefix}{name}.")
        else:
            yield f"`{prefix}{name}`", f"`{_shown(value)}`", field.description or ""


def _shown(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, tuple)
        else str(list(value))
    )


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def filled(path: Path) -> str:
    """The file's text with its marked tables as the code has them now."""
    tables = {
        "settings": lambda: table(("setting", "default", ""), settings_rows(Settings())),
        "codes": lambda: table(
            ("code", "status", "when"), ((f"`{code}`", str(status), when) for code, (status, when) in CODES.items())
        ),
        "metrics": lambda: table(
            ("name", "type", "tags", "meaning"),
            ((f"`{m.name}`", m.kind, ", ".join(f"`{tag}`" for tag in m.tags), m.meaning) for m in METRICS),
        ),
    }

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n{tables[name]()}\n<!-- /{name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", fill, path.read_text(), flags=re.DOTALL)


FILES = (ROOT / "README.md", ROOT / "docs" / "errors.md", ROOT / "docs" / "metrics.md")

if __name__ == "__main__":
    for file in FILES:
        file.write_text(filled(file))
