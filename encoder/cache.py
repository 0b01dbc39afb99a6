"""Where the project keeps files that it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`foveal` under `XDG_CACHE_HOME` or the user's `.cache`; it may not exist yet.

    Raises:
        RuntimeError: neither is set, as for a user without a home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foveal"
