"""Supervises the services of one machine: starts in order, restarts, stops in reverse. Knows no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from triptych_kit.addresses import port_in
from triptych_kit.process.child import STARTING, Announcement, Child, ChildDied, Output
from triptych_kit.process.setup import API_KEY_VARIABLE
from triptych_kit.process.supervision import Restarts, SupervisorLimits, first_failure, until_ready

# Called with a service and its "host:port"; returns once it is ready.
AwaitReady = Callable[[str, str], Awaitable[None]]

_STOP_ORDER = ("frontend", "engine", "coordinator")


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process to run: service, index, and command without the flags that the supervisor adds."""

    service: str
    index: int
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name in messages and logs."""
        return f"{self.service}-{self.index}"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The processes of a stack and the flags of each."""

    coordinator: ProcessPlan
    others: tuple[ProcessPlan, ...]  # engines and frontends: they start together
    # Flags of a process, given the wanted number of engines and the KV blocks of each running engine.
    flags: Callable[[ProcessPlan, int, int], tuple[str, ...]]
    ports: Mapping[str, int]  # by process name; 0 lets the kernel choose
    engine: Callable[[int], ProcessPlan] | None = None  # plan of a rank; None: no engine is ever added
    max_engines: int = 64  # more must be started elsewhere

    @property
    def num_engines(self) -> int:
        return sum(plan.service == "engine" for plan in self.others)


