"""The runner with several batches under way: upload, replay and copy-out overlap, and every answer is its own."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from queue import Queue
from typing import Any, Literal

import numpy as np
import pytest
import torch

from encoder.checkpoint import write_tiny_checkpoint
from encoder.defs import EncodeOutput, EncodeRequest, Modality
from encoder.runner import EncoderRunner, PendingBatch
from tests.gpu.conftest import DEVICE, MODALITIES, Towers, level_rows, make_manager, relative_error

Pooling = Literal["none", "mean"]


@pytest.fixture(scope="module")
def runner(shallow: Towers) -> EncoderRunner:
    return EncoderRunner(shallow.ours, make_manager(shallow.ours, [64, 192, 512, 1024]))


def make_requests(modality: Modality, seed: int) -> list[EncodeRequest]:
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(int(rng.integers(1, 6))):
        count = int(rng.integers(1, 17)) if modality == "video" else 1
        shape = (count, 3, 32 * int(rng.integers(1, 8)), 32 * int(rng.integers(1, 8)))
        pooling: Pooling = "mean" if index == 3 else "none"
        requests.append(EncodeRequest(rng.integers(0, 256, shape, dtype=np.uint8), index == 1, pooling))
    return requests


def embeddings(pending: PendingBatch) -> list[np.ndarray]:
    outputs = pending.result()
    assert all(isinstance(o, EncodeOutput) and o.execution == "graph" for o in outputs)
    return [o.embeddings.copy() for o in outputs if isinstance(o, EncodeOutput)]


def test_values(runner: EncoderRunner, shallow: Towers) -> None:
    encoder = shallow.ours
    for modality in MODALITIES:
        for request in make_requests(modality, 5):
            (bits,) = embeddings(runner.submit(modality, [EncodeRequest(request.frames)]))
            assert bits.dtype == np.uint16
            rows = torch.from_numpy(bits).view(torch.bfloat16).to(DEVICE)
            frames = torch.from_numpy(request.frames).to(DEVICE)
            key = "pixel_values_videos" if modality == "video" else "pixel_values"
            t, h, w = -(-len(frames) // 2), frames.shape[2] // 16, frames.shape[3] // 16
            eager = encoder.encoder_eager_forward({key: [frames], f"{modality}_grid_thw": [(t, h, w)]})
            for a, b in zip(level_rows(rows, encoder), level_rows(eager, encoder), strict=True):
                assert relative_error(a, b) < 0.03


def test_two_in_flight(runner: EncoderRunner) -> None:
    assert runner.max_in_flight >= 2
    work: list[tuple[Modality, list[EncodeRequest]]] = [
        (MODALITIES[seed % 3 // 2], make_requests(MODALITIES[seed % 3 // 2], seed)) for seed in range(30)
    ]
    alone = [embeddings(runner.submit(modality, requests)) for modality, requests in work]
    for _ in range(3):
        flight: deque[PendingBatch] = deque()
        together: list[list[np.ndarray]] = []
        for modality, requests in work:
            flight.append(runner.submit(modality, requests))
            if len(flight) == runner.max_in_flight:
                together.append(embeddings(flight.popleft()))
        together += [embeddings(pending) for pending in flight]
        for ours, theirs in zip(alone, together, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_results_taken_by_another_thread(runner: EncoderRunner) -> None:
    work = [make_requests("image", seed) for seed in range(20)]
    alone = [embeddings(runner.submit("image", requests)) for requests in work]
    pending: Queue[Any] = Queue(maxsize=1)
    taken: list[list[np.ndarray]] = []

    def take() -> None:
        while (batch := pending.get()) is not None:
            taken.append(embeddings(batch))

    thread = threading.Thread(target=take)
    thread.start()
    try:
        for requests in work:
            pending.put(runner.submit("image", requests))
    finally:
        pending.put(None)
        thread.join(60)
    for ours, theirs in zip(alone, taken, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_frames_may_change_once_submitted(runner: EncoderRunner) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, 3, 224, 224), dtype=np.uint8)
    (clean,) = embeddings(runner.submit("image", [EncodeRequest(frames)]))
    changing = frames.copy()
    pending = runner.submit("image", [EncodeRequest(changing)])
    changing[...] = 0
    (kept,) = embeddings(pending)
    assert np.array_equal(clean, kept)


def test_a_bad_item_leaves_its_neighbours(runner: EncoderRunner) -> None:
    good = make_requests("image", 1)[0]
    (alone,) = embeddings(runner.submit("image", [good]))
    bad = EncodeRequest(np.zeros((2, 3, 64, 64), dtype=np.uint8))
    first, second = runner.submit("image", [bad, good]).result()
    assert isinstance(first, ValueError)
    assert isinstance(second, EncodeOutput)
    assert np.array_equal(second.embeddings, alone)
    pending = runner.submit("image", [bad])
    assert isinstance(pending.result()[0], ValueError)
    assert pending.busy_seconds >= 0


def test_busy_seconds(runner: EncoderRunner) -> None:
    pending = runner.submit("image", make_requests("image", 2))
    pending.result()
    assert 0 < pending.busy_seconds < 10


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_any_name_of_the_device_will_do(device: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    runner = EncoderRunner.from_checkpoint(folder, device=device, token_budgets={"image": [16]}, max_batch_size=2)
    assert (runner.device, runner.dtype, runner.backend) == ("cuda:0", "bfloat16", "cuda-graph")
    frames = np.zeros((1, 3, 64, 64), np.uint8)
    (output,) = runner.submit("image", [EncodeRequest(frames)]).result()
    assert isinstance(output, EncodeOutput)
    assert (output.execution, output.budget, output.embeddings.shape) == ("graph", 16, (4, runner.width))
