"""The verb `collect-env`: what a report of a bug needs, without secrets, on any machine."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from tests.triptych_cli.fakes import fake_frontend, triptych
from triptych_cli.services import SERVICES, config_of
from triptych_cli.verbs import collect_env
from triptych_cli.verbs.collect_env import collected, masked, run_collect_env
from triptych_kit.config import flag_names
from triptych_kit.limits import PUBLIC

_PARTS = {
    *("triptych", "python", "packages", "torch", "system", "cpu", "memory", "gpus", "container", "limits"),
    *("environment", "doctor"),
}
# Found by whatever imports them, as in an image without torch.
_NOT_INSTALLED = "raise ImportError('not installed here')\n"


async def test_it_has_all_parts_and_tests_links_where_torch_is_not_installed(tmp_path: Path) -> None:
    for package in ("torch", "triton", "transformers", "numpy", "psutil", "huggingface_hub", "safetensors"):
        (tmp_path / f"{package}.py").write_text(_NOT_INSTALLED)
    environment = {"PYTHONPATH": ":".join((str(tmp_path), *sys.path[1:])), "HF_TOKEN": "hf_0123456789"}
    async with fake_frontend() as served:
        targets = [f"--target={target}" for target in (served.url, "127.0.0.1:1", "nowhere")]
        outcome = await triptych("collect-env", "--json", *targets, environment=environment)
    report = json.loads(outcome.out)
    assert (outcome.exit_code, outcome.err) == (1, "")
    assert set(report) == {*_PARTS, "links"}
    assert report["packages"]["grpcio"]
    assert report["torch"] == {"cannot be imported": "not installed here"}
    assert report["environment"]["HF_TOKEN"] == "***"
    assert "hf_0123456789" not in outcome.out
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert report["limits"]["NOFILE"] == f"{soft} of {hard}"
    link = report["links"][served.url]
    assert (link["service"], link["status"]) == ("frontend", "SERVING")
    times = link["rtt_ms"]
    assert 0 < times["min"] <= times["median"] <= times["p99"]
    assert link["max_message_bytes"] == PUBLIC.max_receive_bytes
    assert "bytes passed in" in link["large_message"]
    assert f"{PUBLIC.keepalive_time_ms} ms" in link["keepalive"]
    assert report["links"]["127.0.0.1:1"]["error"].startswith("UNAVAILABLE: ")
    assert "is not an address" in report["links"]["nowhere"]["error"]


def test_without_targets_it_is_text_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_collect_env({"OTEL_SERVICE_NAME": "here"}, (), 1.0, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.removesuffix(":") for line in lines if not line.startswith(" ")} == _PARTS
    assert "  OTEL_SERVICE_NAME  here" in lines


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        (
            "echo '0, NVIDIA H200, 143771 MiB, 580.1, 9.0, Disabled'",
            "NVIDIA H200, 143771 MiB, 580.1, 9.0, Disabled",
        ),
        ("echo 'NVIDIA-SMI has failed, make sure that the driver runs'; exit 9", None),
    ],
    ids=["a GPU", "no driver"],
)
def test_gpus_are_those_of_the_driver(
    program: str, shown: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert collected({})["gpus"].get("0") == shown


def test_limits_of_the_container_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("4294967296\n")
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr(collect_env, "_CONTROL_GROUP", tmp_path)
    container = collected({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})["container"]
    assert (container["memory.max"], container["cpu.max"]) == ("4294967296", "200000 100000")
    assert "kubernetes" in container["kind"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_abc", "***"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic abc", "***"),
        ("TRIPTYCH_FRONTEND_API_KEY", "abc", "***"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://me:pw@host:4317/v1?sig=abc", "https://***@host:4317/v1?***"),
        ("https_proxy", "http://me:pw@proxy:3128", "http://***@proxy:3128"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=1,api_key=abc,b.secret=def,c=2", "a=1,api_key=***,b.secret=***,c=2"),
        ("TRIPTYCH_ENGINE_MODEL", "hub/hf_0123456789abc", "hub/***"),
        ("TRIPTYCH_ENGINE_MAX_NUM_BATCHED_TOKENS", "8192", "8192"),
        ("OTEL_SERVICE_NAME", "engine-0", "engine-0"),
        ("https_proxy", "me:pw@proxy:3128", "***@proxy:3128"),
        ("https_proxy", "http://me:p@s/s@proxy:3128", "http://***@proxy:3128"),
        ("NO_PROXY", "localhost,10.0.0.0/8,::1", "localhost,10.0.0.0/8,::1"),
        ("PYTHONPATH", "/a:/b@c", "/a:/b@c"),
        ("HF_TOKEN_2", "abc", "***"),
        ("HF_TOKEN_PATH", "/run/token", "/run/token"),
        ("TRIPTYCH_DB_PWD", "abc", "***"),
        ("TRIPTYCH_X", '{"api_key": "abc", "a": 1}', '{"api_key": "***, "a": 1}'),
        ("TRIPTYCH_X", "x-api-key: abc", "x-api-key: ***"),
        ("TRIPTYCH_X", "a=api_key=abc", "a=api_key=***"),
        ("TRIPTYCH_X", "github_pat_0123456789", "***"),
        ("TRIPTYCH_X", "AKIAIOSFODNN7EXAMPLE", "***"),
    ],
)
def test_secrets_are_masked(name: str, value: str, shown: str) -> None:
    assert masked({name: value}) == {name: shown}


def test_no_value_controls_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_env, "collected", masked)
    assert run_collect_env({"HF_HOME": "x\x1b[2J\n\u202e\ud800"}, (), 1.0, as_json=False) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("HF_HOME  x") and shown.rstrip("\n").isprintable()


def test_variables_of_others_are_left_out() -> None:
    assert masked({"AWS_SECRET_ACCESS_KEY": "abc", "HOME": "/root", "DATABASE_URL": "x://u:p@h"}) == {}


def test_the_value_of_every_option_is_shown() -> None:
    environment = {
        f"TRIPTYCH_{service}_{flag.removeprefix('--')}".upper().replace("-", "_"): "value"
        for service in SERVICES
        for flag in flag_names(config_of(service))
        # Where a key is; what has such a name is never shown.
        if "key" not in flag
    }
    assert masked(environment) == dict(sorted(environment.items()))
