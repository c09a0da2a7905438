"""A suite fails for a skip that the list does not have, of a test or of a whole module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.allowed_skips import is_allowed
from tests.processes import source_environment

TEST = "import pytest\ndef test_it() -> None:\n    pytest.skip('because')\n"
MODULE = "import pytest\npytest.skip('because', allow_module_level=True)\n"


@pytest.mark.parametrize("content", [TEST, MODULE], ids=["test", "module"])
def test_another_skip_fails_the_suite_and_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "test_it.py").write_text(content + "def test_beside() -> None:\n    pass\n")
    (tmp_path / "test_other.py").write_text("def test_beside() -> None:\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        f"--rootdir={tmp_path}",
        str(tmp_path),
    ]
    run = subprocess.run(
        command, env=source_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert "skips that tests/allowed_skips.py does not allow" in run.stdout
    assert "because" in run.stdout and "passed" in run.stdout


def test_what_hardware_decides_is_allowed_in_its_place_alone() -> None:
    reason = "Skipped: needs a CUDA device"
    assert is_allowed("tests/gpu/test_runner.py::test_it", reason)
    assert not is_allowed("tests/system/test_life.py::test_it", reason)
    assert not is_allowed("tests/gpu/test_runner.py::test_it", "Skipped: because")
