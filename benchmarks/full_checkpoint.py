"""A checkpoint with the vision tower of Qwen3-VL-8B at full size: seeded random bfloat16 weights, a small text tower.

    python -m benchmarks.full_checkpoint DIR

In the layout that `transformers` writes; 1.2 GB.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

# The vision_config of Qwen3-VL-8B.
VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "out_hidden_size": 4096,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def write_full_checkpoint(folder: Path) -> Path:
    """`folder`, with the checkpoint in it; nothing is written if it is there."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from encoder.checkpoint import resolve_checkpoint

    tiny = resolve_checkpoint("tiny")
    config: Any = Qwen3VLConfig.from_pretrained(tiny)
    for name, value in VISION.items():
        setattr(config.vision_config, name, value)
    # Deepstack levels are added to the text tower's, so their widths must agree.
    config.text_config.hidden_size = VISION["out_hidden_size"]
    config.dtype = config.vision_config.dtype = config.text_config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(8)
    state = {}
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            # Norms near 1 and biases near 0, but neither exactly, which would hide a mistake.
            values = values * 0.05 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            values *= 0.02
        state[name] = values.to(torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    config.save_pretrained(scratch)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        shutil.copy(tiny / name, scratch / name)
    save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
    scratch.chmod(0o755)
    scratch.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_checkpoint", description=__doc__)
    parser.add_argument("folder", type=Path)
    print(write_full_checkpoint(parser.parse_args().folder))


if __name__ == "__main__":
    main()
