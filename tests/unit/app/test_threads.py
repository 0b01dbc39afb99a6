"""Work in threads, and what is left of it when nobody waits any more."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from app.threads import in_thread


def test_values_and_errors_come_back() -> None:
    def fail() -> None:
        raise RecursionError("deep")

    async def run() -> None:
        with ThreadPoolExecutor(1) as threads:
            assert await in_thread(threading.get_ident, threads) != threading.get_ident()
            assert await in_thread(partial(divmod, 7, 2)) == (3, 1)
            with pytest.raises(RecursionError, match="deep"):
                await in_thread(fail, threads)

    asyncio.run(run())


def test_work_that_is_cancelled_before_it_begins_holds_nothing() -> None:
    async def run() -> None:
        gate, ran = threading.Event(), list[int]()
        with ThreadPoolExecutor(1) as threads:
            busy = asyncio.create_task(in_thread(gate.wait, threads))
            body = np.zeros(1 << 20, np.uint8)
            gone = weakref.ref(body)
            tasks = [asyncio.create_task(in_thread(partial(ran.append, body[i]), threads)) for i in range(3)]
            tasks.append(asyncio.create_task(in_thread(partial(np.sum, body), threads)))
            await asyncio.sleep(0)
            del body
            assert gone() is not None
            while tasks:
                tasks[-1].cancel()
                await asyncio.wait([tasks.pop()])
            gc.collect()
            lost = gone() is None
            gate.set()
            assert lost  # before the executor's only thread was free
            assert await busy is True
            assert await in_thread(partial(divmod, 7, 2), threads) == (3, 1)
        assert ran == []

    asyncio.run(run())
