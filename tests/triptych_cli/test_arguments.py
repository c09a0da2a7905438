"""Whose an argument of `serve` is, and which model an engine gets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from triptych_cli.arguments import EMBEDDED_NAME, parse_serve, with_model
from triptych_cli.flags import split_flags
from triptych_cli.services import config_of, embedded_model
from triptych_kit.config import ConfigError, load_config, option


def test_without_a_model_the_embedded_one_is_served_under_its_name_with_one_thread() -> None:
    assert with_model(["--max-num-seqs", "4"]) == [
        str(embedded_model()),
        f"--served-model-name={EMBEDDED_NAME}",
        "--num-threads=1",
        "--max-num-seqs",
        "4",
    ]


def test_a_model_that_is_named_stays() -> None:
    assert with_model(["--max-num-seqs", "4", "some/model"]) == ["--max-num-seqs", "4", "some/model"]
    assert with_model(["--no-enable-prefix-caching", "some/model"])[-1] == "some/model"


@pytest.mark.parametrize("spelling", [["--config", "engine.yaml"], ["--config=engine.yaml"]])
def test_the_model_that_a_file_may_name_is_left_to_it(spelling: list[str]) -> None:
    assert with_model(spelling) == spelling


def test_what_the_user_says_of_the_embedded_model_counts() -> None:
    arguments = with_model(["--served-model-name=mine", "--num-threads", "2"])
    assert arguments == [str(embedded_model()), "--served-model-name=mine", "--num-threads", "2"]


def test_flags_and_model_of_serve_reach_their_services(tmp_path: Path) -> None:
    model = str(tmp_path)
    serving = parse_serve([model, "-dp", "2", "--port=0", "--max-num-seqs", "4", "--log-level", "debug"])
    config = serving.config
    assert (config.model, config.data_parallel_size, config.port) == (model, 2, 0)
    assert serving.flags["engine"][:-1] == [model, "--max-num-seqs", "4", "--log-level", "debug"]
    assert serving.flags["frontend"] == ["--log-level", "debug"]
    assert serving.flags["coordinator"] == ["--log-level", "debug"]


def test_engines_that_share_a_machine_share_its_cores(tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    flags = parse_serve([str(tmp_path), "-dp", "2"]).flags["engine"]
    assert flags[-1] == f"--num-threads={max(1, num_cores // 2)}"
    assert parse_serve([str(tmp_path)]).flags["engine"] == [str(tmp_path)]
    own = parse_serve([str(tmp_path), "-dp", "2", "--num-threads", "3"]).flags["engine"]
    assert own == [str(tmp_path), "--num-threads", "3"]


@pytest.mark.parametrize(
    ("key", "flags", "added"),
    [
        ("", [], []),
        ("", ["--api-keys=keys.yaml"], ["--scheduling-policy=fair"]),
        ("key-of-all-0123456789", [], ["--scheduling-policy=fair"]),
        ("", ["--api-keys=keys.yaml", "--scheduling-policy=fcfs"], ["--scheduling-policy=fcfs"]),
    ],
)
def test_engines_share_by_tenants_where_there_are_keys_and_no_policy_was_chosen(
    monkeypatch: pytest.MonkeyPatch, key: str, flags: list[str], added: list[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEY", key)
    of_engine = parse_serve(flags).flags["engine"]
    assert [flag for flag in of_engine if flag.startswith("--scheduling-policy")] == added


def test_engines_that_share_experts_get_the_flag_and_their_group_is_known(tmp_path: Path) -> None:
    shared = ["-dp", "2", "--expert-parallel", "--data-parallel-group=moe"]
    serving = parse_serve([str(tmp_path), *shared])
    assert serving.group == "moe"
    assert serving.flags["engine"][1:3] == ["--expert-parallel", "--data-parallel-group=moe"]
    with pytest.raises(ConfigError, match="--expert-parallel is True"):
        parse_serve([str(tmp_path), "--expert-parallel"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--dtype", "float8"], "float8"),
        (["--lease-ms", "1"], "--lease-ms is 1"),
        (["--max-queued-requests", "0"], "--max-queued-requests 0"),
        (["--ready-file", "no-such-folder/ready.json"], "its folder does not exist"),
        (["--ready-file", "/"], "is a folder"),
    ],
)
def test_what_no_service_can_take_is_refused_before_anything_starts(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse_serve(arguments)


@pytest.mark.parametrize(
    ("arguments", "model", "names"),
    [
        (["--served-model-name", "a", "b"], None, ["a", "b"]),
        (["--served-model-name", "a", "b", "model.gguf"], "model.gguf", ["a", "b"]),
        (["--served-model-name", "a", "--served-model-name", "b"], None, ["a", "b"]),
        (["--served-model-name=a", "--served-model-name=b", "org/name"], "org/name", ["a", "b"]),
        (["org/name", "--served-model-name", "a", "some/b", "-dp", "2"], "org/name", ["a", "some/b"]),
        (["--served-model-name", "a", "org/name"], "org/name", ["a"]),
        (["--served-model-name", "a", "b", "org/name", "--verbose"], "org/name", ["a", "b"]),
        (["--served-model-name", "a", "b", "--max-num-seqs", "4", "org/name"], "org/name", ["a", "b"]),
        (["--served-model-name", "a"], None, ["a"]),
    ],
)
def test_the_first_name_is_the_models_and_others_are_aliases(arguments, model, names) -> None:
    serving = parse_serve(arguments)
    assert serving.config.model == model
    assert f"--served-model-name={names[0]}" in serving.flags["engine"]
    assert [flag for flag in serving.flags["frontend"] if "alias" in flag] == [
        f"--model-alias={name}" for name in names[1:]
    ]


@pytest.mark.parametrize(
    ("arguments", "grpc", "http"),
    [
        ([], 50051, 8000),
        (["--port=9000"], 50051, 9000),
        (["--port=9000", "--grpc-port=9001"], 9001, 9000),
        (["--port=9001", "--http-port=9000"], 9001, 9000),
        (["--port=9001", "--no-http"], 9001, None),
        (["--grpc-port=9001"], 9001, 8000),
        (["--port=0"], 0, 0),
        (["--port=0", "--grpc-port=9001"], 9001, 0),
        (["--http-port=0"], 50051, 0),
    ],
)
def test_a_port_alone_is_that_of_http_and_beside_one_of_http_that_of_grpc(arguments, grpc, http) -> None:
    ports = {one.name: one.port for one in parse_serve(arguments).listeners}
    assert (ports["gRPC of frontend-0"], ports.get("HTTP of frontend-0")) == (grpc, http)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port=9000", "--http-port=9000"], r"gRPC of frontend-0 \(--port\) and that of HTTP .* \(--http"),
        (["--port=50051"], r"gRPC of frontend-0 \(--grpc-port\) and that of HTTP of frontend-0 \(--port\)"),
        (
            ["--grpc-port=8000"],
            r"port 8000 is both .* \(--grpc-port\) and .* \(--http-port\): choose another",
        ),
        (
            ["-dp=2", "--data-parallel-external-lb", "--grpc-port=7000", "--port=7001"],
            "port 7001 is both that of gRPC of frontend-1",
        ),
        (["--port=9000", "--admin-http-port=8999"], "metrics of frontend-0"),
        (["--port=9000", "--admin-http-port=8999", "--admin-http-host=0.0.0.0", "--insecure"], "frontend-0"),
        (["--port=1", "--grpc-port=2", "--http-port=3"], "--port is 1, but other flags choose each port"),
        (["--port=1", "--grpc-port=2", "--no-http"], "--port is 1, but other flags choose each port"),
    ],
)
def test_ports_that_collide_are_refused(arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_serve(arguments)


def test_equal_ports_of_different_addresses_do_not_collide() -> None:
    parse_serve(["--host=127.0.0.2", "--port=9000", "--admin-http-port=8999"])


@pytest.mark.parametrize("service", ["coordinator", "engine", "frontend"])
def test_ports_of_a_service_that_collide_are_refused(service: str) -> None:
    flags = {"engine": ["MODEL"], "frontend": ["--engine=a:1"], "coordinator": []}[service]
    with pytest.raises(ConfigError, match=r"port 9000 is both that of gRPC \(--port\) and that of the admin"):
        load_config(config_of(service), [*flags, "--port=9000", "--admin-port=9000"], service=service)


def test_a_file_has_options_of_all_services_below_flags_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "port: 50551\nmax-model-len: 1024\nmax_num_seqs: 8\nenable_prefix_caching: false\n"
        f"model: {tmp_path}\nlog_level: warning\n"
    )
    monkeypatch.setenv("TRIPTYCH_ENGINE_MAX_NUM_SEQS", "4")
    serving = parse_serve(["--port", "50552", "--config", str(file)])
    assert (serving.config.port, serving.config.model) == (50552, str(tmp_path))
    assert serving.flags["engine"] == [
        str(tmp_path), "--max-model-len=1024", "--no-enable-prefix-caching", "--log-level=warning",
    ]  # fmt: skip
    assert serving.flags["frontend"] == serving.flags["coordinator"] == ["--log-level=warning"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "unknown option prot in FILE; did you mean port?"),
        ("coordinator: a:1", "--coordinator is for a service that runs alone"),
        ("port: many", "port in FILE: 'many' is not a whole number"),
        ("[]", "FILE must hold one mapping of options"),
    ],
)
def test_a_file_with_what_cannot_be_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse_serve([f"--config={file}"])
    assert message in str(caught.value).replace(str(file), "FILE")


def test_ranks_of_an_engine_and_vllms_names_of_types_are_the_engines(tmp_path: Path) -> None:
    serving = parse_serve([str(tmp_path), "-tp", "2", "--dtype", "half"])
    assert serving.flags["engine"] == [str(tmp_path), "-tp", "2", "--dtype", "half"]


# Which service a flag of `serve` goes to.


@dataclass(frozen=True)
class OwnConfig:
    model: str | None = option(None, help="model", positional=True)
    port: int = option(1, help="port")
    data_parallel_size: int = option(1, short="dp", help="engines")


@dataclass(frozen=True)
class EngineConfig:
    port: int = option(2, help="port")
    max_num_seqs: int = option(8, help="rows")
    log_level: str = option("info", help="level")
    enable_prefix_caching: bool = option(True, help="reuse")
    admin_port: int = option(0, help="port")


@dataclass(frozen=True)
class FrontendConfig:
    port: int = option(3, help="port")
    log_level: str = option("info", help="level")
    max_queued_requests: int = option(4, help="queue")


SERVICES = {"engine": EngineConfig, "frontend": FrontendConfig}


def test_each_flag_goes_to_every_service_that_has_it() -> None:
    argv = ["--max-num-seqs", "4", "--log-level=debug", "--max-queued-requests", "9"]
    own, routed = split_flags(argv, OwnConfig, SERVICES)
    assert own == []
    assert routed == {
        "engine": ["--max-num-seqs", "4", "--log-level=debug"],
        "frontend": ["--log-level=debug", "--max-queued-requests", "9"],
    }


def test_what_serve_has_itself_stays_with_it() -> None:
    own, routed = split_flags(["some/model", "--port", "0", "-dp", "2"], OwnConfig, SERVICES)
    assert own == ["some/model", "--port", "0", "-dp", "2"]
    assert routed == {"engine": [], "frontend": []}


def test_a_switch_does_not_swallow_the_model() -> None:
    own, routed = split_flags(["--no-enable-prefix-caching", "some/model"], OwnConfig, SERVICES)
    assert own == ["some/model"]
    assert routed["engine"] == ["--no-enable-prefix-caching"]


def test_an_unknown_flag_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown flag --max-num-seq; did you mean --max-num-seqs"):
        split_flags(["--max-num-seq", "4"], OwnConfig, SERVICES)


@pytest.mark.parametrize("flag", ["--admin-port", "--engine", "--coordinator", "--index"])
def test_what_would_contradict_the_launcher_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="runs alone"):
        split_flags([flag, "1"], OwnConfig, SERVICES)


def test_a_flag_without_its_value_is_named() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs needs a value"):
        split_flags(["--max-num-seqs"], OwnConfig, SERVICES)
