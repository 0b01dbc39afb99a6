"""Implementations that stand in for those of a GPU where only the choice among them is looked at."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest


class Stub:
    def __init__(self, *_: Any) -> None:
        pass


# In place of a class: its module raises ImportError.
UNIMPORTABLE = None


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: type | None) -> None:
    module: Any = None if UNIMPORTABLE in contents.values() else SimpleNamespace(**contents)
    monkeypatch.setitem(sys.modules, name, module)


class Hopper(Stub):
    pass


class Broken(Stub):
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no such instruction")


class Portable(Stub):
    """What runs on any GPU."""
