"""The compose files are valid, and name only what the services know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.test_options import SERVICES, config_class
from tests.compose.files import CPU_FILE, GPU_FILE, ROOT, flags_of, read, variables_of
from tests.promql import parse
from triptych_kit.config import ConfigError, load_config
from triptych_kit.security.options import SecurityOptions

FILES = (GPU_FILE, CPU_FILE)
CPU = f"-f {CPU_FILE.name}"
# Read by libraries, not by us.
FOREIGN = {"HF_TOKEN", "HF_HUB_OFFLINE", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_METRICS_EXPORTER"}
DEPLOY_GUIDE = ROOT / "docs" / "deploy.md"


def service_kind(name: str) -> str | None:
    """Which of our services that is; None for one of others."""
    kind = name.partition("-")[0]
    return kind if kind in SERVICES else None


def own_services(path: Path) -> list[tuple[str, dict[str, Any]]]:
    services = read(path)["services"]
    return [(name, service) for name, service in services.items() if service_kind(name)]


def checked(content: Any, path: Path) -> subprocess.CompletedProcess[str]:
    """What the schema of compose says of a file with this content, which is written to `path`."""
    path.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_follows_the_schema_of_compose(path: Path, tmp_path: Path) -> None:
    done = checked(read(path), tmp_path / path.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_that_does_not_follow_it_is_refused(tmp_path: Path) -> None:
    wrong = {"services": {"frontend": {"immage": "x"}}}
    assert checked(wrong, tmp_path / "wrong.yml").returncode == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_of_a_service_is_an_option_of_it(path: Path) -> None:
    for name, service in own_services(path):
        kind = service_kind(name)
        environment = service.get("environment", {})
        own = {key: str(value) for key, value in environment.items() if key not in FOREIGN}
        assert [key for key in own if not key.startswith(f"TRIPTYCH_{kind}_".upper())] == []
        # Unknown variables and flags, and values of the wrong kind, are errors.
        model = [] if kind != "engine" or flags_of(service) else ["model"]
        load_config(config_class(str(kind)), [*flags_of(service), *model], service=str(kind), env=own)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_service_of_ours_runs_with_no_more_rights_than_it_needs(path: Path) -> None:
    for name, service in [*own_services(path), ("keys", read(path)["services"]["keys"])]:
        assert service["read_only"] is True
        # What an engine takes is up to its model, and to options.
        assert ("mem_limit" in service) == (service_kind(name) != "engine")
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.get("privileged", False)
        assert "user" not in service, "the image says who it runs as"
        for mount in service["tmpfs"]:
            options = mount.partition(":")[2].split(",")
            assert "exec" not in options, "nothing is run from where everything may be written"
            assert any(option.startswith("size=") for option in options)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_image_is_built_twice_at_a_time(path: Path) -> None:
    # Compose builds all services at once, and a name that two builds store in the same moment is an error.
    services = {**dict(own_services(path)), "keys": read(path)["services"]["keys"]}
    builders = [service["image"] for service in services.values() if "build" in service]
    assert sorted(builders) == sorted({service["image"] for service in services.values()})
    others = [service for service in services.values() if "build" not in service]
    assert others
    assert {service["pull_policy"] for service in others} == {"never"}
    assert [service for service in services.values() if "build" in service and "profiles" in service] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_service_gets_longer_to_stop_than_its_drain_may_take(path: Path) -> None:
    for name, service in own_services(path):
        drain_s = config_class(str(service_kind(name))).__dataclass_fields__["drain_deadline_s"].default
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        assert grace_s >= drain_s + 5, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_engine_has_a_number_of_its_own(path: Path) -> None:
    engines = [service for name, service in own_services(path) if service_kind(name) == "engine"]
    numbers = [service["environment"]["TRIPTYCH_ENGINE_INDEX"] for service in engines]
    assert numbers == [str(number) for number in range(len(engines))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_service_waits_for_another_to_start(path: Path) -> None:
    assert [name for name, service in own_services(path) if "depends_on" in service] == []
    # Without its keys a service exits, and is started again until they are there.
    assert {service["restart"] for _, service in own_services(path)} == {"on-failure"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_service_needs_keys_and_only_one_container_can_write_them(path: Path) -> None:
    keys = read(path)["services"]["keys"]
    assert keys["entrypoint"] == ["triptych", "key", "init", "/keys"]
    assert keys["network_mode"] == "none"
    # It ends when the keys are there: no health check would find it.
    assert keys["healthcheck"] == {"disable": True}
    assert keys["volumes"] == ["keys:/keys"]
    for name, service in own_services(path):
        kind = str(service_kind(name))
        assert "keys:/keys:ro" in service["volumes"]
        given = {key: str(value) for key, value in service["environment"].items() if key not in FOREIGN}
        model = [] if kind != "engine" or flags_of(service) else ["model"]
        config = load_config(config_class(kind), [*flags_of(service), *model], service=kind, env=given).config
        assert isinstance(config, SecurityOptions)
        assert (config.api_keys, config.insecure) == ("/keys/keys.yaml", False)
        # A coordinator connects to no other service.
        expected = None if kind == "coordinator" else f"/keys/{kind}.key"
        assert config.peer_api_key_file == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_two_variables_let_clients_in_without_a_key(path: Path) -> None:
    def loaded(**variables: str) -> Any:
        environment = read(path, variables)["services"]["frontend"]["environment"]
        given = {key: str(value) for key, value in environment.items() if key not in FOREIGN}
        return load_config(config_class("frontend"), [], service="frontend", env=given).config

    assert loaded(FRONTEND_API_KEYS="none", FRONTEND_INSECURE="true").api_keys is None
    with pytest.raises(ConfigError, match="--insecure"):
        loaded(FRONTEND_API_KEYS="none")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_external_variable_is_documented_in_the_guide(path: Path) -> None:
    guide = DEPLOY_GUIDE.read_text()
    assert [name for name in variables_of(path) if f"`{name}`" not in guide] == []


def test_what_differs_between_the_files_is_listed_in_the_guide() -> None:
    gpu, cpu = read(GPU_FILE)["services"], read(CPU_FILE)["services"]
    for name in ("keys", "coordinator", "frontend"):
        assert gpu[name] == cpu[name]
    keys = {*gpu["engine-0"], *cpu["engine-0"]}
    different = {key for key in keys if gpu["engine-0"].get(key) != cpu["engine-0"].get(key)}
    table = DEPLOY_GUIDE.read_text().split("## GPU file and CPU file")[1].split("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)}
    assert listed == different | {"services"}


@pytest.mark.parametrize(
    ("answer", "file"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", ""),
        # Installed, but without a driver or a device.
        (
            "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
            CPU,
        ),
        ("echo 'No devices were found'; exit 6", CPU),
        ("exit 127", CPU),
    ],
    ids=["a GPU", "no driver", "no device", "nothing"],
)
def test_up_takes_the_file_that_fits_the_host(answer: str, file: str, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "--no-print-directory", "--dry-run", "up", "ARGS=-d"]
    completed = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout.split() == f"docker compose {file} up -d".split()


def test_every_engine_of_a_gpu_host_has_its_own_gpu_and_rank() -> None:
    engines = [service for name, service in own_services(GPU_FILE) if service_kind(name) == "engine"]
    devices = [service["deploy"]["resources"]["reservations"]["devices"][0] for service in engines]
    assert {(device["driver"], tuple(device["capabilities"])) for device in devices} == {("nvidia", ("gpu",))}
    assert [device["device_ids"] for device in devices] == [[str(rank)] for rank in range(len(engines))]
    ranks = [service["environment"]["TRIPTYCH_ENGINE_DATA_PARALLEL_RANK"] for service in engines]
    assert ranks == [str(rank) for rank in range(len(engines))]
    assert len({tuple(flags_of(service)) for service in engines}) == 1


def test_every_file_that_is_mounted_exists() -> None:
    services = read(GPU_FILE)["services"].values()
    mounted = [mount.split(":")[0] for service in services for mount in service.get("volumes", ())]
    files = [mount for mount in mounted if mount.startswith("./")]
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_a_panel_asks_for_what_the_collector_makes() -> None:
    collector = yaml.safe_load((ROOT / "deploy" / "otel-collector.yml").read_text())
    spans = collector["connectors"]["spanmetrics"]
    labels = {dimension["name"].replace(".", "_") for dimension in spans["dimensions"]}
    board = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "operators.json").read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    asked = [target["expr"] for target in targets if target["exemplar"]]
    assert asked
    for expr in asked:
        (selector,), grouped = parse(expr.replace("$__rate_interval", "1m"))
        assert selector.metric == f"{spans['namespace']}_duration_milliseconds_bucket"
        # The span of a whole request has the name of its model, which parts of it have not.
        assert set(selector.matchers) == {"gen_ai_request_model"} <= labels
        assert grouped == {"le"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_prometheus_reaches_the_metrics_of_every_service_and_the_host_does_not(path: Path) -> None:
    (job,) = (
        job
        for job in yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
        if job["job_name"] == "triptych"
    )
    (found,) = job["dns_sd_configs"]
    assert job["authorization"] == {"credentials_file": "/keys/metrics.key"}
    for name, service in own_services(path):
        prefix = f"TRIPTYCH_{service_kind(name)}_ADMIN_HTTP".upper()
        assert name in found["names"]
        assert service["environment"][f"{prefix}_HOST"] == "0.0.0.0"
        assert service["environment"][f"{prefix}_PORT"] == str(found["port"])
        assert str(found["port"]) in service["expose"]
        assert [port for port in service.get("ports", ()) if port.endswith(f":{found['port']}")] == []


def test_prometheus_may_read_its_key_and_write_its_own_files() -> None:
    prometheus = read(GPU_FILE)["services"]["prometheus"]
    assert "keys:/keys:ro" in prometheus["volumes"]
    # The user of its image, whom the volume `prometheus` belongs to, in the group of the services.
    dockerfile = (ROOT / "Dockerfile").read_text()
    owner = re.search(r"install -d -m 0755 -o (\d+) -g (\d+) /keys\n", dockerfile)
    assert owner is not None
    assert prometheus["user"] == f"65534:{owner[2]}"
    assert f"USER {owner[1]}:{owner[2]}\n" in dockerfile


def test_grafana_opens_with_a_dashboard_and_changes_nothing() -> None:
    environment = read(GPU_FILE)["services"]["grafana"]["environment"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / "deploy" / "grafana" / "dashboards" / home.name).exists()
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_metrics_distinguish_engines_and_outlive_their_processes() -> None:
    spans = yaml.safe_load((ROOT / "deploy" / "otel-collector.yml").read_text())["connectors"]["spanmetrics"]
    assert "service.instance.id" in {dimension["name"] for dimension in spans["dimensions"]}
    # Counters of two processes of one service would be one series, and that would go back and forth.
    assert spans["resource_metrics_key_attributes"] == ["service.name", "service.instance.id"]


def test_a_point_of_a_panel_leads_to_its_trace() -> None:
    collector = yaml.safe_load((ROOT / "deploy" / "otel-collector.yml").read_text())
    assert collector["connectors"]["spanmetrics"]["exemplars"]["enabled"] is True
    assert collector["exporters"]["prometheus"]["enable_open_metrics"] is True
    services = read(GPU_FILE, {"JAEGER_PORT": "17000"})["services"]
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    folder = ROOT / "deploy" / "grafana" / "provisioning" / "datasources"
    sources = {
        source["uid"]: source
        for source in yaml.safe_load((folder / "sources.yml").read_text())["datasources"]
    }
    (destination,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id"
    # Grafana replaces what is in its own environment, and makes one dollar sign of two.
    assert destination["url"].startswith("http://127.0.0.1:$JAEGER_PORT/trace/$${__value.raw}")
    assert str(services["grafana"]["environment"]["JAEGER_PORT"]) == "17000"
    assert services["jaeger"]["ports"] == ["127.0.0.1:17000:16686"]


def test_a_variable_divides_each_engine_over_gpus() -> None:
    services = yaml.safe_load(GPU_FILE.read_text())["services"]
    engines = [service for name, service in services.items() if service_kind(name) == "engine"]
    flag = "--tensor-parallel-size=${TENSOR_PARALLEL_SIZE:-1}"
    assert [flags_of(service).count(flag) for service in engines] == [1] * len(engines)
