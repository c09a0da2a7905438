"""What a light image holds: a venv with one extra starts its service, without torch and foreign names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.processes import running

pytestmark = pytest.mark.network

SHIPPED = ("service_kit", "coordinator_svc", "frontend_svc", "engine_svc", "triptych_client", "launcher")


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [("coordinator", []), ("frontend", ["--engine", "127.0.0.1:1"])],
    ids=["coordinator", "frontend"],
)
def test_a_light_image_starts_its_service(
    extra: str, arguments: list[str], wheel: Path, tmp_path: Path
) -> None:
    bin_folder = installed(wheel, extra, tmp_path)
    site_packages = next(tmp_path.glob("venv/lib/python*/site-packages"))
    packages = {folder.name for folder in site_packages.iterdir()}
    assert packages & {"torch", "transformers", "numpy", "triton", "kernels", "protos", "tests"} == set()
    assert packages >= {*SHIPPED, "triptych", "triptych_kernels"}
    page = Path("frontend_svc/ui/static")
    assert {one.name for one in (site_packages / page).iterdir()} == {
        one.name for one in (ROOT / page).iterdir()
    }
    reader, writer = os.pipe()
    command = [str(bin_folder / "triptych"), extra, "--port", "0", "--announce-fd", str(writer), *arguments]
    # Started elsewhere, so that nothing of the source tree is found by chance.
    with running(*command, cwd=tmp_path, pass_fds=[writer]) as process:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            line = pipe.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert json.loads(line)["service"] == extra


def installed(wheel: Path, extra: str, folder: Path) -> Path:
    """Install the wheel with one extra into a fresh venv, and return its bin folder."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    bin_folder = folder / "venv" / "bin"
    pip = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = f"triptych[{extra}] @ {wheel.as_uri()}"
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), wanted], check=True)
    return bin_folder
