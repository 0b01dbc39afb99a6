"""The vision tower out of a Hugging Face checkpoint, and the tiny demo checkpoint.

`python -m encoder.checkpoint tiny DIR` writes the tiny checkpoint to DIR. Only what needs torch imports it: an ingress,
which looks for the folder and reads its config, does without, and is 130 MB smaller.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from encoder.cache import cache_folder
from encoder.config import VisionConfig

if TYPE_CHECKING:
    import torch

    from encoder.qwen3_vl import Qwen3VLVisionEncoder

# A checkpoint of the whole model, one by an older transformers, and the tower saved by itself.
_PREFIXES = ("model.visual.", "visual.", "")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_CONFIGS = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TINY_VERSION = 1


class CheckpointError(ValueError):
    """The folder is not a Qwen3-VL checkpoint that can be loaded; the message names the file or tensors."""


def resolve_checkpoint(model: str) -> Path:
    """The local folder of `model`: "tiny" (written to the cache on first use), a folder, or a Hugging Face id.

    Of a Hugging Face id only the configs and the weight files that hold the vision tower are downloaded.

    Raises:
        CheckpointError: the id cannot be had, or the folder has no config.json.
    """
    if model == "tiny":
        return write_tiny_checkpoint(cache_folder() / f"tiny-v{_TINY_VERSION}")
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json")
        return folder.resolve()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"model {model!r} is neither a folder nor a Hugging Face id")
    return _download(model)


def read_vision_config(folder: Path) -> VisionConfig:
    """The `vision_config` of the checkpoint in `folder`.

    Raises:
        CheckpointError: no config.json, or one of another architecture.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    vision = config.get("vision_config", config) if isinstance(config, dict) else None
    if not isinstance(vision, dict):
        raise CheckpointError(f"{path} holds no vision_config")
    if vision.get("model_type") not in ("qwen3_vl", "qwen3_vl_vision"):
        raise CheckpointError(f"{path}: not a Qwen3-VL model (vision model_type {vision.get('model_type')!r})")
    try:
        return VisionConfig.from_dict(vision)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_vision_encoder(
    folder: Path, device: torch.device, dtype: torch.dtype, **encoder_options: Any
) -> Qwen3VLVisionEncoder:
    """The tower of the checkpoint in `folder`, on `device` in `dtype`; reads no other tensor of it.

    Raises:
        CheckpointError: names the tensors that are missing, not expected, or of a wrong shape.
    """
    import torch

    from encoder.qwen3_vl import Qwen3VLVisionEncoder

    config = read_vision_config(folder)
    with torch.device("meta"):
        encoder = Qwen3VLVisionEncoder(config, **encoder_options)
    expected = {name: tuple(p.shape) for name, p in encoder.state_dict().items()}
    files = _tensor_files(folder)
    prefix = _tower_prefix(files, folder)
    tower = {n.removeprefix(prefix): n for n in files if n.startswith(prefix)}
    # Older transformers saved the rotary frequencies; they are computed here.
    tower.pop("rotary_pos_emb.inv_freq", None)
    problems = []
    if missing := sorted(expected.keys() - tower.keys()):
        problems.append(f"missing {_some(missing)}")
    if extra := sorted(tower.keys() - expected.keys()):
        problems.append(f"not expected {_some(extra)}")
    state: dict[str, torch.Tensor] = {}
    for path in sorted({files[tower[n]] for n in tower if n in expected}):
        with _open(path) as tensors:
            for name in (n for n in tower if n in expected and files[tower[n]] == path):
                shape = tuple(tensors.get_slice(tower[name]).get_shape())
                if shape != expected[name]:
                    problems.append(f"{name} has shape {list(shape)}, expected {list(expected[name])}")
                elif not problems:
                    state[name] = tensors.get_tensor(tower[name]).to(device=device, dtype=dtype)
    if problems:
        raise CheckpointError(f"{folder}: vision tensors: " + "; ".join(problems))
    encoder.load_state_dict(state, assign=True)
    return encoder.finalize(device, dtype)


