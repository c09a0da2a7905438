"""The manifests of deploy/kubernetes name ports, health names, options and images that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.test_options import SERVICES, config_class
from tests.compose.files import CPU_FILE, ROOT, read
from triptych.api.v1 import (
    chat_pb2,
    embedding_pb2,
    inference_pb2,
    model_pb2,
    request_pb2,
    tokenizer_pb2,
)
from triptych_cli.services import READINESS
from triptych_kit.config import load_config

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
WORKLOADS = ("Deployment", "StatefulSet")
PUBLIC = (chat_pb2, embedding_pb2, inference_pb2, model_pb2, request_pb2, tokenizer_pb2)
GRPC_PORTS = {service: config_class(service).__dataclass_fields__["port"].default for service in SERVICES}


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


ALL = [(path.name, item) for path in FILES for item in objects(path)]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    found = [item for _, item in ALL if item["kind"] in kinds]
    assert found
    return found


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = workload["spec"]["template"]
    return template["spec"]


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container with its pod."""
    pods = [pod_of(workload) for workload in of_kind(*WORKLOADS)]
    return [(pod, container) for pod in pods for container in pod["containers"]]


def config_of(container: dict[str, Any]) -> Any:
    """The configuration of a container, as the service reads it: unknown variables are errors."""
    service = container["name"]
    environment = {entry["name"]: str(entry.get("value", "10.0.0.1")) for entry in container["env"]}
    model = ["model"] if service == "engine" else []
    arguments = [*container.get("args", model)]
    return load_config(config_class(service), arguments, service=service, env=environment).config


def test_there_is_a_manifest_for_each_service() -> None:
    assert {path.stem for path in FILES} >= set(SERVICES)
    assert {container["name"] for _, container in containers()} == set(SERVICES)


def test_every_variable_is_an_option_and_every_port_is_listened_at() -> None:
    for _, container in containers():
        config = config_of(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        listened = {"grpc": config.port, "metrics": config.admin_http_port}
        if container["name"] == "frontend":
            listened["http"] = config.http_port
        assert {name: listened[name] for name in ports} == ports
        assert "metrics" not in ports or config.admin_http_host == "0.0.0.0"


def test_probes_ask_for_health_names_that_are_served() -> None:
    for _, container in containers():
        service = container["name"]
        probes = {name: container[name]["grpc"] for name in container if name.endswith("Probe")}
        assert probes or service == "engine"
        for probe in probes.values():
            assert probe["port"] == GRPC_PORTS[service]
            assert probe.get("service") in (None, READINESS[service])
        if probes:
            assert probes["readinessProbe"]["service"] == READINESS[service]
            # A service that loads, or waits for others, is alive.
            assert "service" not in probes["livenessProbe"]
            assert not any("initialDelaySeconds" in container[name] for name in probes)


def test_images_are_those_of_the_compose_file() -> None:
    built = {service["image"] for service in read(CPU_FILE)["services"].values() if "build" in service}
    assert {container["image"] for _, container in containers()} == built


def test_pods_have_the_time_that_their_drains_take_and_no_variables_of_services() -> None:
    for pod, container in containers():
        config = config_of(container)
        hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod["terminationGracePeriodSeconds"] >= hook + config.drain_deadline_s + 5
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_an_engine_beside_a_frontend_outlasts_its_drain_lag() -> None:
    for workload in of_kind("Deployment"):
        beside = {container["name"]: container for container in pod_of(workload)["containers"]}
        if set(beside) == {"frontend", "engine"}:
            hook_s = beside["engine"]["lifecycle"]["preStop"]["sleep"]["seconds"]
            frontend, engine = config_of(beside["frontend"]), config_of(beside["engine"])
            assert hook_s > frontend.drain_lag_s
            assert hook_s + engine.drain_deadline_s > frontend.drain_deadline_s
            assert frontend.engine == (f"{engine.host}:{engine.port}",)


def test_services_choose_pods_that_there_are_and_say_which_protocol_a_port_speaks() -> None:
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in of_kind(*WORKLOADS)]
    for service in of_kind("Service"):
        spec = service["spec"]
        assert spec["selector"] in labels
        component = spec["selector"]["app.kubernetes.io/component"]
        for port in spec["ports"]:
            expected = {"grpc": (GRPC_PORTS[component], "kubernetes.io/h2c"), "http": (8000, "http")}
            assert (port["port"], port["appProtocol"]) == expected[port["name"]]
            assert port["targetPort"] == port["name"]
    for workload in of_kind(*WORKLOADS):
        assert workload["spec"]["selector"]["matchLabels"] == pod_of_labels(workload)


def pod_of_labels(workload: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def test_addresses_of_other_services_are_those_of_services() -> None:
    names = {
        f"{service['metadata']['name']}:{port['port']}"
        for service in of_kind("Service")
        for port in service["spec"]["ports"]
    }
    for _, container in containers():
        coordinator = getattr(config_of(container), "coordinator", None)
        assert coordinator is None or coordinator in names


def test_routes_lead_to_services_and_pools_and_set_no_limit_of_time() -> None:
    targets = {
        (service["metadata"]["name"], port["port"])
        for service in of_kind("Service")
        for port in service["spec"]["ports"]
    } | {
        (pool["metadata"]["name"], port["number"])
        for pool in of_kind("InferencePool")
        for port in pool["spec"]["targetPorts"]
    }
    for route in of_kind("GRPCRoute", "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            assert {(backend["name"], backend["port"]) for backend in rule["backendRefs"]} <= targets
            if route["kind"] == "HTTPRoute":
                assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


def test_the_grpc_route_has_every_public_service() -> None:
    (route,) = of_kind("GRPCRoute")
    routed = {match["method"]["service"] for rule in route["spec"]["rules"] for match in rule["matches"]}
    served = {
        service.full_name for module in PUBLIC for service in module.DESCRIPTOR.services_by_name.values()
    }
    assert routed == served | {"grpc.health.v1.Health"}


def test_a_pool_chooses_its_pods_at_the_port_of_http() -> None:
    (pool,) = of_kind("InferencePool")
    (workload,) = [
        workload
        for workload in of_kind("Deployment")
        if pod_of_labels(workload) == pool["spec"]["selector"]["matchLabels"]
    ]
    (frontend,) = [one for one in pod_of(workload)["containers"] if one["name"] == "frontend"]
    assert pool["spec"]["targetPorts"] == [{"number": config_of(frontend).http_port}]
    assert pool["spec"]["appProtocol"] == "http"


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_a_manifest_begins_with_what_it_is_for(name: str) -> None:
    assert (FOLDER / name).read_text().startswith("# ")
