"""Processes of tests end with their block."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys

import pytest

from tests.processes import running, running_async

WAITING = (sys.executable, "-c", "import signal; print('x' * 200_000, flush=True); signal.pause()")


def test_a_process_ends_with_a_block_that_fails() -> None:
    with pytest.raises(KeyError), running(*WAITING, stdout=subprocess.PIPE) as process:
        raise KeyError
    assert process.returncode == -signal.SIGKILL


async def test_a_process_ends_with_a_block_that_fails_and_has_not_read_its_output() -> None:
    with contextlib.suppress(KeyError):
        async with running_async(*WAITING, stdout=asyncio.subprocess.PIPE) as process:
            raise KeyError
    assert process.returncode == -signal.SIGKILL


def test_an_interrupt_reaches_a_process_though_the_tests_run_in_the_background_of_a_shell() -> None:
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    with running(sys.executable, "-c", program, stdout=subprocess.PIPE) as process:
        assert process.communicate()[0] == b"True\n"
