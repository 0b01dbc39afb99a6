"""A mutation fuzzer over the media intake: `python -m tests.fuzz.media --seconds 60`.

Seeds are the files of the corpus. Each is damaged at random and decoded the way the service does it, in a child
process that can be ended. It is a failure, and the input is kept, when the child dies, when an answer takes longer than
the limit, when the answer is anything but frames or a 4xx, or when the child's memory grows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from app.errors import FovealError
from app.media import pool as pool_module
from app.media.pool import CRASHED, DecodePool
from app.media.types import MediaOptions
from configs.processor import ProcessorConfig
from configs.settings import Limits
from tests.unit.media.corpus import build

LIMITS = Limits(max_pixels=4_000_000, max_frames=64, decode_timeout_s=5, decode_processes=1)
# What an answer may take beyond the limit: the pool's grace, and a machine with other work.
SLACK_S = 3.0
GROWTH_MIB = 64
LARGEST_SEED = 150_000
NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def flip(data: bytearray, rng: random.Random, other: bytes) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random, other: bytes) -> None:
    for _ in range(rng.choice((1, 1, 4, 32))):
        data[_place(data, rng)] = rng.randrange(256)


def number(data: bytearray, rng: random.Random, other: bytes) -> None:
    """A field set to a number that parsers trip over."""
    order = rng.choice("<>")
    code, mask = rng.choice((("B", 0xFF), ("H", 0xFFFF), ("I", 0xFFFFFFFF)))
    field = struct.pack(order + code, (rng.choice(NUMBERS) + rng.choice((0, 0, 1, -1))) & mask)
    at = _place(data, rng)
    data[at : at + len(field)] = field


def cut(data: bytearray, rng: random.Random, other: bytes) -> None:
    del data[rng.randrange(1, len(data) + 1) :]


def remove(data: bytearray, rng: random.Random, other: bytes) -> None:
    at = _place(data, rng)
    del data[at : at + rng.choice((1, 2, 4, 16, 188, 1000))]


def repeat(data: bytearray, rng: random.Random, other: bytes) -> None:
    at, size = _place(data, rng), rng.choice((1, 4, 16, 188, 1000))
    data[at:at] = data[at : at + size] * rng.choice((1, 2, 20))


def splice(data: bytearray, rng: random.Random, other: bytes) -> None:
    """The head of one file, the tail of another."""
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]


def graft(data: bytearray, rng: random.Random, other: bytes) -> None:
    start, at = rng.randrange(len(other)), _place(data, rng)
    part = other[start : start + rng.choice((8, 64, 512))]
    data[at : at + len(part)] = part


MUTATIONS: tuple[Callable[[bytearray, random.Random, bytes], None], ...] = (
    flip, flip, overwrite, number, number, number, cut, remove, repeat, splice, graft,
)  # fmt: skip


def _place(data: bytearray, rng: random.Random) -> int:
    """Headers are short and matter most, so half of the damage is done in the first bytes."""
    return rng.randrange(min(len(data), 200)) if rng.random() < 0.5 else rng.randrange(len(data))


def mutate(seeds: list[bytes], rng: random.Random) -> bytes:
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if data:
            rng.choice(MUTATIONS)(data, rng, rng.choice(seeds))
    return bytes(data)


def random_options(rng: random.Random) -> MediaOptions:
    options = MediaOptions(modality=rng.choice(("auto", "auto", "auto", "image", "video")), max_pixels=200_000)
    if rng.random() < 0.2:
        return replace(options, fps=rng.choice((0.1, 1.0, 25.0, 1e9)))
    if rng.random() < 0.2:
        return replace(options, num_frames=rng.choice((1, 2, 5, 64)))
    return options


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where inputs that failed are kept")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    seeds = [case.data for case in chain(*build().values()) if 0 < len(case.data) <= LARGEST_SEED]
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    memory: list[float] = []
    slowest, ended = 0.0, 0
    # Freed memory goes back at once here, so that what stays is a leak.
    pool_module.KEPT_BYTES = 0
    pool = DecodePool(ProcessorConfig(), LIMITS)
    try:
        pool.decode(seeds[0], MediaOptions())
        (pid,) = pool.pids()
        started = reported = time.monotonic()
        while (now := time.monotonic()) - started < arguments.seconds:
            data, options = mutate(seeds, rng), random_options(rng)
            failure = ""
            try:
                media = pool.decode(data, options)
                outcomes[media.modality] += 1
                if media.frames.dtype != np.uint8 or media.frames.ndim != 4:
                    failure = f"frames of {media.frames.dtype} {media.frames.shape}"
            except FovealError as e:
                outcomes[e.code] += 1
                if CRASHED in e.message:
                    failure = "the decoder crashed"
                elif e.status >= 500:
                    failure = f"answered {e.status} {e.code}"
            except Exception as e:
                failure = f"raised {type(e).__name__}: {e}"
            took = time.monotonic() - now
            slowest = max(slowest, took)
            if took > LIMITS.decode_timeout_s + SLACK_S:
                failure = failure or f"took {took:.1f} s"
            if failure:
                failures.append(failure)
                arguments.keep.mkdir(exist_ok=True)
                (arguments.keep / f"{arguments.seed}-{sum(outcomes.values())}").write_bytes(data)
                print(f"FAILURE {failure}: {options}", flush=True)
            if pool.pids() == [pid]:
                memory.append(resident_mib(pid))
            else:
                ended += 1
                pool.decode(seeds[0], MediaOptions())
                (pid,) = pool.pids()
            if now - reported > 60:
                reported = now
                print(f"{now - started:.0f} s, {sum(outcomes.values())} inputs, {memory[-1]:.0f} MiB", flush=True)
    finally:
        pool.close()
    tenth = max(len(memory) // 10, 1)
    first, last = statistics.median(memory[tenth : 2 * tenth] or memory), statistics.median(memory[-tenth:])
    if last - first > GROWTH_MIB:
        failures.append(f"memory grew from {first:.0f} to {last:.0f} MiB")
    report = {
        "seconds": arguments.seconds,
        "inputs": sum(outcomes.values()),
        "outcomes": dict(outcomes.most_common()),
        "slowest_s": round(slowest, 2),
        "decoders_replaced": ended,
        "memory_mib": {"early": round(first), "late": round(last), "peak": round(max(memory))},
        "failures": failures,
    }
    print(json.dumps(report, indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
