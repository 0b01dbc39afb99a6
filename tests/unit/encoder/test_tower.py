"""The tower against `transformers`' own, on the tiny checkpoint and on towers of other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from encoder.budgets import CostTable
from encoder.checkpoint import load_vision_encoder
from encoder.interface import SupportsEncoderCudaGraph
from encoder.manager import EncoderCudaGraphManager
from encoder.qwen3_vl import Qwen3VLVisionEncoder
from tests.unit.encoder.conftest import (
    CPU,
    Grid,
    Reference,
    batch_of,
    image_batch,
    make_patches,
    reference_of,
    relative_error,
    worst_level_error,
)

IMAGE_GRIDS: list[list[Grid]] = [
    [(1, 2, 2)],
    [(1, 2, 40)],
    [(1, 40, 2)],
    [(1, 4, 6)],
    [(1, 16, 16)],
    [(1, 48, 48)],
    [(1, 50, 12)],
    [(1, 14, 98)],
    [(1, 18, 22), (1, 2, 2), (1, 30, 8)],
    [(1, 8, 8)] * 6,
]
VIDEO_GRIDS: list[list[Grid]] = [
    [(1, 4, 4)],
    [(2, 4, 6)],
    [(3, 6, 4)],
    [(5, 2, 10)],
    [(8, 8, 8)],
    [(9, 4, 4)],
    [(17, 6, 6)],
    [(2, 8, 4), (1, 4, 4), (7, 2, 6), (8, 4, 4)],
    [(12, 4, 4), (3, 4, 4), (8, 2, 2)],
]
CASES = [("image", g) for g in IMAGE_GRIDS] + [("video", g) for g in VIDEO_GRIDS]
# Half precision is slow on a CPU: small batches only.
BFLOAT16_CASES = [(m, grids) for m, grids in CASES if sum(t * h * w for t, h, w in grids) <= 400]


def name(value: object) -> str:
    return "+".join("x".join(map(str, g)) for g in value) if isinstance(value, list) else str(value)


def make_manager(encoder: Qwen3VLVisionEncoder, **options: Any) -> EncoderCudaGraphManager:
    budgets = {"image": [16, 64, 640], "video": [32, 128, 200]}
    manager = EncoderCudaGraphManager(encoder, budgets, 8, CPU, encoder.dtype, **options)
    manager.capture()
    return manager


@pytest.fixture(scope="module")
def manager(tiny: Qwen3VLVisionEncoder) -> EncoderCudaGraphManager:
    return make_manager(tiny)


@pytest.fixture(scope="module")
def manager_bfloat16(tiny_bfloat16: Qwen3VLVisionEncoder) -> EncoderCudaGraphManager:
    return make_manager(tiny_bfloat16)


def test_implements_the_protocol(tiny: Qwen3VLVisionEncoder) -> None:
    assert isinstance(tiny, SupportsEncoderCudaGraph)
    config = tiny.get_encoder_cudagraph_config()
    assert config.modalities == ("image", "video")
    assert config.input_key == "pixel_values"
    assert config.modality_input_keys == {"image": "pixel_values", "video": "pixel_values_videos"}
    assert config.buffer_keys == (
        "pos_embeds",
        "rotary_pos_emb_cos",
        "rotary_pos_emb_sin",
        "cu_seqlens",
        "max_seqlen",
        "sequence_lengths",
        "num_patches",
    )
    assert config.out_hidden_size == 96 * 4
    assert tiny.config.head_dim == 72


@pytest.mark.parametrize(("modality", "grids"), CASES, ids=name)
def test_through_the_manager(
    manager: EncoderCudaGraphManager, reference: Reference, modality: str, grids: list[Grid]
) -> None:
    batch = batch_of(modality, grids, seed=len(grids))
    outputs = manager.execute_items(batch)
    expected = reference(make_patches(grids, seed=len(grids)), grids)
    for output, levels, (t, _, _) in zip(outputs, expected, grids, strict=True):
        assert len(levels) == 4
        assert worst_level_error(output.embeddings, levels) < 1e-4
        assert output.execution == ("graph" if modality == "image" or t <= 8 else "eager")


@pytest.mark.parametrize(("modality", "grids"), BFLOAT16_CASES, ids=name)
def test_bfloat16(
    manager_bfloat16: EncoderCudaGraphManager, reference_bfloat16: Reference, modality: str, grids: list[Grid]
) -> None:
    outputs = manager_bfloat16.execute(batch_of(modality, grids))
    for output, levels in zip(outputs, reference_bfloat16(make_patches(grids), grids), strict=True):
        assert output.dtype == torch.bfloat16
        assert worst_level_error(output, levels) < 2e-2


@pytest.mark.parametrize(("modality", "grids"), CASES, ids=name)
def test_eager(tiny: Qwen3VLVisionEncoder, reference: Reference, modality: str, grids: list[Grid]) -> None:
    rows = tiny.encoder_eager_forward(batch_of(modality, grids))
    sizes = [t * h * w // 4 for t, h, w in grids]
    for item, levels in zip(rows.split(sizes), reference(make_patches(grids), grids), strict=True):
        assert worst_level_error(item, levels) < 1e-4


def test_frames_of_a_video_do_not_see_each_other(tiny: Qwen3VLVisionEncoder) -> None:
    pixels = make_patches([(3, 4, 6)])
    video = tiny.encoder_eager_forward({"pixel_values_videos": pixels, "video_grid_thw": [(3, 4, 6)]})
    images = tiny.encoder_eager_forward({"pixel_values": pixels, "image_grid_thw": [(1, 4, 6)] * 3})
    assert torch.equal(video, images)


def test_grids_may_be_a_tensor_or_tuples(tiny: Qwen3VLVisionEncoder) -> None:
    grids: list[Grid] = [(1, 4, 6), (1, 2, 2)]
    as_tensor = image_batch(grids)
    as_tuples = as_tensor | {"image_grid_thw": grids}
    assert torch.equal(tiny.encoder_eager_forward(as_tensor), tiny.encoder_eager_forward(as_tuples))
    assert tiny.get_encoder_cudagraph_item_specs(as_tensor) == tiny.get_encoder_cudagraph_item_specs(as_tuples)


@pytest.mark.parametrize(("modality", "t"), [("image", 1), ("video", 3)])
def test_selecting_a_sub_batch(tiny: Qwen3VLVisionEncoder, modality: str, t: int) -> None:
    grids: list[Grid] = [(t, 4, 6), (t, 2, 2), (t, 8, 4), (t, 6, 6)]
    batch = batch_of(modality, grids)
    sizes = [t * h * w // 4 for t, h, w in grids]
    whole = tiny.encoder_eager_forward(batch).split(sizes)
    for indices in ([2], [0, 3], [3, 1, 0]):
        part = tiny.select_encoder_cudagraph_items(batch, indices)
        assert [tiny.get_encoder_cudagraph_item_specs(batch)[i] for i in indices] == (
            tiny.get_encoder_cudagraph_item_specs(part)
        )
        expected = torch.cat([whole[i] for i in indices])
        assert relative_error(tiny.encoder_eager_forward(part), expected) < 1e-6


def test_selecting_frames(tiny: Qwen3VLVisionEncoder) -> None:
    frames = [torch.randint(0, 256, (1, 3, 32 * k, 32), dtype=torch.uint8) for k in (1, 2, 3)]
    batch = {"pixel_values": frames, "image_grid_thw": [(1, 2 * k, 2) for k in (1, 2, 3)]}
    part = tiny.select_encoder_cudagraph_items(batch, [2, 0])
    assert part["pixel_values"] == [frames[2], frames[0]]
    assert part["image_grid_thw"] == [(1, 6, 2), (1, 2, 2)]


def test_position_tables_of_the_latest_shapes_are_kept(
    tiny_folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder.qwen3_vl._POSITION_CACHE_ROWS", 100)
    encoder = load_vision_encoder(tiny_folder, CPU, torch.float32)
    kept_after: list[tuple[Grid, list[tuple[int, int]]]] = [
        ((1, 4, 6), [(4, 6)]),
        ((1, 8, 8), [(4, 6), (8, 8)]),
        ((1, 6, 4), [(8, 8), (6, 4)]),
        ((1, 8, 8), [(6, 4), (8, 8)]),
        ((1, 4, 6), [(8, 8), (4, 6)]),
        ((1, 14, 14), [(14, 14)]),
        ((1, 6, 4), [(6, 4)]),
    ]
    for grid, kept in kept_after:
        rows = encoder.encoder_eager_forward(image_batch([grid]))
        assert worst_level_error(rows, reference(make_patches([grid]), [grid])[0]) < 1e-4
        assert list(encoder._positions) == kept


OTHER_TOWERS = {
    "head_dim 64": {"hidden_size": 128, "num_heads": 2, "deepstack_visual_indexes": [0, 2]},
    "no deepstack": {"hidden_size": 144, "num_heads": 2, "deepstack_visual_indexes": []},
    "deepstack of the last block": {"hidden_size": 64, "num_heads": 1, "deepstack_visual_indexes": [1, 2]},
    "a smaller position table": {
        "hidden_size": 96,
        "num_heads": 2,
        "deepstack_visual_indexes": [1],
        "num_position_embeddings": 256,
    },
    "another theta": {
        "hidden_size": 72,
        "num_heads": 1,
        "deepstack_visual_indexes": [1],
        "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
    },
}


@pytest.mark.parametrize("fields", OTHER_TOWERS.values(), ids=list(OTHER_TOWERS))
def test_other_towers(fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

    torch.manual_seed(3)
    config = Qwen3VLVisionConfig(depth=3, intermediate_size=160, out_hidden_size=40, initializer_range=0.06, **fields)
    theirs = Qwen3VLVisionModel(config).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    theirs.save_pretrained(tmp_path)
    ours = load_vision_encoder(tmp_path, CPU, torch.float32)
    assert ours.config.width == 40 * (1 + len(fields["deepstack_visual_indexes"]))
    manager = make_manager(ours)
    images: list[Grid] = [(1, 10, 6), (1, 4, 4)]
    videos: list[Grid] = [(3, 4, 6), (1, 2, 2), (9, 2, 2)]
    for modality, grids in (("image", images), ("video", videos)):
        expected = reference_of(theirs)(make_patches(grids), grids)
        for output, levels in zip(manager.execute(batch_of(modality, grids)), expected, strict=True):
            assert worst_level_error(output, levels) < 1e-4


def test_every_parameter_matters(tiny_folder: Path) -> None:
    """A weight that the forward ignores would make the equality tests weaker than they look."""
    encoder = load_vision_encoder(tiny_folder, CPU, torch.float32)
    batch = image_batch([(1, 4, 6)])
    before = encoder.encoder_eager_forward(batch)
    for label, parameter in encoder.named_parameters():
        kept = parameter.clone()
        parameter.data.mul_(1.5).add_(0.01)
        encoder._positions.clear()
        changed = encoder.encoder_eager_forward(batch)
        # A key's bias shifts all of a query's scores alike before the rotation, so its effect is small.
        assert not torch.allclose(changed, before, rtol=1e-6, atol=1e-7), label
        parameter.data.copy_(kept)


def test_a_cost_table_may_cut_a_batch_without_changing_it(tiny: Qwen3VLVisionEncoder, reference: Reference) -> None:
    steep = {m: CostTable({16: 1.0, 64: 50.0, 640: 900.0, 32: 1.0, 128: 60.0, 200: 90.0}) for m in ("image", "video")}
    manager = make_manager(tiny, costs=steep)
    grids: list[Grid] = [(1, 8, 8), (1, 4, 4), (1, 8, 6), (1, 14, 16)]
    outputs = manager.execute_items(image_batch(grids))
    assert [o.budget for o in outputs] == [16, 16, 16, 64]
    for output, levels in zip(outputs, reference(make_patches(grids), grids), strict=True):
        assert worst_level_error(output.embeddings, levels) < 1e-4


@pytest.mark.parametrize("modality", ["audio", "Image", ""])
def test_unknown_modality_is_named(tiny: Qwen3VLVisionEncoder, modality: Any) -> None:
    with pytest.raises(ValueError, match="modality"):
        tiny.prepare_encoder_cudagraph_capture_inputs(16, 1, CPU, torch.float32, modality)


def test_a_gpu_that_is_not_the_current_one_is_refused(
    tiny: Qwen3VLVisionEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match="cuda:1 must be the current CUDA device"):
        Qwen3VLVisionEncoder(tiny.config).finalize(torch.device("cuda:1"), torch.float32)


def test_a_large_mixed_batch(tiny: Qwen3VLVisionEncoder, reference: Reference) -> None:
    manager = EncoderCudaGraphManager(tiny, {"image": [16, 64], "video": [32, 64]}, 4, CPU, torch.float32)
    manager.capture()
    shapes: dict[str, list[Grid]] = {
        "image": [(1, 4, 4), (1, 16, 10), (1, 2, 2), (1, 18, 18)],
        "video": [(2, 4, 4), (10, 4, 2), (8, 6, 4), (1, 2, 2), (1, 18, 18)],
    }
    for modality, several in shapes.items():
        grids = [several[i % len(several)] for i in range(23)]
        outputs = manager.execute_items(batch_of(modality, grids))
        expected = reference(make_patches(grids), grids)
        assert max(worst_level_error(o.embeddings, e) for o, e in zip(outputs, expected, strict=True)) < 1e-4
        reasons = {o.reason for o in outputs}
        assert reasons == {None, "tokens_over_budget"} | ({"t_over_capture"} if modality == "video" else set())
