"""uint8 frames in, embeddings out, against the reference's own processors and tower."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder.checkpoint import CheckpointError
from encoder.defs import EncodeOutput, EncodeRequest, ItemOutput, Modality, Stopped
from encoder.runner import EncoderRunner, adjacent_runs, resolve_device, resolve_dtype
from tests.unit.encoder.conftest import Reference, random_frames, reference_patches, relative_error, worst_level_error

BUDGETS = {"image": [16, 64, 160], "video": [16, 64, 160]}


def make_runner(folder: Path, **options: Any) -> EncoderRunner:
    arguments: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "token_budgets": BUDGETS,
        "max_batch_size": 4,
    } | options
    return EncoderRunner.from_checkpoint(folder, **arguments)


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> EncoderRunner:
    return make_runner(tiny_folder)


def encode(runner: EncoderRunner, modality: Modality, requests: list[EncodeRequest]) -> list[EncodeOutput]:
    results = runner.submit(modality, requests).result()
    assert len(results) == len(requests)
    for result in results:
        assert isinstance(result, EncodeOutput)
    return [r for r in results if isinstance(r, EncodeOutput)]


def expected_levels(
    folder: Path, reference: Reference, modality: Modality, frames: np.ndarray, **constants: Any
) -> list[torch.Tensor]:
    patches, grid = reference_patches(folder, modality, frames, **constants)
    return reference(patches, [grid])[0]


IMAGES = [(32, 32), (32, 320), (256, 64), (96, 160), (320, 320), (288, 480), (384, 512)]
VIDEOS = [(1, 64, 64), (2, 64, 96), (3, 32, 64), (5, 96, 64), (8, 64, 64), (15, 64, 32), (16, 128, 128), (17, 64, 64)]


class TestEqualsTheReference:
    def test_images_in_one_batch(self, runner: EncoderRunner, tiny_folder: Path, reference: Reference) -> None:
        frames = [random_frames((1, 3, h, w), seed) for seed, (h, w) in enumerate(IMAGES)]
        outputs = encode(runner, "image", [EncodeRequest(f) for f in frames])
        for output, pixels, (h, w) in zip(outputs, frames, IMAGES, strict=True):
            levels = expected_levels(tiny_folder, reference, "image", pixels)
            assert worst_level_error(torch.from_numpy(output.embeddings), levels) < 1e-4
            tokens = h * w // 1024
            assert (output.execution == "graph") is (tokens <= 160)
            assert output.reason == (None if tokens <= 160 else "tokens_over_budget")
            assert (output.budget is None) is (tokens > 160)

    def test_videos_in_one_batch(self, runner: EncoderRunner, tiny_folder: Path, reference: Reference) -> None:
        frames = [random_frames((count, 3, h, w), count) for count, h, w in VIDEOS]
        outputs = encode(runner, "video", [EncodeRequest(f) for f in frames])
        for output, pixels, (count, _, _) in zip(outputs, frames, VIDEOS, strict=True):
            # The reference refuses a clip of one frame; it is the same clip with the frame repeated.
            padded = pixels if count > 1 else np.repeat(pixels, 2, 0)
            levels = expected_levels(tiny_folder, reference, "video", padded)
            assert worst_level_error(torch.from_numpy(output.embeddings), levels) < 1e-4
            assert output.reason == (None if count <= 16 else "t_over_capture")

    @pytest.mark.parametrize("modality", ["image", "video"])
    def test_half_precision(self, tiny_folder: Path, reference: Reference, modality: Modality) -> None:
        runner = make_runner(tiny_folder, dtype="bfloat16")
        frames = random_frames((1 if modality == "image" else 3, 3, 64, 96))
        levels = expected_levels(tiny_folder, reference, modality, frames)
        whole, pooled = encode(runner, modality, [EncodeRequest(frames), EncodeRequest(frames, pooling="mean")])
        assert whole.embeddings.dtype == pooled.embeddings.dtype == np.uint16
        rows = torch.from_numpy(whole.embeddings).view(torch.bfloat16)
        assert worst_level_error(rows, levels) < 2e-2
        mean = torch.from_numpy(pooled.embeddings).view(torch.bfloat16)
        assert torch.equal(mean, rows.float().mean(0, keepdim=True).bfloat16())

    def test_float16(self, tiny_folder: Path, reference: Reference) -> None:
        runner = make_runner(tiny_folder, dtype="float16")
        frames = random_frames((1, 3, 64, 96))
        (output,) = encode(runner, "image", [EncodeRequest(frames)])
        assert (runner.dtype, output.embeddings.dtype) == ("float16", np.float16)
        levels = expected_levels(tiny_folder, reference, "image", frames)
        assert worst_level_error(torch.from_numpy(output.embeddings), levels) < 2e-2

    def test_other_constants(self, tiny_folder: Path, reference: Reference) -> None:
        constants = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
        frames = random_frames((1, 3, 64, 64))
        (output,) = encode(make_runner(tiny_folder, **constants), "image", [EncodeRequest(frames)])
        levels = expected_levels(tiny_folder, reference, "image", frames, **constants)
        assert worst_level_error(torch.from_numpy(output.embeddings), levels) < 1e-4

    def test_without_graphs(self, tiny_folder: Path, reference: Reference) -> None:
        runner = make_runner(tiny_folder, token_budgets={})
        assert runner.backend == "eager"
        frames = [random_frames((count, 3, 64, 32), count) for count in (2, 19)]
        for output, pixels in zip(encode(runner, "video", [EncodeRequest(f) for f in frames]), frames, strict=True):
            assert (output.execution, output.reason, output.budget) == ("eager", None, None)
            levels = expected_levels(tiny_folder, reference, "video", pixels)
            assert worst_level_error(torch.from_numpy(output.embeddings), levels) < 1e-4

    def test_t_capture_is_passed_on(self, tiny_folder: Path) -> None:
        runner = make_runner(tiny_folder, t_capture=2)
        outputs = encode(runner, "video", [EncodeRequest(random_frames((n, 3, 32, 32))) for n in (4, 5)])
        assert [o.reason for o in outputs] == [None, "t_over_capture"]


class TestOrder:
    def test_answers_follow_requests(self, runner: EncoderRunner) -> None:
        shapes = [(320, 320), (32, 32), (512, 512), (64, 64), (96, 32), (544, 32), (32, 32), (128, 128), (256, 256)]
        requests = [EncodeRequest(random_frames((1, 3, h, w), i)) for i, (h, w) in enumerate(shapes)]
        together = encode(runner, "image", requests)
        for request, output in zip(requests, together, strict=True):
            (alone,) = encode(runner, "image", [request])
            assert relative_error(torch.from_numpy(output.embeddings), torch.from_numpy(alone.embeddings)) < 1e-5

    def test_images_and_videos_take_turns(self, runner: EncoderRunner) -> None:
        image, video = EncodeRequest(random_frames((1, 3, 64, 64))), EncodeRequest(random_frames((5, 3, 64, 64)))
        first = [encode(runner, "image", [image])[0], encode(runner, "video", [video])[0]]
        again = [encode(runner, "image", [image])[0], encode(runner, "video", [video])[0]]
        for a, b in zip(first, again, strict=True):
            assert np.array_equal(a.embeddings, b.embeddings)

    def test_nothing(self, runner: EncoderRunner) -> None:
        assert runner.submit("image", []).result() == []

    def test_an_answer_outlives_the_next_batch(self, runner: EncoderRunner) -> None:
        (first,) = encode(runner, "image", [EncodeRequest(random_frames((1, 3, 64, 64), 1))])
        kept = first.embeddings.copy()
        encode(runner, "image", [EncodeRequest(random_frames((1, 3, 64, 64), 2))])
        assert np.array_equal(first.embeddings, kept)

    def test_result_from_another_thread(self, runner: EncoderRunner) -> None:
        pending = runner.submit("image", [EncodeRequest(random_frames((1, 3, 32, 32)))])
        with ThreadPoolExecutor(1) as pool:
            (output,) = pool.submit(pending.result).result()
        assert isinstance(output, EncodeOutput)
        assert output.embeddings.shape == (1, runner.width)


class TestOptions:
    @pytest.mark.parametrize("shape", [(1, 3, 64, 96), (1, 3, 512, 512)], ids=["graph", "eager"])
    def test_main_only_and_mean(self, runner: EncoderRunner, shape: tuple[int, ...]) -> None:
        frames = random_frames(shape)
        whole, main, mean, both = encode(
            runner,
            "image",
            [
                EncodeRequest(frames),
                EncodeRequest(frames, main_only=True),
                EncodeRequest(frames, pooling="mean"),
                EncodeRequest(frames, main_only=True, pooling="mean"),
            ],
        )
        tokens = shape[2] * shape[3] // 1024
        assert (runner.width, runner.main_width) == (384, 96)
        assert whole.embeddings.shape == (tokens, 384)
        assert np.allclose(main.embeddings, whole.embeddings[:, :96], rtol=1e-5, atol=1e-6)
        assert main.embeddings.shape == (tokens, 96)
        expected = whole.embeddings.astype(np.float64).mean(0, keepdims=True)
        assert mean.embeddings.shape == (1, 384)
        assert np.allclose(mean.embeddings, expected, rtol=1e-4, atol=1e-6)
        assert both.embeddings.shape == (1, 96)
        assert np.allclose(both.embeddings, expected[:, :96], rtol=1e-4, atol=1e-6)
        for output in (whole, main, mean, both):
            assert output.embeddings.dtype == np.float32
            assert output.embeddings.flags.c_contiguous

    @pytest.mark.parametrize("neighbour_main_only", [True, False])
    @pytest.mark.parametrize("shape", [(1, 3, 64, 96), (1, 3, 512, 512)], ids=["graph", "eager"])
    def test_main_only_leaves_the_device_and_the_process_without_the_other_columns(
        self,
        runner: EncoderRunner,
        shape: tuple[int, ...],
        neighbour_main_only: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        given: list[torch.Tensor] = []
        execute_items = runner.manager.execute_items

        def watched(*arguments: Any, **named: Any) -> list[ItemOutput]:
            outputs = execute_items(*arguments, **named)
            given.extend(output.embeddings for output in outputs)
            return outputs

        monkeypatch.setattr(runner.manager, "execute_items", watched)
        neighbour = EncodeRequest(random_frames((1, 3, 64, 64), 1), main_only=neighbour_main_only)
        output, _ = encode(runner, "image", [EncodeRequest(random_frames(shape), main_only=True), neighbour])
        # The runner copies to the host what the manager gives, row by row and nothing around it.
        nbytes = shape[2] * shape[3] // 1024 * 96 * 4
        assert (given[0].is_contiguous(), given[0].nbytes) == (True, nbytes)
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(output.embeddings, protocol=5, buffer_callback=buffers.append)
        assert len(head) < 1000
        assert [buffer.raw().nbytes for buffer in buffers] == [nbytes]

    def test_frames_may_be_read_only_and_stay_as_they_are(self, runner: EncoderRunner) -> None:
        frames = random_frames((3, 3, 64, 64))
        kept = frames.copy()
        frames.flags.writeable = False
        encode(runner, "video", [EncodeRequest(frames)])
        assert np.array_equal(frames, kept)

    def test_frames_may_be_strided(self, runner: EncoderRunner) -> None:
        channels_last = random_frames((2, 64, 64, 3))
        strided = channels_last.transpose(0, 3, 1, 2)
        a, b = encode(runner, "video", [EncodeRequest(strided), EncodeRequest(np.ascontiguousarray(strided))])
        assert relative_error(torch.from_numpy(a.embeddings), torch.from_numpy(b.embeddings)) < 1e-5


BAD: dict[str, tuple[Modality, np.ndarray]] = {
    "side": ("image", np.zeros((1, 3, 32, 48), np.uint8)),
    "dtype": ("image", np.zeros((1, 3, 32, 32), np.float32)),
    "channels": ("image", np.zeros((1, 4, 32, 32), np.uint8)),
    "dimensions": ("image", np.zeros((3, 32, 32), np.uint8)),
    "no frames": ("video", np.zeros((0, 3, 32, 32), np.uint8)),
    "no pixels": ("video", np.zeros((2, 3, 0, 32), np.uint8)),
    "two frames of an image": ("image", np.zeros((2, 3, 32, 32), np.uint8)),
}


class TestBadFrames:
    @pytest.mark.parametrize("kind", BAD)
    def test_they_fail_alone(self, runner: EncoderRunner, kind: str) -> None:
        modality, bad = BAD[kind]
        good = EncodeRequest(random_frames((1, 3, 64, 64)))
        (alone,) = encode(runner, modality, [good])
        before = runner.stats()
        first, fault, last = runner.submit(modality, [good, EncodeRequest(bad), good]).result()
        assert isinstance(fault, ValueError)
        assert "frame" in str(fault)
        for output in (first, last):
            assert isinstance(output, EncodeOutput)
            assert relative_error(torch.from_numpy(output.embeddings), torch.from_numpy(alone.embeddings)) < 1e-5
        after = runner.stats()
        assert after["hits"] + after["misses"] - before["hits"] - before["misses"] == 2

    def test_all_bad(self, runner: EncoderRunner) -> None:
        pending = runner.submit("image", [EncodeRequest(BAD["side"][1]), EncodeRequest(BAD["dtype"][1])])
        assert [type(r) for r in pending.result()] == [ValueError, ValueError]
        assert pending.busy_seconds >= 0


class TestStop:
    """Both ways to run a batch on a CPU: in a graph's static buffers, and eagerly."""

    @pytest.mark.parametrize(("shape", "execution"), [((1, 3, 64, 64), "graph"), ((1, 3, 512, 512), "eager")])
    @pytest.mark.parametrize("blocks", [0, 1, 3])
    def test_between_blocks(
        self,
        runner: EncoderRunner,
        shape: tuple[int, ...],
        execution: str,
        blocks: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        request, asked, attended = EncodeRequest(random_frames(shape)), 0, 0
        (alone,) = encode(runner, "image", [request])
        assert alone.execution == execution
        attention = type(runner.encoder.attention)

        def attend(self: Any, qkv: torch.Tensor, plan: Any, inner: Any = attention.__call__) -> torch.Tensor:
            nonlocal attended
            attended += 1
            return inner(self, qkv, plan)

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > blocks

        monkeypatch.setattr(attention, "__call__", attend)
        with pytest.raises(Stopped):
            runner.submit("image", [request, request], stop)
        assert (asked, attended) == (blocks + 1, blocks)
        (again,) = encode(runner, "image", [request])
        assert np.array_equal(again.embeddings, alone.embeddings)

    def test_asked_once_a_block_and_never_needed(self, runner: EncoderRunner) -> None:
        request = EncodeRequest(random_frames((17, 3, 64, 64)))
        (alone,) = encode(runner, "video", [request])
        asked: list[None] = []
        (output,) = runner.submit("video", [request], lambda: bool(asked.append(None))).result()
        assert isinstance(output, EncodeOutput)
        assert np.array_equal(output.embeddings, alone.embeddings)
        assert len(asked) == runner.encoder.config.depth

    def test_nothing_good_to_stop(self, runner: EncoderRunner) -> None:
        (fault,) = runner.submit("image", [EncodeRequest(BAD["side"][1])], lambda: True).result()
        assert isinstance(fault, ValueError)


class TestState:
    def test_stats_are_json_able_and_counted_in_items(self, tiny_folder: Path) -> None:
        runner = make_runner(tiny_folder)
        encode(runner, "image", [EncodeRequest(random_frames((1, 3, 64, 64)))] * 3)
        encode(runner, "video", [EncodeRequest(random_frames((17, 3, 32, 32)))])
        stats = json.loads(json.dumps(runner.stats()))
        assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (3, 1, 0.75)
        assert stats["used_tokens"] == 12
        assert stats["budget_tokens"] >= 12
        assert stats["token_budgets"] == {"image": [16, 64, 160], "video": [16, 64, 160]}
        assert stats["num_graphs"] == {"image": 3, "video": 3}
        assert stats["misses_by_reason"] == {"t_over_capture": 1}
        assert stats["capture_seconds"] > 0
        assert stats["static_bytes"] > 160 * 4 * 1536 * 4

    def test_what_it_is(self, runner: EncoderRunner) -> None:
        assert (runner.backend, runner.attention, runner.device, runner.dtype) == (
            "cpu-static",
            "sdpa",
            "cpu",
            "float32",
        )
        assert runner.max_in_flight == 1

    def test_busy_seconds(self, runner: EncoderRunner) -> None:
        pending = runner.submit("image", [EncodeRequest(random_frames((1, 3, 256, 256)))])
        pending.result()
        assert pending.busy_seconds > 0

    def test_bad_arguments_are_named(self, tiny_folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="token_budgets"):
            make_runner(tiny_folder, token_budgets={"image": [0]})
        with pytest.raises(ValueError, match="max_batch_size"):
            make_runner(tiny_folder, max_batch_size=0)
        with pytest.raises(ValueError, match="t_capture"):
            make_runner(tiny_folder, t_capture=0)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            make_runner(tmp_path)

    def test_auto(self) -> None:
        assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
        assert resolve_device("cpu") == "cpu"
        assert resolve_dtype("auto", "cpu") == "float32"
        assert resolve_dtype("auto", "cuda") == "bfloat16"
        assert resolve_dtype("float16", "cpu") == "float16"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=12))
