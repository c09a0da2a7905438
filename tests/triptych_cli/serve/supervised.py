"""A supervisor over real child processes that are no services, and what it reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triptych_cli.serve.supervisor import AwaitReady, ProcessPlan, StackPlan, Supervisor
from triptych_kit.process.child import Output
from triptych_kit.process.supervision import SupervisorLimits

MakeStack = Callable[..., "Stack"]
"""What the fixture `make_stack` is: it takes what `Stack` takes after its folder."""

FAKE_SERVICE = Path(__file__).parent / "fake_service.py"


class Stack:
    """A supervisor of one coordinator, two engines and one frontend, with a record of what it reported."""

    def __init__(
        self,
        folder: Path,
        extra: dict[str, tuple[str, ...]] | None = None,
        *,
        await_ready: AwaitReady | None = None,
        program: Path = Path(sys.executable),
        max_engines: int = 64,
        output: Output = Output.KEPT,
        **limits: Any,
    ) -> None:
        self.diary = folder / "diary"
        self._keeping: asyncio.Task[None] | None = None
        self.reports: list[str] = []
        self.reported = asyncio.Event()
        self.restarted = asyncio.Event()
        self.asked: list[tuple[str, int, int]] = []  # for whose flags, and with what
        names = [("coordinator", 0), ("engine", 0), ("engine", 1), ("frontend", 0)]

        def plan(service: str, index: int) -> ProcessPlan:
            command = (str(program), str(FAKE_SERVICE), service, "--diary", str(self.diary))
            return ProcessPlan(service, index, command)

        def flags(plan: ProcessPlan, num_engines: int, num_kv_blocks: int) -> tuple[str, ...]:
            self.asked.append((plan.name, num_engines, num_kv_blocks))
            return (extra or {}).get(plan.name, ())

        plans = [plan(service, index) for service, index in names]
        self.supervisor = Supervisor(
            StackPlan(
                plans[0],
                tuple(plans[1:]),
                flags=flags,
                ports={},
                engine=lambda rank: plan("engine", rank),
                max_engines=max_engines,
            ),
            os.environ,
            await_ready=await_ready or greeted,
            report=self._report,
            on_change=self.restarted.set,
            limits=SupervisorLimits(**{"startup_s": 30.0, "restart_delay_s": 0.01, **limits}),
            output=output,
        )

    def keep_running(self) -> asyncio.Task[None]:
        """Restart what dies, until the stack is closed."""
        self._keeping = asyncio.ensure_future(self.supervisor.keep_running())
        return self._keeping

    async def close(self) -> None:
        """End every process of the stack."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))
        for child in self.supervisor.children.values():
            child.send_signal(signal.SIGKILL)
            await child.wait()

    def _report(self, text: str) -> None:
        self.reports.append(text)
        self.reported.set()

    async def until(self, text: str, *, num_reports: int = 1) -> None:
        """Wait until so many reports have this in them."""
        async with asyncio.timeout(30):
            while sum(text in report for report in self.reports) < num_reports:
                self.reported.clear()
                await self.reported.wait()

    def events(self) -> list[str]:
        """What the children did, without addresses."""
        return [" ".join(line.split()[:2]) for line in self.diary.read_text().splitlines()]


async def greeted(service: str, address: str) -> None:
    """Return when the fake service at that address answers; for ever silent when it is gone."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(writer):
            if await reader.readline() == b"ready\n":
                return
    except ConnectionError:
        pass
    await asyncio.Event().wait()


def program_that_may_go(folder: Path) -> Path:
    """A Python that can be taken from its place."""
    program = folder / "python"
    program.symlink_to(sys.executable)
    return program
