"""Checkpoints in every layout that holds the tower, damaged ones, and the tiny one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import encoder.checkpoint as checkpoint
from encoder.checkpoint import (
    CheckpointError,
    digest_checkpoint,
    load_vision_encoder,
    read_vision_config,
    resolve_checkpoint,
    write_tiny_checkpoint,
)
from encoder.qwen3_vl import Qwen3VLVisionEncoder
from tests.unit.encoder.conftest import CPU

ROOT = Path(__file__).parents[3]
Tensors = dict[str, torch.Tensor]
# Three processes that start to write together, each loading what it finds; forked, to import the model's code once.
WRITERS = """
import multiprocessing, sys
from pathlib import Path
import torch, transformers.models.qwen3_vl.modeling_qwen3_vl
from encoder.checkpoint import load_vision_encoder, write_tiny_checkpoint

torch.set_num_threads(1)
context = multiprocessing.get_context("fork")
barrier = context.Barrier(3)

def write() -> None:
    barrier.wait()
    load_vision_encoder(write_tiny_checkpoint(Path(sys.argv[1])), torch.device("cpu"), torch.float32)

processes = [context.Process(target=write) for _ in range(3)]
for process in processes:
    process.start()
for process in processes:
    process.join()
print(*(process.exitcode for process in processes))
"""


@pytest.fixture(scope="session")
def tensors(tiny_folder: Path) -> Tensors:
    return load_file(tiny_folder / "model.safetensors")


@pytest.fixture
def config_only(tiny_folder: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    return tmp_path


def save(folder: Path, shards: Mapping[str, Tensors]) -> None:
    """An index and its shards; one shard named model.safetensors needs no index."""
    for file, part in shards.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    if list(shards) != ["model.safetensors"]:
        weight_map = {name: file for file, part in shards.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def split(tensors: Tensors) -> dict[str, Tensors]:
    """Two shards of the tower and one of the language model alone."""
    tower = sorted(n for n in tensors if ".visual." in n)
    text = {n: t for n, t in tensors.items() if ".visual." not in n}
    assert text
    assert tower
    half = len(tower) // 2
    return {
        "model-00001-of-00003.safetensors": {n: tensors[n] for n in tower[:half]},
        "model-00002-of-00003.safetensors": {n: tensors[n] for n in tower[half:]},
        "model-00003-of-00003.safetensors": text,
    }


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3VLVisionEncoder:
    return load_vision_encoder(folder, CPU, dtype)


def assert_same(encoder: Qwen3VLVisionEncoder, tensors: Tensors) -> None:
    state = encoder.state_dict()
    expected = {n.removeprefix("model.visual."): t for n, t in tensors.items() if ".visual." in n}
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
        assert not state[name].is_meta


class TestLayouts:
    def test_one_file(self, tiny: Qwen3VLVisionEncoder, tensors: Tensors) -> None:
        assert_same(tiny, tensors)

    def test_sharded_by_transformers(self, tiny_folder: Path, tmp_path: Path, tensors: Tensors) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        model = Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder)
        model.save_pretrained(tmp_path, max_shard_size="3MB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        assert_same(load(tmp_path), tensors)

    def test_prefix_of_older_transformers(self, config_only: Path, tensors: Tensors) -> None:
        old = {n.replace("model.visual.", "visual.").replace("model.language_model.", "model."): t
               for n, t in tensors.items()}  # fmt: skip
        save(config_only, {"model.safetensors": old})
        assert_same(load(config_only), tensors)

    def test_the_tower_alone(self, tiny_folder: Path, tmp_path: Path, tensors: Tensors) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder).model.visual.save_pretrained(tmp_path)
        assert "vision_config" not in json.loads((tmp_path / "config.json").read_text())
        assert_same(load(tmp_path), tensors)

    def test_saved_rotary_frequencies_are_computed_instead(self, config_only: Path, tensors: Tensors) -> None:
        extra = {"model.visual.rotary_pos_emb.inv_freq": torch.full((18,), float("nan"))}
        save(config_only, {"model.safetensors": tensors | extra})
        encoder = load(config_only)
        assert_same(encoder, tensors)
        rows = encoder.encoder_eager_forward({"pixel_values": torch.zeros(16, 1536), "image_grid_thw": [(1, 4, 4)]})
        assert rows.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, tiny_folder: Path, tensors: Tensors, dtype: torch.dtype) -> None:
        encoder = load(tiny_folder, dtype)
        assert encoder.dtype == dtype
        assert_same(encoder, {n: t.to(dtype) for n, t in tensors.items()})

    def test_a_half_precision_file_in_float32(self, config_only: Path, tensors: Tensors) -> None:
        half = {n: t.bfloat16() for n, t in tensors.items()}
        save(config_only, {"model.safetensors": half})
        assert_same(load(config_only), {n: t.float() for n, t in half.items()})

    def test_encoder_options_are_passed_on(self, tiny_folder: Path) -> None:
        encoder = load_vision_encoder(tiny_folder, CPU, torch.float32, t_capture=3, image_mean=(0.1, 0.2, 0.3))
        assert encoder.t_capture == 3
        assert torch.equal(encoder._mean, torch.tensor([0.1, 0.2, 0.3]) * 255)


class TestLanguageModel:
    @pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"not a tensor file")])
    def test_its_shard_is_never_opened(
        self, config_only: Path, tensors: Tensors, damage: Callable[[Path], object]
    ) -> None:
        save(config_only, split(tensors))
        damage(config_only / "model-00003-of-00003.safetensors")
        assert_same(load(config_only), tensors)

    def test_its_tensors_are_never_read(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[str] = []

        class Recorder:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._file = safe_open(*args, **kwargs)

            def __enter__(self) -> Recorder:
                self._file.__enter__()
                return self

            def __exit__(self, *args: Any) -> None:
                self._file.__exit__(*args)

            def keys(self) -> list[str]:
                keys: list[str] = self._file.keys()
                return keys

            def get_slice(self, name: str) -> Any:
                read.append(name)
                return self._file.get_slice(name)

            def get_tensor(self, name: str) -> Any:
                read.append(name)
                return self._file.get_tensor(name)

        monkeypatch.setattr(checkpoint, "safe_open", Recorder)
        encoder = load(tiny_folder)
        assert {n.removeprefix("model.visual.") for n in read} == set(encoder.state_dict())
        assert all(n.startswith("model.visual.") for n in read)


class TestDamage:
    def check(self, folder: Path, *fragments: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        message = str(caught.value)
        assert str(folder) in message
        for fragment in fragments:
            assert fragment in message
        return message

    def test_missing_tensors_are_named(self, config_only: Path, tensors: Tensors) -> None:
        gone = ("model.visual.merger.norm.weight", "model.visual.blocks.3.attn.qkv.bias")
        save(config_only, {"model.safetensors": {n: t for n, t in tensors.items() if n not in gone}})
        self.check(config_only, "missing blocks.3.attn.qkv.bias, merger.norm.weight")

    def test_extra_tensors_are_named(self, config_only: Path, tensors: Tensors) -> None:
        extra = {"model.visual.blocks.4.norm1.weight": torch.ones(144), "model.visual.gate": torch.ones(1)}
        save(config_only, {"model.safetensors": tensors | extra})
        self.check(config_only, "not expected blocks.4.norm1.weight, gate")

    def test_wrong_shapes_are_named(self, config_only: Path, tensors: Tensors) -> None:
        wrong = {"model.visual.merger.linear_fc2.weight": torch.ones(95, 576)}
        save(config_only, {"model.safetensors": tensors | wrong})
        self.check(config_only, "merger.linear_fc2.weight has shape [95, 576], expected [96, 576]")

    def test_all_at_once(self, config_only: Path, tensors: Tensors) -> None:
        changed = tensors | {"model.visual.gate": torch.ones(1), "model.visual.pos_embed.weight": torch.ones(4, 144)}
        del changed["model.visual.merger.norm.bias"]
        save(config_only, split(changed))
        self.check(
            config_only,
            "missing merger.norm.bias",
            "not expected gate",
            "pos_embed.weight has shape [4, 144], expected [2304, 144]",
        )

    def test_many_are_counted(self, config_only: Path, tensors: Tensors) -> None:
        save(config_only, {"model.safetensors": {n: t for n, t in tensors.items() if ".visual.blocks." not in n}})
        assert self.check(config_only, "and 40 more").count("blocks.") == 8

    def test_no_tower(self, config_only: Path, tensors: Tensors) -> None:
        save(config_only, {"model.safetensors": {n: t for n, t in tensors.items() if ".visual." not in n}})
        self.check(config_only, "no vision tower")

    def test_no_weights(self, config_only: Path) -> None:
        self.check(config_only, "model.safetensors", "model.safetensors.index.json")

    @pytest.mark.parametrize("size", [0, 5, 5000])
    def test_a_truncated_file(self, tiny_folder: Path, config_only: Path, size: int) -> None:
        whole = (tiny_folder / "model.safetensors").read_bytes()
        (config_only / "model.safetensors").write_bytes(whole[:size])
        self.check(config_only, "model.safetensors cannot be read")

    def test_a_missing_shard(self, config_only: Path, tensors: Tensors) -> None:
        save(config_only, split(tensors))
        (config_only / "model-00002-of-00003.safetensors").unlink()
        self.check(config_only, "model-00002-of-00003.safetensors")

    def test_a_shard_without_what_the_index_promises(self, config_only: Path, tensors: Tensors) -> None:
        shards = split(tensors)
        save(config_only, shards)
        file, part = next(iter(shards.items()))
        save_file(dict(list(part.items())[1:]), config_only / file)
        self.check(config_only, file, next(iter(part)))

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
    def test_a_bad_index(self, config_only: Path, text: str) -> None:
        (config_only / "model.safetensors.index.json").write_text(text)
        self.check(config_only, "model.safetensors.index.json cannot be read")


class TestConfig:
    def test_values(self, tiny_folder: Path) -> None:
        config = read_vision_config(tiny_folder)
        assert (config.depth, config.hidden_size, config.num_heads, config.head_dim) == (4, 144, 2, 72)
        assert (config.intermediate_size, config.out_hidden_size, config.width) == (272, 96, 384)
        assert (config.num_position_embeddings, config.deepstack_visual_indexes) == (2304, (0, 1, 2))
        assert config.rope_theta == 10000.0

    def test_rope_is_the_default_where_the_config_has_none(self, tiny_folder: Path, tmp_path: Path) -> None:
        whole = json.loads((tiny_folder / "config.json").read_text())
        del whole["vision_config"]["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert read_vision_config(tmp_path).rope_theta == 10000.0

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"model_type": "qwen2_5_vl"}, "qwen2_5_vl"),
            ({"model_type": None}, "model_type"),
            ({"patch_size": 14}, "patch_size"),
            ({"temporal_patch_size": 1}, "temporal_patch_size"),
            ({"spatial_merge_size": 4}, "spatial_merge_size"),
            ({"in_channels": 4}, "in_channels"),
            ({"hidden_act": "silu"}, "hidden_act"),
            ({"depth": 0}, "depth"),
            ({"depth": "four"}, "depth"),
            ({"hidden_size": None}, "hidden_size"),
            ({"num_heads": 5}, "num_heads"),
            ({"num_heads": 8, "hidden_size": 144}, "num_heads"),
            ({"num_position_embeddings": 2303}, "num_position_embeddings"),
            ({"deepstack_visual_indexes": [0, 4]}, "deepstack_visual_indexes"),
            ({"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes"),
            ({"deepstack_visual_indexes": [2, 0]}, "deepstack_visual_indexes"),
            ({"deepstack_visual_indexes": [-1]}, "deepstack_visual_indexes"),
        ],
    )
    def test_impossible_fields_are_named(
        self, tiny_folder: Path, tmp_path: Path, change: dict[str, Any], name: str
    ) -> None:
        whole = json.loads((tiny_folder / "config.json").read_text())
        whole["vision_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.raises(CheckpointError, match=name) as caught:
            read_vision_config(tmp_path)
        assert str(tmp_path) in str(caught.value)

    @pytest.mark.parametrize("field", ["depth", "out_hidden_size", "deepstack_visual_indexes"])
    def test_absent_fields_are_named(self, tiny_folder: Path, tmp_path: Path, field: str) -> None:
        whole = json.loads((tiny_folder / "config.json").read_text())
        del whole["vision_config"][field]
        (tmp_path / "config.json").write_text(json.dumps(whole))
        with pytest.raises(CheckpointError, match=f"lacks {field}"):
            read_vision_config(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', '{"vision_config": null}', "{}"])
    def test_not_a_config(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_vision_config(tmp_path)


class Hub:
    """A hub that has what `folder` holds and keeps what was asked of it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache, self.asked = folder, cache, list[str]()

    def download(self, repo: str, name: str) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        assert repo == "Qwen/Qwen3-VL-test"
        self.asked.append(name)
        if not (self.folder / name).is_file():
            raise EntryNotFoundError(name)
        self.cache.mkdir(exist_ok=True)
        return str(shutil.copy(self.folder / name, self.cache / name))


