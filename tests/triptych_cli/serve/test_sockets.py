"""The folder of a stack's sockets lives as long as the stack, whatever its process id means to others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import running
from triptych_cli.serve.sockets import socket_folder

_OTHER = """
import sys
from triptych_cli.serve.sockets import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def _folders(tmp_path: Path) -> set[str]:
    return {str(path) for path in tmp_path.rglob("*.sockets")}


def test_a_living_stack_keeps_its_folder_beside_others(tmp_path: Path) -> None:
    with running(sys.executable, "-c", _OTHER, **PIPES) as other:
        assert other.stdin is not None and other.stdout is not None
        theirs = other.stdout.readline().strip()
        (Path(theirs) / "engine-0.sock").touch()
        for _ in range(50):
            with socket_folder() as folder:
                assert _folders(tmp_path) == {theirs, str(folder)}
        assert (Path(theirs) / "engine-0.sock").exists()
        other.stdin.close()
        assert other.wait() == 0
    assert _folders(tmp_path) == set()


def test_the_folder_of_a_killed_stack_is_removed_by_the_next(tmp_path: Path) -> None:
    with running(sys.executable, "-c", _OTHER, **PIPES) as other:
        assert other.stdout is not None
        theirs = other.stdout.readline().strip()
        other.kill()
    assert _folders(tmp_path) == {theirs}
    with socket_folder() as folder:
        assert _folders(tmp_path) == {str(folder)}
