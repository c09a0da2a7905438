"""A supervisor over real child processes that are no services, and what it reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from launcher.serve.process import ProcessPlan
from launcher.serve.supervisor import AwaitReady, StackPlan, Supervisor, SupervisorLimits

FAKE_SERVICE = Path(__file__).parent / "fake_service.py"


class Stack:
    """A supervisor of one coordinator, two engines and one frontend, with a record of what it reported."""

    def __init__(
        self,
        diary: Path,
        *,
        limits: SupervisorLimits,
        extra: dict[str, tuple[str, ...]],
        await_ready: AwaitReady | None = None,
        program: Path = Path(sys.executable),
    ) -> None:
        self.diary = diary
        self.reports: list[str] = []
        self.reported = asyncio.Event()
        self.restarted = asyncio.Event()
        self.asked: list[tuple[str, int, int]] = []  # for whose flags, and with what
        names = [("coordinator", 0), ("engine", 0), ("engine", 1), ("frontend", 0)]

        def plan(service: str, index: int) -> ProcessPlan:
            command = (str(program), str(FAKE_SERVICE), service, "--diary", str(diary))
            return ProcessPlan(service, index, command)

        def flags(plan: ProcessPlan, num_engines: int, num_kv_blocks: int) -> tuple[str, ...]:
            self.asked.append((plan.name, num_engines, num_kv_blocks))
            return extra.get(plan.name, ())

        plans = [plan(service, index) for service, index in names]
        self.supervisor = Supervisor(
            StackPlan(
                plans[0],
                tuple(plans[1:]),
                flags=flags,
                ports={},
                engine=lambda rank: plan("engine", rank),
            ),
            os.environ,
            await_ready=await_ready or greeted,
            report=self._report,
            on_change=self.restarted.set,
            limits=limits,
            quiet=True,
        )

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


def stack(tmp_path: Path, extra: dict[str, tuple[str, ...]] | None = None, **limits: float) -> Stack:
    defaults: dict[str, float] = {"startup_s": 30.0, "restart_delay_s": 0.01}
    return Stack(tmp_path / "diary", limits=SupervisorLimits(**{**defaults, **limits}), extra=extra or {})  # type: ignore[arg-type]


def stack_of_a_program_that_may_go(tmp_path: Path, **limits: float) -> tuple[Stack, Path]:
    program = tmp_path / "python"
    program.symlink_to(sys.executable)
    options = SupervisorLimits(startup_s=30.0, restart_delay_s=0.01, **limits)  # type: ignore[arg-type]
    return Stack(tmp_path / "diary", limits=options, extra={}, program=program), program
