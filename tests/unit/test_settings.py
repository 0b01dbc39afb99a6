"""serve_config.yaml and its schema cannot drift apart, and what cannot work is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from configs.settings import Settings

CONFIG = yaml.safe_load((Path(__file__).parents[2] / "serve_config.yaml").read_text())
(APPLICATION,) = CONFIG["applications"]


def test_the_config_is_valid_for_serve() -> None:
    schema = ServeDeploySchema.model_validate(CONFIG)
    assert schema.applications[0].import_path == "app.main:build"
    assert schema.http_options.host == "127.0.0.1"
    assert sum(d["ray_actor_options"]["num_cpus"] for d in APPLICATION["deployments"]) <= 2


def test_the_config_states_every_setting_at_its_default() -> None:
    assert Settings(**APPLICATION["args"]) == Settings()
    assert_same_keys(APPLICATION["args"], Settings().model_dump())


def assert_same_keys(written: dict[str, Any], known: dict[str, Any]) -> None:
    assert set(written) == set(known)
    for name, value in known.items():
        if isinstance(value, dict):
            assert_same_keys(written[name], value)


def test_the_config_names_the_deployments() -> None:
    from app.main import build

    application = build(Settings())
    bound = [application, *application._bound_deployment.init_args[1:]]
    assert [b._bound_deployment.name for b in bound] == [d["name"] for d in APPLICATION["deployments"]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"modle": "tiny"}, "modle"),
        ({"image": {"budgets": [64]}}, "budgets"),
        ({"image": {"token_budgets": [128, 64]}}, "token_budgets"),
        ({"image": {"token_budgets": [0]}}, "token_budgets"),
        ({"video": {"min_tokens": 128, "max_tokens": 64}}, "max_tokens"),
        ({"video": {"t_capture": 0}}, "t_capture"),
        ({"image": {"token_budgets": [4], "max_batch_size": 8}}, "max_batch_size"),
        ({"device": "gpu"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"long_video": "video"}, "long_video"),
        ({"eager": {"max_batch_tokens": 16383}}, "eager.max_batch_tokens"),
        ({"limits": {"max_body_bytes": 1 << 30}}, "limits.max_bytes_in_flight"),
        ({"store": {"root": "relative/folder"}}, "store.root"),
        ({"store": {"lease_s": -1}}, "store.lease_s"),
        ({"video": {"max_queued_bytes": 1000}}, "video.max_queued_bytes"),
        ({"limits": {"max_tokens": 200000}, "eager": {"max_batch_tokens": 200000}}, "image.max_queued_bytes"),
    ],
)
def test_refusals_name_the_setting(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Settings(**arguments)
