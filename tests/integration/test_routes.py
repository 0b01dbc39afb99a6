"""The routes that tell about the service."""

from __future__ import annotations

import re

import httpx
import pytest

pytestmark = pytest.mark.integration


def test_models_and_health(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "ok", "pools": {"image": "healthy", "video": "healthy", "eager": "healthy"}},
    )


def test_pools(client: httpx.Client) -> None:
    pools = {pool["name"]: pool for pool in client.get("/v1/pools").json()["pools"]}
    assert list(pools) == ["image", "video", "eager"]
    for name, backend, budgets, t_capture, batch in (
        ("image", "cpu-static", [64, 128, 256, 512, 1024], None, 8),
        ("video", "cpu-static", [64, 128, 256, 512, 1024], 8, 8),
        ("eager", "eager", [], None, 4),
    ):
        pool = pools[name]
        assert (pool["backend"], pool["token_budgets"]) == (backend, budgets)
        assert (pool["t_capture"], pool["max_batch_size"]) == (t_capture, batch)
        assert (pool["device"], pool["dtype"], pool["replicas"], pool["state"]) == ("cpu", "float32", 1, "healthy")
        assert set(pool["queue"]) == {"items", "tokens", "bytes", "cancelled", "expired", "rejected"}


def test_pages_need_nothing_from_elsewhere(client: httpx.Client) -> None:
    for path in ("/", "/docs"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", answer.text)
    spec = client.get("/openapi.json").json()
    operation = spec["paths"]["/v1/encode"]["post"]
    assert {parameter["name"] for parameter in operation["parameters"]} >= {"format", "dtype", "pooling", "fps"}
    assert set(operation["requestBody"]["content"]) == {"*/*", "multipart/form-data", "application/json"}
    assert {"200", "400", "413", "415", "422", "503", "504"} <= set(operation["responses"])
    assert "$ref" not in str(operation)