def digest_checkpoint(folder: Path) -> str:
    """SHA-256, in hex, of all that the checkpoint in `folder` adds to an embedding.

    That is its config files, and every byte of the vision tower's tensors with their names, dtypes and shapes. They
    are read in order of name, so it makes no difference how they are spread over files; the language model, which is
    most of a checkpoint, is not read. The tower of Qwen3-VL-8B is 1.2 GB: one or two seconds.

    Raises:
        CheckpointError: as `load_vision_encoder`.
    """
    import torch

    digest = hashlib.sha256()
    for name in _CONFIGS:
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    files = _tensor_files(folder)
    prefix = _tower_prefix(files, folder)
    names = sorted(name for name in files if name.startswith(prefix))
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in {files[name] for name in names}}
        for name in names:
            tensor = opened[files[name]].get_tensor(name)
            digest.update(f"{name.removeprefix(prefix)} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it."""
    if (folder / _INDEX).is_file():
        return {name: folder / file for name, file in _weight_map(folder / _INDEX).items()}
    if not (folder / _SINGLE).is_file():
        raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    with _open(folder / _SINGLE) as tensors:
        return dict.fromkeys(tensors.keys(), folder / _SINGLE)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return dict(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error


def _tower_prefix(names: Iterable[str], where: object) -> str:
    """What stands before the tower's own tensor names."""
    for prefix in _PREFIXES:
        if any(name.startswith(prefix + "patch_embed.") for name in names):
            return prefix
    raise CheckpointError(f"{where} holds no vision tower (no tensor named *patch_embed.*)")


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _download(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def get(name: str) -> Path:
        return Path(hf_hub_download(model, name))

    try:
        folder = get("config.json").parent
        for name in _CONFIGS[1:]:
            try:
                get(name)
            except EntryNotFoundError:
                continue
        try:
            index = get(_INDEX)
        except EntryNotFoundError:
            get(_SINGLE)
        else:
            weight_map = _weight_map(index)
            prefix = _tower_prefix(weight_map, model)
            for name in sorted({file for tensor, file in weight_map.items() if tensor.startswith(prefix)}):
                get(name)
    except CheckpointError:
        raise
    except Exception as error:
        # The hub client raises its own, requests' and OS errors: each means that the checkpoint cannot be had.
        raise CheckpointError(f"model {model!r} cannot be downloaded: {error}") from error
    return folder


def write_tiny_checkpoint(folder: Path) -> Path:
    """A small Qwen3-VL with seeded random weights in `folder`, in the layout that `transformers` writes.

    Several processes may write it at once: each prepares its own and renames it into place; the first wins.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _save_tiny(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _save_tiny(folder: Path) -> None:
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 256,
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 8, 8]},
        },
        vision_config={
            "depth": 4,
            "hidden_size": 144,
            "num_heads": 2,
            "intermediate_size": 272,
            "out_hidden_size": 96,
            "deepstack_visual_indexes": [0, 1, 2],
            "initializer_range": 0.06,
        },
        image_token_id=250,
        video_token_id=251,
        vision_start_token_id=252,
        vision_end_token_id=253,
    )
    rng_state = torch.get_rng_state()
    try:
        torch.manual_seed(20)
        model = Qwen3VLForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.model.visual.parameters():
                if parameter.ndim == 1:
                    # transformers starts biases at 0 and norms at 1, which would hide a mistake in either.
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    finally:
        torch.set_rng_state(rng_state)
    model.save_pretrained(folder)
    shared = {
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, **shared}
    video = {
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        **shared,
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
        "cap_pixels_per_frame": False,
    }
    for name, values in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor", **image}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor", **video}),
    ):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m encoder.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    tiny = commands.add_parser("tiny", help="write the tiny checkpoint")
    tiny.add_argument("folder", type=Path)
    print(write_tiny_checkpoint(parser.parse_args().folder))


if __name__ == "__main__":
    main()