@pytest.fixture
def hub(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "remote").mkdir()
    for name in ("config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        shutil.copy(tiny_folder / name, tmp_path / "remote")
    hub = Hub(tmp_path / "remote", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)
    return hub


class TestHub:
    def test_only_the_towers_shards_are_fetched(self, hub: Hub, tensors: Tensors) -> None:
        save(hub.folder, split(tensors))
        folder = resolve_checkpoint("Qwen/Qwen3-VL-test")
        assert folder == hub.cache
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json",
            "model-00001-of-00003.safetensors",
            "model-00002-of-00003.safetensors",
            "model.safetensors.index.json",
            "preprocessor_config.json",
            "video_preprocessor_config.json",
        ]
        assert len(hub.asked) == len(set(hub.asked))
        assert_same(load(folder), tensors)

    def test_one_file(self, hub: Hub, tensors: Tensors) -> None:
        save(hub.folder, {"model.safetensors": tensors})
        assert_same(load(resolve_checkpoint("Qwen/Qwen3-VL-test")), tensors)

    def test_processor_configs_may_be_absent(self, hub: Hub, tensors: Tensors) -> None:
        save(hub.folder, {"model.safetensors": tensors})
        (hub.folder / "preprocessor_config.json").unlink()
        (hub.folder / "video_preprocessor_config.json").unlink()
        assert_same(load(resolve_checkpoint("Qwen/Qwen3-VL-test")), tensors)

    @pytest.mark.parametrize("absent", ["config.json", "model.safetensors"])
    def test_a_repository_without_a_model(self, hub: Hub, tensors: Tensors, absent: str) -> None:
        save(hub.folder, {"model.safetensors": tensors})
        (hub.folder / absent).unlink()
        with pytest.raises(CheckpointError, match=f"Qwen/Qwen3-VL-test.*{absent}"):
            resolve_checkpoint("Qwen/Qwen3-VL-test")

    def test_a_repository_without_a_tower_costs_no_weights(self, hub: Hub, tensors: Tensors) -> None:
        save(hub.folder, {"a.safetensors": {n: t for n, t in tensors.items() if ".visual." not in n}})
        with pytest.raises(CheckpointError, match="no vision tower"):
            resolve_checkpoint("Qwen/Qwen3-VL-test")
        assert "a.safetensors" not in hub.asked

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(repo: str, name: str) -> str:
            raise ConnectionError("name resolution failed")

        monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
        with pytest.raises(CheckpointError, match=r"Qwen/Qwen3-VL-test.*name resolution failed"):
            resolve_checkpoint("Qwen/Qwen3-VL-test")


