"""Runs a verb until a signal ends it: signal handling, exit code, and the ready file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path


async def run_until_signal(
    work: Coroutine[None, None, None],
    *,
    stop: Callable[[], Awaitable[None]],
    hurry: Callable[[], Awaitable[None]],
    failures: tuple[type[Exception], ...],
    report: Callable[[str], None],
) -> int:
    """Run `work` until it ends, or until SIGTERM or SIGINT, then `stop`; returns the exit code.

    A second signal calls `hurry` during `stop`. One of `failures` is reported and makes the code 1.
    """
    hurrying: set[asyncio.Task[None]] = set()
    stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_signal() -> None:
        if stopping.done():
            hurrying.add(asyncio.ensure_future(hurry()))
        else:
            stopping.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    running = asyncio.ensure_future(work)
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    except failures as error:
        report(str(error))
        return 1
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await stop()
    return 0


def remove_ready_file(path: str | None) -> None:
    """Called before anything starts, since a killed run leaves its file, and before anything stops."""
    if path is not None:
        Path(path).unlink(missing_ok=True)


def write_ready_file(path: str | None, record: Mapping[str, object]) -> None:
    """Write the addresses, if a path is given; atomically, so that no reader sees a partial file."""
    if path is None:
        return
    file = Path(path)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(file)
