"""One service for all integration tests, started as users start it, and transformers' own model to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from benchmarks.service import Service, token_auth
from tests.integration.media import Sample
from tests.unit.media.reference import reference_image, reference_video


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test runs first also waits for the service to start, on a machine that may be busy."""
    for item in items:
        if item.get_closest_marker("integration"):
            item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def ray_auth() -> dict[str, str]:
    """The environment by which a process gets to the service's own Ray instance."""
    return token_auth()


@pytest.fixture(scope="session")
def service(store_root: Path, ray_auth: dict[str, str]) -> Iterator[Service]:
    def with_store(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["store"]["root"] = str(store_root)

    with Service(with_store, env={"RAY_metrics_report_interval_ms": "1000", **ray_auth}, timeout_s=300) as running:
        yield running


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=120) as session:
        yield session


@pytest.fixture(scope="session")
def reference(client: httpx.Client) -> Callable[[Sample], np.ndarray]:
    """Sample -> float32 [tokens, width], by transformers' processors and tower from the checkpoint that is served."""
    from transformers import Qwen3VLForConditionalGeneration

    folder = Path(client.get("/v1/models").json()["data"][0]["root"])
    tower: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).model.visual

    @torch.inference_mode()
    def run(sample: Sample) -> np.ndarray:
        patches, grid = (
            reference_image(sample.frames[0]) if sample.modality == "image" else reference_video(sample.frames)
        )
        output = tower(patches, torch.tensor([grid]))
        return torch.cat([output.pooler_output, *output.deepstack_features], 1).numpy()

    return run


@pytest.fixture
def counters(client: httpx.Client) -> Callable[[], dict[str, tuple[int, int]]]:
    """Pool -> (hits, misses), by the replicas' own count, since the fixture was made."""

    def read() -> dict[str, tuple[int, int]]:
        return {pool["name"]: (pool["hits"], pool["misses"]) for pool in client.get("/v1/pools").json()["pools"]}

    before = read()
    return lambda: {name: (hits - before[name][0], misses - before[name][1]) for name, (hits, misses) in read().items()}
