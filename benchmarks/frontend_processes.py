"""The processes of a measurement: synthetic engine, the real frontend, clients; and what CPU they used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from launcher.serve.process import Announcement, ProcessPlan, spawn
from launcher.serve.readiness import await_ready
from service_kit.channel import open_channel
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc

_REPOSITORY = Path(__file__).resolve().parent.parent
_OTHERS_S = 2.0
_START_LIMIT_S = 30.0
_ANSWER_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Served:
    """A frontend that is ready."""

    announcement: Announcement

    def cpu_s(self) -> float:
        """CPU of the process that was started: one frontend, or what supervises several."""
        return _cpu_s(self.announcement.pid)

    def tree_cpu_s(self) -> float:
        """CPU of it and all processes below, which read text or are frontends themselves."""
        return sum(_cpu_s(pid) for pid in _with_descendants(self.announcement.pid))

    async def status(self) -> dict[str, float]:
        """Its own gauges."""
        async with open_channel(self.announcement.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_ANSWER_LIMIT_S)
        return {value.key: value.number for value in answer.values if value.HasField("number")}


class Clients:
    """A process of clients that is asked for its counters."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def counters(self) -> dict:
        """What came until now; raises RuntimeError where a request failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), _ANSWER_LIMIT_S)
        counters = json.loads(line)
        if counters["failures"]:
            raise RuntimeError(f"{len(counters['failures'])} requests failed: {counters['failures'][0]}")
        return counters


@contextlib.asynccontextmanager
async def synthetic_engine(rate: float) -> AsyncIterator[str]:
    """A synthetic engine with so many steps a second; its address."""
    async with _process("benchmarks.frontend_engine", f"--rate={rate}") as process:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_LIMIT_S)
        yield line.decode().strip()


@contextlib.asynccontextmanager
async def real_engine(model: Path, *flags: str) -> AsyncIterator[str]:
    """A real engine of a checkpoint; its address."""
    plan = ProcessPlan("engine", 0, (sys.executable, "-m", "launcher.cli", "engine"))
    arguments = (str(model), "--port=0", "--log-level=error", *flags)
    child, pipe_fd = await spawn(plan, arguments, dict(os.environ), quiet=False)
    try:
        announcement = await asyncio.wait_for(child.announced(pipe_fd), _START_LIMIT_S)
        yield announcement.address
    finally:
        await child.stop(0.5)


@contextlib.asynccontextmanager
async def frontend(engine: str, *flags: str) -> AsyncIterator[Served]:
    """A real frontend of that engine, once it is ready."""
    plan = ProcessPlan("frontend", 0, (sys.executable, "-m", "launcher.cli", "frontend"))
    arguments = ("--port=0", f"--engine={engine}", "--log-level=error", *flags)
    child, pipe_fd = await spawn(plan, arguments, {**os.environ, "OMP_NUM_THREADS": "1"}, quiet=False)
    try:
        announcement = await asyncio.wait_for(child.announced(pipe_fd), _START_LIMIT_S)
        await asyncio.wait_for(await_ready("frontend", announcement.address), _START_LIMIT_S)
        # Whoever of several on the port answered is ready; the others reach the engine in the same moments.
        await asyncio.sleep(_OTHERS_S)
        yield Served(announcement)
    finally:
        # Endless streams do not end by themselves.
        await child.stop(0.5)


@contextlib.asynccontextmanager
async def clients(address: str, **options: float) -> AsyncIterator[Clients]:
    """A process of clients; `options` are those of `benchmarks.frontend_clients`."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    async with _process("benchmarks.frontend_clients", f"--address={address}", *flags) as process:
        yield Clients(process)


@contextlib.asynccontextmanager
async def _process(module: str, *arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE, cwd=_REPOSITORY
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _with_descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields after the command's name: state, parent, ...; none of a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
