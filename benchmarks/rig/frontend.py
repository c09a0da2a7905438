"""A frontend under measurement: a synthetic engine, the real frontend, clients; and what CPU it used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.lines import Line, LineProcess, module
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych_cli.serve.readiness import await_ready
from triptych_kit.channel import open_channel
from triptych_kit.process.child import Announcement, Child, Output

_OTHERS_S = 2.0
_START_LIMIT_S = 30.0
_ANSWER_LIMIT_S = 10.0
# Endless streams do not end by themselves.
_END_S = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    announcement: Announcement

    def cpu_s(self) -> float:
        """CPU of the process that was started: one frontend, or what supervises several."""
        return _cpu_s(self.announcement.pid)

    def tree_cpu_s(self) -> float:
        """CPU of it and all processes below, which read text or are frontends themselves."""
        return sum(_cpu_s(pid) for pid in with_descendants(self.announcement.pid))

    async def status(self) -> dict[str, float]:
        async with open_channel(self.announcement.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_ANSWER_LIMIT_S)
        return {value.key: value.number for value in answer.values if value.HasField("number")}


class Clients:
    """A process of clients that is asked for its counters."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process
        self.pid = process.pid

    async def counters(self) -> Line:
        """The deltas received until now; raises RuntimeError where a request failed."""
        counters = await asyncio.to_thread(self._process.ask)
        if counters["failures"]:
            raise RuntimeError(f"{len(counters['failures'])} requests failed: {counters['failures'][0]}")
        return counters


@contextlib.asynccontextmanager
async def synthetic_engine(rate: float) -> AsyncIterator[str]:
    """A synthetic engine with so many steps a second; its address."""
    with LineProcess(module("benchmarks.rig.synthetic_engine", f"--rate={rate}"), end_s=_END_S) as process:
        yield process.facts["address"]


@contextlib.asynccontextmanager
async def frontend(engine: str, *flags: str) -> AsyncIterator[Served]:
    """A real frontend of that engine, once it is ready."""
    async with service("frontend", ("--port=0", f"--engine={engine}", "--log-level=error", *flags)) as found:
        await asyncio.wait_for(await_ready("frontend", found.address), _START_LIMIT_S)
        # One of several on the port has answered; the others reach the engine in the same moments.
        await asyncio.sleep(_OTHERS_S)
        yield Served(found)


@contextlib.asynccontextmanager
async def clients(address: str, **options: float) -> AsyncIterator[Clients]:
    """A process of clients; `options` are those of the scenario's `clients`."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with LineProcess(
        module("benchmarks.rig.clients", f"--address={address}", *flags), end_s=_END_S
    ) as process:
        yield Clients(process)


@contextlib.asynccontextmanager
async def service(
    name: str, arguments: tuple[str, ...], environment: Mapping[str, str] | None = None
) -> AsyncIterator[Announcement]:
    """A service once it listens, which is not until it is ready. environment: what is added to this one's."""
    command = (sys.executable, "-m", "triptych_cli.cli", name, *arguments, "--index=0")
    threads = {"OMP_NUM_THREADS": "1"} if name == "frontend" else {}
    whole = {**os.environ, **threads, **(environment or {})}
    child = Child(f"{name}-0", command, whole, announces=True, output=Output.COPIED)
    try:
        yield await asyncio.wait_for(child.announced(), _START_LIMIT_S)
    finally:
        await child.stop(_END_S)


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def with_descendants(pid: int) -> list[int]:
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
