"""Work that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], executor: Executor | None = None) -> T:
    """What `work` returns in a thread of `executor`; None: of the loop's own.

    Cancelled before it begins, it lets go of what `work` holds: an executor keeps what it has queued until a thread is
    free, by when the request is long out of all accounts of what is held.
    """
    held = [work]
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, lambda: held.pop()())
    except asyncio.CancelledError:
        held.clear()
        raise
