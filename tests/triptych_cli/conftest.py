"""The command in the process of its test, supervised processes, and engines guarded against other threads."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.one_owner import guarded_engines, one_owner
from tests.triptych_cli.fakes import Outcome
from tests.triptych_cli.serve.supervised import MakeStack, Stack
from triptych_cli import cli

__all__ = ["guarded_engines", "make_stack", "one_owner", "run_here"]

RunHere = Callable[..., Outcome]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunHere:
    """Runs the command in this process, where it ends before anything is started."""
    # It sets the environment for grpc, which is imported here already.
    monkeypatch.setattr(cli, "prepare_process", lambda role: None)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["triptych", *arguments])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        out, err = capfd.readouterr()
        return Outcome(os.getpid(), int(ending.value.code or 0), out, err)

    return run


@pytest.fixture
async def make_stack(tmp_path: Path) -> AsyncIterator[MakeStack]:
    made: list[Stack] = []

    def make(*arguments: Any, **options: Any) -> Stack:
        made.append(Stack(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()
