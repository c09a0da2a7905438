"""Processes that tests start: each ends with its block, whatever the block came to.

A process that a failed test leaves would keep its port and its cores from the tests after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

START_LIMIT_S = 180.0


@contextlib.contextmanager
def running(*command: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """The process of `subprocess.Popen(command, **options)`."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def running_async(*command: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process of `asyncio.create_subprocess_exec(*command, **options)`."""
    process = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield process
    finally:
        signal_child(process, signal.SIGKILL)
        # Not `wait`, which a pipe that is full and not read keeps from its return.
        await process.communicate()


@contextlib.asynccontextmanager
async def announced(
    *command: str, **options: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """The process of a service, and what it announces once it listens."""
    read_fd, write_fd = os.pipe()
    options = {"env": source_environment(), "pass_fds": [write_fd], **options}
    with os.fdopen(read_fd) as pipe:
        async with running_async(*command, f"--announce-fd={write_fd}", **options) as process:
            os.close(write_fd)
            line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), START_LIMIT_S)
            yield process, json.loads(line)


def signal_child(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send `number` to a process of asyncio, if it still runs.

    asyncio's own methods first poll the child. If it exits at that moment, they consume its exit code, and
    the task that waits for it gets 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def source_environment() -> dict[str, str]:
    """Our environment; with it a Python process imports what this one imports."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {**os.environ, "PYTHONPATH": path}
