"""Keeps the services of a machine running: starts in order, restarts, stops in reverse. Knows no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from launcher.process import STARTING, ChildDied, ChildProcess, ProcessPlan, spawn

# Resolves once the service at that address is ready for work; told the service and "host:port".
AwaitReady = Callable[[str, str], Awaitable[None]]

_STOP_ORDER = ("frontend", "engine", "coordinator")


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """How long and how often the supervisor tries."""

    startup_s: float = 600.0
    stop_s: float = 25.0  # for each of the three groups of services
    max_restarts: int = 3  # of one process within `restart_window_s`
    restart_window_s: float = 60.0
    restart_delay_s: float = 0.5  # doubles with each restart in the window


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The processes of a stack and the flags of each service."""

    coordinator: ProcessPlan
    others: tuple[ProcessPlan, ...]  # engines and frontends: they start together
    flags: Mapping[str, tuple[str, ...]]  # by process name
    ports: Mapping[str, int]  # by process name; 0 lets the kernel choose


class StartTimeout(Exception):
    """Not everything was ready in time."""


class Supervisor:
    """One stack. `start` once, then `keep_running`, then `stop`; `report` gets a line on each event."""

    def __init__(
        self,
        plan: StackPlan,
        environment: Mapping[str, str],
        *,
        await_ready: AwaitReady,
        report: Callable[[str], None],
        on_restart: Callable[[], None],
        limits: SupervisorLimits,
        quiet: bool = False,
    ) -> None:
        self.children: dict[str, ChildProcess] = {}
        self._plan = plan
        self._environment = environment
        self._await_ready = await_ready
        self._report = report
        self._on_restart = on_restart
        self._limits = limits
        self._quiet = quiet
        # By process name. Kept while a process is down: it comes back where the others know it.
        self._addresses: dict[str, str] = {}
        self._ready: set[str] = set()
        self._all_are_ready = asyncio.Event()
        self._is_stopping = False

    async def start(self) -> None:
        """Start everything and wait until all of it is ready; raises ChildDied or StartTimeout."""
        try:
            async with asyncio.timeout(self._limits.startup_s):
                await self._start(self._plan.coordinator)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._outlive_the_start(self._plan.coordinator))
                    for plan in self._plan.others:
                        group.create_task(self._start_with_others(plan))
        except TimeoutError as error:
            late = [plan.name for plan in self._plans() if plan.name not in self._ready]
            raise StartTimeout(f"not ready within {self._limits.startup_s:g} s: {', '.join(late)}") from error
        except ExceptionGroup as failures:
            # The first to die is the cause; the others were cancelled for it or followed it.
            raise failures.exceptions[0] from failures

    async def keep_running(self) -> None:
        """Restart what dies, until cancelled; raises ChildDied for a process that keeps dying."""
        try:
            async with asyncio.TaskGroup() as group:
                for plan in self._plans():
                    group.create_task(self._keep(plan))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    async def stop(self) -> None:
        """Stop frontends, then engines, then the coordinator, so that running requests can end."""
        self._is_stopping = True
        for service in _STOP_ORDER:
            group = [child for child in self.children.values() if child.plan.service == service]
            endings = await asyncio.gather(*(child.stop(self._limits.stop_s) for child in group))
            for child, ended in zip(group, endings, strict=True):
                if not ended:
                    self._report(
                        f"{child.plan.name} did not end within {self._limits.stop_s:g} s and was killed"
                    )

    def hurry(self) -> None:
        """Cut every drain short."""
        for child in self.children.values():
            child.terminate()

    def address_of(self, name: str) -> str:
        """Where a process listens, or will again once it has been restarted."""
        return self._addresses.get(name, "")

    def _plans(self) -> tuple[ProcessPlan, ...]:
        return (self._plan.coordinator, *self._plan.others)

    async def _outlive_the_start(self, plan: ProcessPlan) -> None:
        """Raise ChildDied for a process that was ready, and dies before all the others are."""
        child = self.children[plan.name]
        ended = asyncio.ensure_future(child.wait())
        started = asyncio.ensure_future(self._all_are_ready.wait())
        try:
            await asyncio.wait((ended, started), return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                raise ChildDied(child, STARTING)
        finally:
            ended.cancel()
            started.cancel()

    async def _start_with_others(self, plan: ProcessPlan) -> None:
        await self._start(plan)
        await self._outlive_the_start(plan)

    async def _start(self, plan: ProcessPlan) -> None:
        child, pipe_fd = await spawn(plan, self._flags_of(plan), self._environment, quiet=self._quiet)
        self.children[plan.name] = child
        address = (await child.announced(pipe_fd)).address
        self._addresses[plan.name] = address
        await self._until_ready(child, address)
        self._ready.add(plan.name)
        if len(self._ready) == len(self._plans()):
            self._all_are_ready.set()
        self._report(f"{plan.name} READY at {address} (pid {child.pid})")

    async def _until_ready(self, child: ChildProcess, address: str) -> None:
        ready = asyncio.ensure_future(self._await_ready(child.plan.service, address))
        ended = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise ChildDied(child, STARTING)
            await ready
        finally:
            ready.cancel()
            ended.cancel()

    def _flags_of(self, plan: ProcessPlan) -> list[str]:
        # A process that starts again takes its old port, under which the others know it.
        before = self.address_of(plan.name)
        port = int(before.rpartition(":")[2]) if before else self._plan.ports.get(plan.name, 0)
        flags = [*self._plan.flags.get(plan.name, ()), f"--port={port}"]
        if plan is not self._plan.coordinator:
            flags.append(f"--coordinator={self.address_of(self._plan.coordinator.name)}")
        return flags

    async def _keep(self, plan: ProcessPlan) -> None:
        loop = asyncio.get_running_loop()
        restarted_at: list[float] = []
        limits = self._limits
        while True:
            child = self.children[plan.name]
            await child.wait()
            if self._is_stopping:
                return
            restarted_at = [at for at in restarted_at if loop.time() - at < limits.restart_window_s]
            if len(restarted_at) == limits.max_restarts:
                tries = f"after {limits.max_restarts} restarts within {limits.restart_window_s:g} s"
                raise ChildDied(child, tries)
            delay_s = limits.restart_delay_s * 2 ** len(restarted_at)
            restarted_at.append(loop.time())
            self._report(
                f"{plan.name} {child.ending}; starts again in {delay_s:g} s"
                f" ({len(restarted_at)} of {limits.max_restarts})"
            )
            await asyncio.sleep(delay_s)
            await self._restart(plan)

    async def _restart(self, plan: ProcessPlan) -> None:
        try:
            async with asyncio.timeout(self._limits.startup_s):
                await self._start(plan)
        except (ChildDied, OSError) as error:
            # `_keep` sees the end of it and counts it.
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                self._report(f"{plan.name} cannot be started: {error.strerror or error}")
            await self.children[plan.name].stop(self._limits.stop_s)
            return
        self._on_restart()
