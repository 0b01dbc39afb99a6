"""The README's Python blocks run as they stand, one after another, against the real service."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from benchmarks.service import Service
from tests.integration.media import jpeg

pytestmark = pytest.mark.integration
README = Path(__file__).parents[2] / "README.md"


def test_python_blocks(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    sample = jpeg(300, 200, 7)
    monkeypatch.chdir(tmp_path)
    Path("photo.jpg").write_bytes(sample.data)
    Path("photo.safetensors").write_bytes(httpx.post(f"{service.url}/v1/encode", content=sample.data).content)
    printed = []
    for block in blocks:
        exec(compile(block.replace("http://localhost:8000", service.url), str(README), "exec"), {})
        printed.append(capsys.readouterr().out)
    assert printed == [
        "(70, 384) torch.float32 [1, 14, 20] image graph\n",
        "(70, 384) 70\n",
        "{'visual_tokens': 70} [1, 14, 20] [1, 384]\n",
    ]
