"""What a process imports is memory that each of many ingress replicas has for itself, and seconds of its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", ["app.ingress", "app.middleware"])
def test_ingress_and_proxy_do_without_torch_and_codecs(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'av', 'PIL'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