class TestResolve:
    def test_a_folder(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tiny_folder.parent)
        assert resolve_checkpoint(str(tiny_folder)) == resolve_checkpoint(f"./{tiny_folder.name}") == tiny_folder

    def test_a_folder_without_a_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            resolve_checkpoint(str(tmp_path))

    @pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c", "word", ""])
    def test_neither_a_folder_nor_an_id(self, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError):
            resolve_checkpoint(model)

    def test_tiny_is_cached(self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        written: list[Path] = []

        def copy(folder: Path) -> None:
            written.append(folder)
            shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)

        monkeypatch.setattr(checkpoint, "_save_tiny", copy)
        folder = resolve_checkpoint("tiny")
        assert folder == resolve_checkpoint("tiny")
        assert folder.is_relative_to(tmp_path / "foveal")
        assert len(written) == 1
        assert read_vision_config(folder).head_dim == 72


class TestTiny:
    def test_seeded(self, tiny_folder: Path, tmp_path: Path, tensors: Tensors) -> None:
        torch.manual_seed(12345)
        state = torch.get_rng_state()
        write_tiny_checkpoint(tmp_path / "again")
        assert torch.equal(torch.get_rng_state(), state)
        again = load_file(tmp_path / "again" / "model.safetensors")
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[n], t) for n, t in tensors.items())

    def test_biases_and_norms_are_not_trivial(self, tensors: Tensors) -> None:
        vectors = {n: t for n, t in tensors.items() if ".visual." in n and t.ndim == 1}
        assert len(vectors) > 40
        assert all(t.std() > 0.05 for t in vectors.values())

    def test_transformers_loads_it_whole(self, tiny_folder: Path) -> None:
        from transformers import AutoConfig, Qwen3VLForConditionalGeneration

        assert AutoConfig.from_pretrained(tiny_folder).model_type == "qwen3_vl"
        loaded: Any = Qwen3VLForConditionalGeneration.from_pretrained(tiny_folder, output_loading_info=True)
        info = loaded[1]
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    def test_transformers_reads_the_released_constants(self, tiny_folder: Path) -> None:
        from transformers import AutoImageProcessor, AutoVideoProcessor

        image = AutoImageProcessor.from_pretrained(tiny_folder)
        video = AutoVideoProcessor.from_pretrained(tiny_folder)
        assert type(video).__name__ == "Qwen3VLVideoProcessor"
        for processor in (image, video):
            assert (processor.patch_size, processor.merge_size, processor.temporal_patch_size) == (16, 2, 2)
            assert list(processor.image_mean) == list(processor.image_std) == [0.5, 0.5, 0.5]
        assert dict(image.size) == {"shortest_edge": 65536, "longest_edge": 16777216}
        assert dict(video.size) == {"shortest_edge": 4096, "longest_edge": 25165824}
        assert (video.fps, video.min_frames, video.max_frames) == (2, 4, 768)
        stored = json.loads((tiny_folder / "video_preprocessor_config.json").read_text())
        assert stored["cap_pixels_per_frame"] is False

    def test_written_once(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "_save_tiny", lambda folder: pytest.fail("written again"))
        assert write_tiny_checkpoint(tiny_folder) == tiny_folder

    def test_renamed_into_place_whole(self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[int] = []

        def copy(folder: Path) -> None:
            assert not (tmp_path / "tiny").exists()
            shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
            written.append(folder.stat().st_ino)

        monkeypatch.setattr(checkpoint, "_save_tiny", copy)
        assert write_tiny_checkpoint(tmp_path / "tiny").stat().st_ino == written[0]
        assert [p.name for p in tmp_path.iterdir()] == ["tiny"]

    def test_the_first_of_two_writers_wins(
        self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "tiny"

        def copy_while_another_finishes(scratch: Path) -> None:
            shutil.copytree(tiny_folder, scratch, dirs_exist_ok=True)
            shutil.copytree(tiny_folder, folder)
            (folder / "first").touch()

        monkeypatch.setattr(checkpoint, "_save_tiny", copy_while_another_finishes)
        assert write_tiny_checkpoint(folder) == folder
        assert (folder / "first").exists()
        assert [p.name for p in tmp_path.iterdir()] == ["tiny"]

    def test_a_failed_write_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(folder: Path) -> None:
            (folder / "config.json").write_text("{")
            raise OSError("disk full")

        monkeypatch.setattr(checkpoint, "_save_tiny", fail)
        with pytest.raises(OSError, match="disk full"):
            write_tiny_checkpoint(tmp_path / "tiny")
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_of_something_else_is_left_alone(
        self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpoint, "_save_tiny", lambda folder: shutil.copytree(tiny_folder, folder / "x"))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("keep")
        with pytest.raises(OSError, match="mine"):
            write_tiny_checkpoint(tmp_path / "mine")
        assert [p.name for p in tmp_path.rglob("*")] == ["mine", "notes.txt"]

    @pytest.mark.timeout(600)
    def test_several_processes_at_once(self, tmp_path: Path, tensors: Tensors) -> None:
        folder = tmp_path / "models" / "tiny"
        done = subprocess.run(
            [sys.executable, "-c", WRITERS, str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["0", "0", "0"]
        assert [p.name for p in folder.parent.iterdir()] == ["tiny"]
        assert_same(load(folder), tensors)

    def test_command_line(self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "_save_tiny", lambda to: shutil.copytree(tiny_folder, to, dirs_exist_ok=True))
        monkeypatch.setattr(sys, "argv", ["encoder.checkpoint", "tiny", str(tmp_path / "new")])
        checkpoint.main()
        assert read_vision_config(tmp_path / "new").depth == 4


class TestDigest:
    def test_how_tensors_are_spread_makes_no_difference(
        self, tiny_folder: Path, config_only: Path, tensors: Tensors
    ) -> None:
        for config in tiny_folder.glob("*preprocessor_config.json"):
            shutil.copy(config, config_only)
        one = digest_checkpoint(tiny_folder)
        assert re.fullmatch("[0-9a-f]{64}", one)
        save(config_only, split(tensors))
        # The language model's shard is not even opened.
        (config_only / "model-00003-of-00003.safetensors").unlink()
        assert digest_checkpoint(config_only) == one

    @pytest.mark.parametrize("change", ["one value", "a name", "a shape", "config", "preprocessor", "language model"])
    def test_what_changes_embeddings_changes_it(
        self, tiny_folder: Path, tmp_path: Path, tensors: Tensors, change: str
    ) -> None:
        folder = tmp_path / "copy"
        shutil.copytree(tiny_folder, folder)
        changed, name = dict(tensors), "model.visual.merger.norm.weight"
        if change == "one value":
            changed[name] = tensors[name].clone()
            changed[name][-1] += 1e-6
            assert not torch.equal(changed[name], tensors[name])
        elif change == "a name":
            other = "model.visual.merger.norm.bias"
            changed[name], changed[other] = tensors[other], tensors[name]
        elif change == "a shape":
            changed[name] = tensors[name].reshape(2, -1)
        elif change == "language model":
            changed["model.language_model.norm.weight"] = tensors["model.language_model.norm.weight"] + 1
        else:
            file = {"config": "config.json", "preprocessor": "preprocessor_config.json"}[change]
            (folder / file).write_text((folder / file).read_text() + " ")
        save(folder, {"model.safetensors": changed})
        assert (digest_checkpoint(folder) == digest_checkpoint(tiny_folder)) == (change == "language model")

    def test_a_folder_without_a_tower(self, config_only: Path) -> None:
        save(config_only, {"model.safetensors": {"lm_head.weight": torch.zeros(2)}})
        with pytest.raises(CheckpointError, match="no vision tower"):
            digest_checkpoint(config_only)
