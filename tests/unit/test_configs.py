"""Every ready config is one that Serve and our own schema take, and the Kubernetes files have what their kinds need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from app.__main__ import grace_s
from app.ingress import Ingress
from configs.settings import Settings
from deployments.autoscaling import QueuedWorkPolicy

ROOT = Path(__file__).parents[2]
RAYSERVICE = ROOT / "configs" / "kuberay" / "rayservice.yaml"
SERVE = {
    path.name: yaml.safe_load(path.read_text())
    for path in [ROOT / "serve_config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))]
}
KUBERNETES = {document["kind"]: document for document in yaml.safe_load_all(RAYSERVICE.read_text())}
SERVE["rayservice.yaml"] = yaml.safe_load(KUBERNETES["RayService"]["spec"]["serveConfigV2"])
DEPLOYMENTS = {"Ingress", "ImageGraph", "VideoGraph", "Eager"}


def test_the_ready_configs_are_all_here() -> None:
    assert set(SERVE) == {"serve_config.yaml", "one_gpu.yaml", "multi_gpu.yaml", "cluster.yaml", "rayservice.yaml"}


@pytest.mark.parametrize("name", SERVE)
def test_serve_and_our_settings_take_it(name: str) -> None:
    schema = ServeDeploySchema.model_validate(SERVE[name])
    (application,) = schema.applications
    assert (application.import_path, application.route_prefix) == ("app.main:build", "/")
    Settings.model_validate(application.args)
    assert {d.name for d in application.deployments} == DEPLOYMENTS
    assert schema.http_options.host == ("0.0.0.0" if name == "rayservice.yaml" else "127.0.0.1")


@pytest.mark.parametrize("name", SERVE)
def test_the_ingress_refuses_before_serve_does(name: str) -> None:
    (application,) = SERVE[name]["applications"]
    (ingress,) = [d for d in application["deployments"] if d["name"] == "Ingress"]
    serves = ingress.get("max_ongoing_requests", Ingress.max_ongoing_requests)
    limits = Settings.model_validate(application["args"]).limits
    assert serves >= 2 * limits.max_items_in_flight
    assert grace_s(SERVE[name]) >= limits.deadline_s
    assert SERVE[name]["http_options"]["request_timeout_s"] > limits.deadline_s


def test_the_grace_of_a_config_is_its_ingresss() -> None:
    assert grace_s({"applications": [{}]}) == 120
    deployments = [{"name": "Eager", "graceful_shutdown_timeout_s": 9}, {"name": "Ingress"}]
    assert grace_s({"applications": [{"deployments": deployments}]}) == 120
    deployments[1]["graceful_shutdown_timeout_s"] = 7
    assert grace_s({"applications": [{"deployments": deployments}]}) == 7


@pytest.mark.parametrize("name", SERVE)
def test_autoscaling_is_possible(name: str) -> None:
    for deployment in SERVE[name]["applications"][0]["deployments"]:
        written = deployment.get("autoscaling_config")
        if written is None:
            assert deployment["num_replicas"] >= 1
            continue
        assert set(written) <= set(AutoscalingConfig.model_fields)
        policy = AutoscalingConfig(**written).policy  # imports what it names
        if not policy.is_default_policy_function():
            assert policy.get_policy().__name__ == QueuedWorkPolicy.__name__
            policy.get_policy()(**policy.policy_kwargs)
            # The ingress reports no work: it can only be scaled by requests.
            assert deployment["name"] != "Ingress"


@pytest.mark.parametrize("name", SERVE)
def test_updates_start_successors_first(name: str) -> None:
    assert all(d["max_surge_percent"] > 0 for d in SERVE[name]["applications"][0]["deployments"])


def test_one_gpu_holds_all_pools_and_any_successor() -> None:
    deployments = SERVE["one_gpu.yaml"]["applications"][0]["deployments"]
    parts = [d["ray_actor_options"].get("num_gpus", 0) for d in deployments]
    assert sum(parts) + max(parts) <= 1


def test_the_kubernetes_config_is_the_clusters() -> None:
    own, cluster = dict(SERVE["rayservice.yaml"]), dict(SERVE["cluster.yaml"])
    del own["http_options"], cluster["http_options"]
    assert own == cluster


def pod_specs() -> dict[str, dict[str, Any]]:
    cluster = KUBERNETES["RayService"]["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]} | {g["groupName"]: g for g in cluster["workerGroupSpecs"]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


class TestRayService:
    def test_kinds(self) -> None:
        assert {kind: d["apiVersion"] for kind, d in KUBERNETES.items()} == {
            "RayService": "ray.io/v1",
            "PodMonitor": "monitoring.coreos.com/v1",
        }
        assert all(re.fullmatch(r"[a-z0-9-]+", d["metadata"]["name"]) for d in KUBERNETES.values())
        assert set(KUBERNETES["RayService"]["spec"]) <= {
            "upgradeStrategy",
            "rayClusterDeletionDelaySeconds",
            "serveConfigV2",
            "serveService",
            "rayClusterConfig",
        }

    def test_cluster(self) -> None:
        cluster = KUBERNETES["RayService"]["spec"]["rayClusterConfig"]
        assert cluster["enableInTreeAutoscaling"] is True
        assert cluster["autoscalerOptions"]["version"] == "v2"
        assert cluster["authOptions"] == {"mode": "token"}
        assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        for group in cluster["workerGroupSpecs"]:
            assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            assert all(isinstance(v, str) for v in group["rayStartParams"].values())

    def test_every_selected_label_has_a_group_that_the_replica_fits(self) -> None:
        groups = KUBERNETES["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        for deployment in SERVE["rayservice.yaml"]["applications"][0]["deployments"]:
            options = deployment["ray_actor_options"]
            (group,) = [g for g in groups if g["labels"] == options["label_selector"]]
            limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
            assert options["num_cpus"] <= int(limits["cpu"])
            assert options.get("num_gpus", 0) <= int(limits.get("nvidia.com/gpu", 0))

    def test_pods(self) -> None:
        for spec in pod_specs().values():
            (container,) = spec["containers"]
            assert {"name", "image", "env", "resources", "ports", "volumeMounts"} <= set(container)
            assert container["resources"]["requests"] == container["resources"]["limits"]
            env = {entry["name"]: entry["value"] for entry in container["env"]}
            assert all(isinstance(value, str) for value in env.values())
            assert env["RAY_USAGE_STATS_ENABLED"] == "0"
            assert env["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
            assert env["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == "app.middleware.at_proxy"
            limits = Settings.model_validate(SERVE["rayservice.yaml"]["applications"][0]["args"]).limits
            assert int(env["FOVEAL_MAX_BODY_BYTES"]) == limits.max_body_bytes
            volumes = {v["name"]: v for v in spec["volumes"]}
            mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
            assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"

    def test_the_image_name_is_one_and_what_the_dockerfile_builds(self) -> None:
        (image,) = {spec["containers"][0]["image"] for spec in pod_specs().values()}
        dockerfile = (RAYSERVICE.parent / "Dockerfile").read_text()
        assert f"-t {image} ." in dockerfile.splitlines()[0]
        copied = re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE)
        assert all((ROOT / name).exists() for names in copied for name in names.split())
        assert {"encoder", "deployments", "app", "configs"} <= {name for names in copied for name in names.split()}

    def test_the_monitor_scrapes_a_port_that_every_pod_exports(self) -> None:
        (endpoint,) = KUBERNETES["PodMonitor"]["spec"]["podMetricsEndpoints"]
        cluster = KUBERNETES["RayService"]["spec"]["rayClusterConfig"]
        for spec in pod_specs().values():
            ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
            assert ports[endpoint["port"]] == 8080
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert group["rayStartParams"]["metrics-export-port"] == "8080"