def parts_of(name: str) -> tuple[str, int]:
    """The service and the index of a process, from its name."""
    service, _, index = name.rpartition("-")
    return service, int(index)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Why a process is not started again."""

    num_deaths: int
    last_cause: str

    def __str__(self) -> str:
        return f"{self.num_deaths} deaths, the last: {self.last_cause}"


def _health_addresses(plan: ProcessPlan, announced: Announcement) -> tuple[str, ...]:
    """Where a process says that it is ready. Each worker of a frontend finds the engines by itself."""
    if plan.service != "frontend":
        return (announced.address,)
    # The public listener may need certificates that only clients have.
    return announced.admin_addresses or (announced.admin_address,)


class StartTimeout(Exception):
    """Not everything was ready in time."""


class Supervisor:
    """One stack. Call `start`, then `keep_running`, then `stop`; `report` gets a line for each event.

    During `keep_running`, `want` sets the number of engines. An engine that exits with code 0 has left on
    purpose and is not started again. One that keeps dying stays down, until `want` starts missing ones; only
    where it is the last of its service, everything ends. `limits.stop_s` is for each of the three groups of
    services.
    """

    def __init__(
        self,
        plan: StackPlan,
        environment: Mapping[str, str],
        *,
        await_ready: AwaitReady,
        report: Callable[[str], None],
        on_change: Callable[[], None],
        limits: SupervisorLimits,
        output: Output = Output.COPIED,
    ) -> None:
        self.children: dict[str, Child] = {}
        self.given_up: dict[str, GivenUp] = {}
        self._plan = plan
        self._num_wanted = plan.num_engines
        self._starts_missing = False  # also engines that have left
        self._num_kv_blocks = 0  # of each running engine; 0: not known
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None  # of the keepers, during `keep_running`
        self._environment = environment
        self._await_ready = await_ready
        self._report = report
        self._on_change = on_change
        self._limits = limits
        self._output = output
        # By process name. Kept while a process is down, which restarts at the same address.
        self._announced: dict[str, Announcement] = {}
        self._ready: set[str] = set()
        self._all_are_ready = asyncio.Event()
        self._is_stopping = False
        self._hides_info = False

    async def start(self) -> None:
        """Start everything and wait until all are ready; raises ChildDied or StartTimeout."""
        with first_failure():
            try:
                async with asyncio.timeout(self._limits.startup_s):
                    await self._start(self._plan.coordinator)
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._outlive_the_start(self._plan.coordinator))
                        for plan in self._plan.others:
                            group.create_task(self._start_with_others(plan))
            except TimeoutError as error:
                for child in self.children.values():
                    child.release()
                late = ", ".join(plan.name for plan in self._plans() if plan.name not in self._ready)
                raise StartTimeout(f"not ready within {self._limits.startup_s:g} s: {late}") from error

    async def keep_running(self) -> None:
        """Restart processes that die, until cancelled; raises ChildDied for the last of a service."""
        try:
            with first_failure():
                async with asyncio.TaskGroup() as self._group:
                    for plan in self._plans():
                        self._keepers[plan.name] = self._group.create_task(self._keep(plan))
                    self.want(self._num_wanted, starts_missing=self._starts_missing)
                    # All engines may leave, and new ones may be wanted later.
                    await asyncio.Event().wait()
        finally:
            self._group = None

    def want(self, num_engines: int, *, starts_missing: bool, num_kv_blocks: int = 0) -> None:
        """Set the number of engines. With `starts_missing`, start every missing rank below it now.

        Higher ranks leave by themselves when they get a drain command and are not started again; those that
        are not ready yet are terminated. Engines started from now on get `num_kv_blocks`, unless it is 0.
        """
        max_engines = self._plan.max_engines
        if num_engines > max(max_engines, self._num_wanted):
            self._report(
                f"{num_engines} engines are wanted, {max_engines} are the most that are started here"
            )
        # The coordinator repeats what it wants: only something new is a reason to try again.
        is_new = (num_engines, starts_missing) != (self._num_wanted, self._starts_missing)
        self._num_wanted, self._starts_missing = num_engines, starts_missing
        self._num_kv_blocks = num_kv_blocks
        if self._group is None or self._plan.engine is None or self._is_stopping:
            return
        for rank in range(min(num_engines, max_engines) if starts_missing else 0):
            plan = self._plan.engine(rank)
            if plan.name not in self._keepers and (is_new or plan.name not in self.given_up):
                self._keepers[plan.name] = self._group.create_task(self._add(plan))
        for name, child in self.children.items():
            if not self._is_wanted(*parts_of(name)) and name not in self._ready:
                child.terminate()

    async def stop(self) -> None:
        """Stop frontends, then engines, then the coordinator, so that running requests can finish."""
        self._is_stopping = True
        for service in _STOP_ORDER:
            group = [child for name, child in self.children.items() if parts_of(name)[0] == service]
            endings = await asyncio.gather(*(child.stop(self._limits.stop_s) for child in group))
            for child, ended in zip(group, endings, strict=True):
                if not ended:
                    self._report(f"{child.name} did not end within {self._limits.stop_s:g} s and was killed")

    def hide_info(self) -> None:
        """From now on copy only the lines of processes that are no messages below a warning."""
        self._hides_info = True
        for child in self.children.values():
            child.hides_info = True

    async def hurry(self) -> None:
        """Cut every drain short."""
        for child in self.children.values():
            child.terminate()

    def address_of(self, name: str) -> str:
        """The address of a process, also while it is being restarted."""
        announced = self._announced.get(name)
        return "" if announced is None else announced.address

    def admin_address_of(self, name: str) -> str:
        """The admin address of a process; "" before it has announced it."""
        child = self.children.get(name)
        return (
            child.announcement.admin_address if child is not None and child.announcement is not None else ""
        )

    def admin_http_of(self, name: str) -> str:
        """The address of the admin HTTP listener of a process, also while it is being restarted."""
        announced = self._announced.get(name)
        return "" if announced is None else announced.admin_http

    def http_of(self, name: str) -> str:
        """Its OpenAI HTTP API; empty if it has none."""
        announced = self._announced.get(name)
        return "" if announced is None else announced.http

    def _plans(self) -> tuple[ProcessPlan, ...]:
        return (self._plan.coordinator, *self._plan.others)

    async def _outlive_the_start(self, plan: ProcessPlan) -> None:
        """Raise ChildDied if a process that was ready dies before all others are ready."""
        await self._before_it_dies(self._all_are_ready.wait(), self.children[plan.name])

    async def _before_it_dies(self, ready: Awaitable[object], child: Child) -> None:
        await until_ready(ready, child.wait(), lambda _: ChildDied(child, STARTING))

    async def _start_with_others(self, plan: ProcessPlan) -> None:
        await self._start(plan)
        await self._outlive_the_start(plan)

    async def _start(self, plan: ProcessPlan) -> None:
        command = (*plan.command, *self._flags_of(plan))
        environment = dict(self._environment)
        if plan.service != "frontend":
            # The key of clients, which frontends alone see.
            environment.pop(API_KEY_VARIABLE, None)
        child = Child(plan.name, command, environment, announces=True, output=self._output)
        child.hides_info = self._hides_info
        if plan.service == "frontend" and not self._only_frontends_are_late():
            # Until then it reports what engines do, which report that themselves.
            child.hold()
        self.children[plan.name] = child
        try:
            announced = self._announced[plan.name] = await child.announced()
            address = announced.address
            ready = [self._await_ready(plan.service, one) for one in _health_addresses(plan, announced)]
            await self._before_it_dies(asyncio.gather(*ready), child)
        except ChildDied:
            child.release()
            raise
        child.release()
        self._ready.add(plan.name)
        self.given_up.pop(plan.name, None)
        if self._only_frontends_are_late():
            # What keeps them is their own, such as a tokenizer that they cannot read.
            for late in self.children.values():
                late.release()
        if len(self._ready) == len(self._plans()):
            self._all_are_ready.set()
        # Nothing scrapes a socket.
        has_port = announced.admin_http and port_in(announced.admin_http) is not None
        beside = f", admin_http {announced.admin_http}" if has_port else ""
        self._report(f"{plan.name} READY at {address} (pid {child.pid}){beside}")

    def _only_frontends_are_late(self) -> bool:
        return all(plan.service == "frontend" or plan.name in self._ready for plan in self._plans())

    def _flags_of(self, plan: ProcessPlan) -> list[str]:
        # A restarted process takes its old port, which the others use.
        before = self.address_of(plan.name)
        port = port_in(before) if before else self._plan.ports.get(plan.name, 0)
        flags = [
            *self._plan.flags(plan, self._num_wanted, self._num_kv_blocks),
            f"--index={plan.index}",
            # Without effect where its flags name a socket.
            f"--port={port or 0}",
        ]
        for flag, address in (
            # What scrapes it has its address.
            ("--admin-http-port", self.admin_http_of(plan.name)),
            ("--http-port", self.http_of(plan.name)),
        ):
            if address and port_in(address):
                flags.append(f"{flag}={port_in(address)}")
        if plan is not self._plan.coordinator:
            flags.append(f"--coordinator={self.address_of(self._plan.coordinator.name)}")
        return flags

    def _is_wanted(self, service: str, index: int) -> bool:
        return service != "engine" or index < self._num_wanted

    async def _add(self, plan: ProcessPlan) -> None:
        """Start an engine that joins the group, then supervise it."""
        await self._restart(plan)
        await self._keep(plan)

    async def _keep(self, plan: ProcessPlan) -> None:
        loop = asyncio.get_running_loop()
        restarts = Restarts(self._limits)
        while True:
            child = self.children.get(plan.name)
            if child is not None:
                await child.wait()
            if self._is_stopping:
                return
            self._ready.discard(plan.name)
            if self._has_left(plan, child):
                ending = "left" if child is None else f"{child.ending} and is not started again"
                self._report(f"{plan.name} {ending}")
                self._forget(plan)
                return
            delay_s = restarts.begin(loop.time())
            if delay_s is None:
                self._give_up(plan, child, restarts)
                return
            ending = "could not be started" if child is None else child.ending
            if child is not None and child.announced_cause:
                ending += f" ({child.announced_cause})"
            self._report(f"{plan.name} {ending}; starts again in {delay_s:g} s ({restarts.count})")
            await asyncio.sleep(delay_s)
            if self._is_wanted(plan.service, plan.index):
                await self._restart(plan)

    def _has_left(self, plan: ProcessPlan, child: Child | None) -> bool:
        if plan.service != "engine":
            return False
        has_gone_for_good = child is not None and child.exit_code == 0 and not self._starts_missing
        return not self._is_wanted(plan.service, plan.index) or has_gone_for_good

    def _give_up(self, plan: ProcessPlan, child: Child | None, restarts: Restarts) -> None:
        is_last = all(name == plan.name or parts_of(name)[0] != plan.service for name in self._keepers)
        if is_last and child is not None:
            raise ChildDied(child, f"after {restarts.tries}")
        cause = "could not be started" if child is None else child.cause
        self.given_up[plan.name] = given_up = GivenUp(restarts.num_deaths, cause)
        self._report(f"ERROR {plan.name} stays down after {restarts.tries}: {given_up}")
        self._forget(plan)

    def _forget(self, plan: ProcessPlan) -> None:
        for table in (self.children, self._announced, self._keepers):
            table.pop(plan.name, None)
        self._on_change()

    async def _restart(self, plan: ProcessPlan) -> None:
        try:
            async with asyncio.timeout(self._limits.startup_s):
                await self._start(plan)
        except (ChildDied, OSError) as error:
            # `_keep` notices the end and counts it.
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                self._report(f"{plan.name} cannot be started: {error.strerror or error}")
            if plan.name in self.children:
                self.children[plan.name].release()
                await self.children[plan.name].stop(self._limits.stop_s)
            return
        self._on_change()
