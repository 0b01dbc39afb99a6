"""Implementations that stand in for those of a GPU where only the choice among them is looked at."""

from __future__ import annotations

from typing import Any


class Stub:
    def __init__(self, *_: Any) -> None:
        pass


class Hopper(Stub):
    pass


class Broken(Stub):
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no such instruction")


class Unsearchable(Stub):
    def __init__(self, *_: Any) -> None:
        raise PermissionError("~/.cache")


class Portable(Stub):
    """What runs on any GPU."""
