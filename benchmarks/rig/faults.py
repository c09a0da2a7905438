"""Faults that strike a process, each with the proof that it struck. Knows no request."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from benchmarks.rig.processes import ServiceProcess

_STRIKE_LIMIT_S = 60.0
_POLL_S = 0.001


class FaultMissed(Exception):
    """The fault did not strike, so nothing that was seen afterwards says anything."""


async def kill(process: ServiceProcess) -> float:
    """kill -9; returns when, by the monotonic clock. waitpid proves it."""
    if not process.is_running:
        raise FaultMissed(f"{process.name} does not run")
    struck_at = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    status = await process.ended(_STRIKE_LIMIT_S)
    if status != -signal.SIGKILL:
        raise FaultMissed(f"{process.name} ended with {status}, not by the signal")
    return struck_at


async def stop(process: ServiceProcess) -> float:
    """SIGSTOP; returns when. /proc proves it: every thread of it stands."""
    if not process.is_running:
        raise FaultMissed(f"{process.name} does not run")
    struck_at = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    await _until_state(process, "T")
    return struck_at


async def resume(process: ServiceProcess) -> float:
    """SIGCONT after a stop; returns when."""
    if process_state(process.pid) != "T":
        raise FaultMissed(f"{process.name} is not stopped but in state {process_state(process.pid)}")
    struck_at = time.monotonic()
    os.kill(process.pid, signal.SIGCONT)
    async with asyncio.timeout(_STRIKE_LIMIT_S):
        while process_state(process.pid) == "T":  # noqa: ASYNC110  Nothing tells of another process's state.
            await asyncio.sleep(_POLL_S)
    return struck_at


async def terminate(process: ServiceProcess) -> float:
    """SIGTERM; returns when. Its end is the proof, which who drains it waits for."""
    if not process.is_running:
        raise FaultMissed(f"{process.name} does not run")
    struck_at = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    return struck_at


def process_state(pid: int) -> str:
    """The letter of a process's state; X where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


async def _until_state(process: ServiceProcess, letter: str) -> None:
    try:
        async with asyncio.timeout(_STRIKE_LIMIT_S):
            while process_state(process.pid) != letter:  # noqa: ASYNC110  As above.
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        state = process_state(process.pid)
        raise FaultMissed(f"{process.name} is in state {state}, not {letter}") from None