def test_runs_are_of_neighbours_in_one_allocation(pieces: list[tuple[int, int, bool]]) -> None:
    places, ends = [], dict.fromkeys(range(3), 0)
    for allocation, size, gap in pieces:
        start = ends[allocation] + gap
        places.append((allocation, start, size))
        ends[allocation] = start + size
    runs = adjacent_runs(places)
    assert [i for run in runs for i in run] == list(range(len(places)))
    joined = [all(b[:2] == (a[0], a[1] + a[2]) for a, b in pairwise(places[i] for i in run)) for run in runs]
    assert all(joined)
    for before, after in pairwise(runs):
        a, b = places[before[-1]], places[after[0]]
        assert b[:2] != (a[0], a[1] + a[2])


def test_nan_embeddings_are_told_item_by_item(tiny_folder: Path) -> None:
    runner = make_runner(tiny_folder)
    frames = [np.full((1, 3, 64, 64), value, np.uint8) for value in (0, 100, 200)]
    real = runner.manager.execute_items

    def poisoned(*args: Any, **named: Any) -> Any:
        outputs = real(*args, **named)
        outputs[1].embeddings[-1, -1] = float("nan")
        outputs[2].embeddings[0, 0] = float("inf")
        return outputs

    runner.manager.execute_items = poisoned  # type: ignore[method-assign]
    results = runner.submit("image", [EncodeRequest(f) for f in frames]).result()
    assert [r.has_nan for r in results if isinstance(r, EncodeOutput)] == [False, True, False]


def test_a_batch_can_be_run_without_graphs(runner: EncoderRunner) -> None:
    requests = [EncodeRequest(random_frames((1, 3, 64, 96), seed)) for seed in (1, 2)]
    graph, eager = (runner.submit("image", requests, eager=eager).result() for eager in (False, True))
    for a, b in zip(graph, eager, strict=True):
        assert isinstance(a, EncodeOutput)
        assert isinstance(b, EncodeOutput)
        assert (a.execution, b.execution, b.budget) == ("graph", "eager", None)
        np.testing.assert_allclose(a.embeddings, b.embeddings, rtol=1e-4, atol=1e-5)
