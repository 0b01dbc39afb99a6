"""Implementations that stand in for those of a GPU where only the choice among them is looked at."""

from __future__ import annotations

from typing import Any


class Stub:
    def __init__(self, *_: Any) -> None:
        pass


# In place of a class: its module raises ImportError.
UNIMPORTABLE = None


class Hopper(Stub):
    pass


class Broken(Stub):
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no such instruction")


class Portable(Stub):
    """What runs on any GPU."""
