"""Photos per second from JPEG bytes to uint8 frames, beside transformers' own processor in the same run.

    python -m benchmarks.media [--seconds 5] [--processes 2] [--json FILE]

Each runs in the same number of processes with one torch thread each. `reference` opens the bytes with Pillow and calls
the Qwen3-VL image processor (torchvision backend); `foveal` is `app.media.decode.decode` in processes like those;
`foveal pool` is the same through `DecodePool`, as the ingress uses it, with what it costs to pass bytes and frames.
`only JPEG` is Pillow's decoding alone, which bounds all three. Needs torchvision.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Photos per second over all processes, and CPU seconds a photo: the second holds on a machine with other work too.
Rate = tuple[float, float]
PHOTOS = {"224x224": (224, 224), "1024x1024": (1024, 1024), "4000x3000 (12 MP)": (3000, 4000)}


def photo(height: int, width: int) -> bytes:
    """A JPEG with the detail of a photograph: noise at three scales, quality 90."""
    rng = np.random.default_rng(0)
    layers = []
    for scale, strength in ((64, 0.6), (8, 0.3), (1, 0.1)):
        small = rng.integers(0, 256, (height // scale + 1, width // scale + 1, 3), dtype=np.uint8)
        layer = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        layers.append(np.asarray(layer, dtype=np.float32) * strength)
    out = io.BytesIO()
    Image.fromarray(np.clip(sum(layers), 0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def reference() -> Callable[[bytes], Any]:
    import tests.conftest  # noqa: F401  (makes torchvision importable)
    from tests.unit.media.reference import image_processor

    processor = image_processor()
    return lambda data: processor(Image.open(io.BytesIO(data)), return_tensors="pt")


def foveal() -> Callable[[bytes], Any]:
    from app.media.decode import decode
    from app.media.types import MediaOptions
    from configs.processor import ProcessorConfig
    from configs.settings import Limits

    options, processor, limits = MediaOptions(), ProcessorConfig(), Limits()
    return lambda data: decode(data, options, processor, limits)


def only_jpeg() -> Callable[[bytes], Any]:
    return lambda data: Image.open(io.BytesIO(data)).load()


MAKERS: dict[str, Callable[[], Callable[[bytes], Any]]] = {
    "reference": reference,
    "only JPEG": only_jpeg,
    "foveal": foveal,
}


def worker(make: Callable[[], Callable[[bytes], Any]], data: bytes, seconds: float, barrier: Any, counts: Any) -> None:
    import torch

    torch.set_num_threads(1)
    run = make()
    run(data)
    barrier.wait()
    started, cpu, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - started < seconds:
        run(data)
        done += 1
    counts.put((done / (time.perf_counter() - started), (time.process_time() - cpu) / done))


def in_processes(make: Callable[[], Callable[[bytes], Any]], data: bytes, seconds: float, processes: int) -> Rate:
    context = multiprocessing.get_context("spawn")
    barrier, counts = context.Barrier(processes), context.Queue()
    arguments = (make, data, seconds, barrier, counts)
    children = [context.Process(target=worker, args=arguments) for _ in range(processes)]
    for child in children:
        child.start()
    rates = [counts.get() for _ in children]
    for child in children:
        child.join()
    return sum(rate for rate, _ in rates), statistics.mean(cpu for _, cpu in rates)


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of this process and of `pids`."""
    ticks = [sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[11:13])) for pid in pids]
    return time.process_time() + sum(ticks) / os.sysconf("SC_CLK_TCK")


def through_pool(data: bytes, seconds: float, processes: int) -> Rate:
    from app.media.pool import DecodePool
    from app.media.types import MediaOptions
    from configs.processor import ProcessorConfig
    from configs.settings import Limits

    pool = DecodePool(ProcessorConfig(), Limits(decode_processes=processes))

    def one(end: float) -> int:
        done = 0
        while time.perf_counter() < end:
            pool.decode(data, MediaOptions())
            done += 1
        return done

    with ThreadPoolExecutor(processes) as threads:
        list(threads.map(lambda _: pool.decode(data, MediaOptions()), range(4 * processes)))
        pids = pool.pids()
        started, cpu = time.perf_counter(), cpu_seconds(pids)
        done = sum(threads.map(one, [started + seconds] * processes))
        rate = done / (time.perf_counter() - started), (cpu_seconds(pids) - cpu) / done
    pool.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for name, (height, width) in PHOTOS.items():
        data = photo(height, width)
        rates = {
            label: in_processes(make, data, arguments.seconds, arguments.processes) for label, make in MAKERS.items()
        }
        rates["foveal pool"] = through_pool(data, arguments.seconds, arguments.processes)
        row: dict[str, Any] = {"photo": name, "bytes": len(data)}
        row |= {label: {"per_s": rate, "cpu_ms": cpu * 1000} for label, (rate, cpu) in rates.items()}
        row["rate_over_reference"] = rates["foveal pool"][0] / rates["reference"][0]
        row["cpu_of_reference_over_foveal"] = rates["reference"][1] / rates["foveal pool"][1]
        rows.append(row)
    labels = [*MAKERS, "foveal pool"]
    print("| photo | " + " | ".join(f"{label}: 1/s | CPU ms" for label in labels) + " | rate | CPU |")
    print("| --- " * (2 * len(labels) + 3) + "|")
    for row in rows:
        cells = " | ".join(f"{row[label]['per_s']:.1f} | {row[label]['cpu_ms']:.1f}" for label in labels)
        ratios = f"{row['rate_over_reference']:.1f}x | {row['cpu_of_reference_over_foveal']:.1f}x"
        print(f"| {row['photo']} | {cells} | {ratios} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"processes": arguments.processes, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
