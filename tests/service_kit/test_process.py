from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service_kit.process import process_environment

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("GRPC_EXPERIMENTS", "GRPC_VERBOSITY", "GRPC_ENABLE_FORK_SUPPORT")


def prepared(role: str, **given: str) -> dict[str, str]:
    """The environment of a fresh process after `prepare_process`, and whether it has grpc imported."""
    program = (
        "import json, os, sys\n"
        "from service_kit.process import prepare_process\n"
        f"prepare_process({role!r})\n"
        "print(json.dumps({**os.environ, 'imported': str('grpc' in sys.modules)}))"
    )
    env = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, check=True, text=True
    ).stdout
    variables: dict[str, str] = json.loads(output)
    return variables


ALL_OFF = "-event_engine_client,-event_engine_listener,-event_engine_dns"


@pytest.mark.parametrize(
    ("role", "experiments"),
    [
        ("engine", ALL_OFF),
        ("coordinator", ALL_OFF),
        ("frontend", "-event_engine_client"),
        ("client", "-event_engine_client"),
    ],
)
def test_each_role_sets_what_grpc_reads_at_its_import(role: str, experiments: str) -> None:
    variables = prepared(role)
    assert [variables[name] for name in NAMES] == [experiments, "ERROR", "0"]
    assert variables["imported"] == "False"


def test_what_the_user_has_set_stays() -> None:
    assert prepared("engine", GRPC_VERBOSITY="DEBUG")["GRPC_VERBOSITY"] == "DEBUG"


def test_a_copy_of_the_environment_changes_nothing() -> None:
    copy = process_environment()
    copy["TRIPTYCH_TEST_ONLY"] = "1"
    assert "TRIPTYCH_TEST_ONLY" not in process_environment()
    assert copy["PATH"] == os.environ["PATH"]
