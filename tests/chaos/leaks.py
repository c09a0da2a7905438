"""What a stack holds without any request, and whether it holds more than before."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.processes import ServiceProcess

_POLL_S = 0.1
# A connection that is being renewed has two sockets for a moment; what grows shows over many requests.
_SPARE_FILES = 2
_SPARE_THREADS = 2
# A process that has just started has two more until its first real load.
SPARE_TASKS = 2
_ZERO = {
    "engine": ("running", "waiting", "used_blocks"),
    "frontend": ("num_open_requests", "num_queued_requests"),
}


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one life of a process holds."""

    pid: int
    num_files: int
    num_threads: int
    num_tasks: int  # of its event loop; 0 where its status lacks it


@dataclass(frozen=True, slots=True)
class Baseline:
    """What each process held when the stack was idle and warm, by its name."""

    holdings: dict[str, Holdings]


async def take_baseline(processes: Sequence[ServiceProcess]) -> Baseline:
    return Baseline({process.name: await _holdings(process) for process in processes if process.is_running})


async def leaks(
    processes: Sequence[ServiceProcess],
    baseline: Baseline,
    *,
    settle_s: float,
    spare_tasks: int = SPARE_TASKS,
) -> list[str]:
    """What is still held when everything has had `settle_s` to come to rest; the numbers that are wrong.

    A process that was started again is held to what its first life had.
    """
    deadline = asyncio.get_running_loop().time() + settle_s
    while True:
        found = [text for process in processes for text in await _excess(process, baseline, spare_tasks)]
        if not found or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


async def _excess(process: ServiceProcess, baseline: Baseline, spare_tasks: int) -> list[str]:
    if not process.is_running:
        return []
    status = await process.status()
    found = [
        f"{process.name}: {key} is {status[key]:g}"
        for key in _ZERO.get(process.plan.service, ())
        if status.get(key)
    ]
    found += [
        f"{process.name}: {key} is {value:g}"
        for key, value in status.items()
        if key.endswith(".num_in_flight") and value
    ]
    before, now = baseline.holdings.get(process.name), await _holdings(process)
    if before is None:
        return found
    for name, spare in (
        ("num_files", _SPARE_FILES),
        ("num_threads", _SPARE_THREADS),
        ("num_tasks", spare_tasks),
    ):
        was, is_now = (getattr(each, name) for each in (before, now))
        if is_now > was + spare:
            found.append(f"{process.name}: {name} is {is_now}, was {was}")
    return found


async def _holdings(process: ServiceProcess) -> Holdings:
    status = await process.status()
    folder = Path("/proc", str(process.pid))
    return Holdings(
        process.pid,
        len(os.listdir(folder / "fd")),
        len(os.listdir(folder / "task")),
        int(status.get("num_tasks", 0)),
    )
