"""An engine whose model is of a hub: it fetches it, serves it under that name, or says why it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import launcher.tiny_model
from tests.engine_svc.model.loading.fake_hub import FakeHub, folder_files, serve

_MODEL = Path(launcher.tiny_model.__file__).parent / "weights"
_PATIENCE_S = 120.0


def start(*arguments: str, hub: FakeHub, home: Path) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
    }
    command = [sys.executable, "-m", "engine_svc.main", *arguments, "--port=0", "--kv-cache-memory=64M"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "READY" in line:
            return lines
    raise AssertionError("".join(lines))


def test_a_model_of_the_hub_is_fetched_and_served_under_its_name(tmp_path):
    with serve(FakeHub(folder_files(_MODEL))) as hub:
        process = start("org/tiny", "--num-threads=1", hub=hub, home=tmp_path)
        try:
            lines = until_ready(process)
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=_PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 0, rest
    assert "org/tiny" in lines[-1]
    assert any("downloading" in line for line in lines)
    assert "model.safetensors" in hub.downloaded


@pytest.mark.parametrize(
    ("arguments", "hub", "reason"),
    [
        (["org/nothing"], FakeHub({}), "org/nothing is neither a folder here nor a model at"),
        (
            ["org/tiny"],
            FakeHub({"model.safetensors": b""}, gated=True),
            "org/tiny is gated: accept its licence at",
        ),
        ([str(_MODEL), "--revision=v2"], FakeHub({}), "revision is v2, but"),
        (["no/such/folder"], FakeHub({}), "no/such/folder is not a folder"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_exit_code_2(tmp_path, arguments, hub, reason):
    with serve(hub):
        process = start(*arguments, hub=hub, home=tmp_path)
        _, errors = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("triptych engine: ")
    assert reason in last
