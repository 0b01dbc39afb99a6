"""A capture that runs out of memory: the error says which budget, and nothing stays captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from encoder.defs import Modality
from encoder.manager import EncoderCudaGraphManager
from tests.unit.encoder.conftest import CPU
from tests.unit.encoder.mock_vit import SimpleMockViTModel


@pytest.mark.parametrize(("modality", "budget"), [("image", 64), ("video", 64), ("image", 16), ("video", 16)])
def test_out_of_memory_names_the_budget(modality: Modality, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleMockViTModel()
    manager = EncoderCudaGraphManager(model, {"image": [16, 64], "video": [16, 64]}, 4, CPU, torch.float32)
    prepare = model.prepare_encoder_cudagraph_capture_inputs

    def fail(token_budget: int, max_batch_size: int, *arguments: Any) -> Any:
        if token_budget == budget and arguments[2] == modality:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prepare(token_budget, max_batch_size, *arguments)

    monkeypatch.setattr(model, "prepare_encoder_cudagraph_capture_inputs", fail)
    with pytest.raises(MemoryError, match=rf"{modality} graph of {budget} tokens.*{modality}\.max_tokens") as raised:
        manager.capture()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert manager.budget_graphs == {}
    assert manager.stats()["static_bytes"] == 0
    assert manager.stats()["num_graphs"] == {}
    batch = model.batch([(1, 4, 4)])
    (output,) = manager.execute_items(batch)
    assert output.execution == "eager"
    torch.testing.assert_close(output.embeddings, model.expected(batch)[0], rtol=1e-4, atol=1e-5)
