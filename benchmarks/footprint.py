"""Prints what the service costs on this machine before any load: seconds to start, bytes of memory by process.

python -m benchmarks.footprint
"""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import httpx
from PIL import Image

from benchmarks.service import Service


def main() -> None:
    with Service() as service:
        picture = io.BytesIO()
        Image.radial_gradient("L").convert("RGB").save(picture, "PNG")
        started = time.monotonic()
        httpx.post(f"{service.url}/v1/encode", content=picture.getvalue(), timeout=60).raise_for_status()
        first_request = time.monotonic() - started
        sizes = service.pss_bytes()
        by_name: dict[str, float] = {}
        for pid, size in sizes.items():
            name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split(" --")[0].strip()[-60:]
            by_name[name] = round(by_name.get(name, 0) + size / 2**20, 1)
    report = {
        "cores": len(os.sched_getaffinity(0)),
        "start_seconds": round(service.start_seconds, 1),
        "first_request_seconds": round(first_request, 3),
        "pss_gib": round(sum(sizes.values()) / 2**30, 2),
        "pss_mib_by_process": dict(sorted(by_name.items(), key=lambda item: -item[1])),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
