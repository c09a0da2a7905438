"""What is said of a child that ended."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from launcher.serve.process import ProcessPlan, spawn
from service_kit.process import process_environment

END_BY = "import os; os.kill(os.getpid(), {number})"


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
    ids=["SIGKILL", "a-real-time-signal"],
)
async def test_any_signal_that_ended_a_child_is_named(number: int, name: str) -> None:
    plan = ProcessPlan("engine", 0, (sys.executable, "-c", END_BY.format(number=int(number))))
    child, pipe_fd = await spawn(plan, [], process_environment(), quiet=True)
    os.close(pipe_fd)
    await child.wait()
    assert child.ending == f"(pid {child.pid}) was killed by {name}"
