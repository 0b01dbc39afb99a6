"""The encoder stands alone: nothing of Ray, HTTP or the service in it. Neither transformers nor torch's compiler, which
take a second to import and 70 MB, is needed to serve a checkpoint."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOREIGN = {"ray", "fastapi", "starlette", "pydantic", "app", "deployments", "configs"}
MODULES = sorted((ROOT / "encoder").glob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=[p.stem for p in MODULES])
def test_no_module_imports_the_service(path: Path) -> None:
    assert not imported(path) & FOREIGN


@pytest.mark.timeout(600)
def test_loading_and_encoding_imports_nothing_more(tiny_folder: Path) -> None:
    program = f"""
import json, sys
from pathlib import Path
import numpy as np
from encoder.checkpoint import resolve_checkpoint
from encoder.defs import EncodeRequest
from encoder.runner import EncoderRunner
runner = EncoderRunner.from_checkpoint(
    resolve_checkpoint({str(tiny_folder)!r}), device="cpu", token_budgets={{"image": [16]}}, max_batch_size=2
)
output, = runner.submit("image", [EncodeRequest(np.zeros((1, 3, 64, 64), np.uint8))]).result()
modules = sorted({{name.split(".")[0] for name in sys.modules}})
compiler = "torch._dynamo" in sys.modules
print(json.dumps({{"shape": output.embeddings.shape, "modules": modules, "compiler": compiler}}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["shape"] == [4, 384]
    assert "torch" in answer["modules"]
    assert not answer["compiler"]
    assert not set(answer["modules"]) & (FOREIGN | {"transformers", "torchvision", "huggingface_hub"})
