"""Supervises engines on the hosts of a cluster: places, monitors, restarts and drains them.

Knows no Ray: a cluster is any implementation of `Cluster`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from triptych_cli.ray.config import Placing
from triptych_cli.serve.supervisor import AwaitReady, StartTimeout
from triptych_kit.process.child import describe_exit
from triptych_kit.process.supervision import Restarts, SupervisorLimits, first_failure, until_ready

# Added to an engine's drain time, for its shutdown.
_TEARDOWN_S = 5.0


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Addresses of an engine, known once it has bound its port and before it loads anything."""

    address: str
    admin_address: str  # on the node's loopback
    admin_http: str
    node_id: str
    pid: int
    devices: str  # in the format of CUDA_VISIBLE_DEVICES; "" is none


class HostLost(Exception):
    """The host was lost with its engine: the node died, or the actor was killed."""


class EngineDied(Exception):
    """An engine ended unexpectedly and is not restarted. The message has its name and how it ended."""


class EngineHost(Protocol):
    """Runs one engine at a time on some node. Every call may raise HostLost."""

    async def start(self, flags: list[str], environment: dict[str, str]) -> EnginePlacement:
        """Start the engine and wait until it listens. Raises EngineDied if it ends before that."""

    async def ended(self) -> int:
        """Wait for the engine's end; returns its exit code, a signal as a negative number."""

    async def drain(self, limit_s: float) -> int:
        """SIGTERM, then SIGKILL after `limit_s`; returns the exit code. A second call cuts the drain."""

    async def dismiss(self) -> None:
        """Release the host. An engine that still runs is killed."""


class Cluster(Protocol):
    """Provides hosts for engines."""

    async def provide(self, name: str, index: int) -> EngineHost:
        """A host for an engine, by name and index; it starts once the cluster has room for it."""


class Placement:
    """Engines of one command: `start`, `keep_running`, then `stop`; `report` gets a line for each event."""

    def __init__(
        self,
        placing: Placing,
        cluster: Cluster,
        *,
        await_ready: AwaitReady,
        report: Callable[[str], None],
        on_change: Callable[[], None],
        limits: SupervisorLimits,
    ) -> None:
        self.placements: dict[str, EnginePlacement] = {}  # by name, of those that run
        self._placing = placing
        self._cluster = cluster
        self._await_ready = await_ready
        self._report = report
        self._on_change = on_change
        self._limits = limits
        self._hosts: dict[str, EngineHost] = {}
        self._num_kept = placing.config.num_engines  # neither drained nor given up
        self._is_stopping = False

    async def start(self) -> None:
        """Place every engine and wait until all are ready; raises EngineDied, HostLost or StartTimeout."""
        numbers = range(self._placing.config.num_engines)
        ready: set[str] = set()

        async def start_one(index: int) -> None:
            await self._start(index)
            ready.add(self._placing.name_of(index))

        with first_failure():
            try:
                async with asyncio.timeout(self._limits.startup_s), asyncio.TaskGroup() as group:
                    for index in numbers:
                        group.create_task(start_one(index))
            except TimeoutError as error:
                names = [self._placing.name_of(index) for index in numbers]
                late = ", ".join(
                    f"{name} ({'loading' if name in self.placements else 'not placed'})"
                    for name in names
                    if name not in ready
                )
                raise StartTimeout(f"not ready within {self._limits.startup_s:g} s: {late}") from error
        self._on_change()

    async def keep_running(self) -> None:
        """Restart engines that die, until all are drained or given up.

        Raises EngineDied where the last one keeps dying.
        """
        with first_failure():
            async with asyncio.TaskGroup() as group:
                for index in range(self._placing.config.num_engines):
                    group.create_task(self._keep(index))

    async def stop(self) -> None:
        """Drain all engines concurrently, report how each ended, and release the hosts."""
        self._is_stopping = True
        await asyncio.gather(*(self._end(name) for name in list(self._hosts)))

    async def hurry(self) -> None:
        """Cut every drain short."""
        limit_s = self._limits.stop_s
        await asyncio.gather(*(_unless_lost(host.drain(limit_s)) for host in self._hosts.values()))

    async def _start(self, index: int) -> None:
        name = self._placing.name_of(index)
        if name not in self._hosts:
            self._hosts[name] = await self._cluster.provide(name, index)
        host = self._hosts[name]
        # An engine that restarts on its host takes its old port, which the others use.
        before = self.placements.get(name)
        port = int(before.address.rpartition(":")[2]) if before else 0
        flags = self._placing.flags_of(index, port)
        listening = await host.start(flags, self._placing.config.environment())
        self.placements[name] = listening
        devices = f", devices {listening.devices}" if listening.devices else ""
        self._report(f"{name} listens at {listening.address} (node {listening.node_id[:8]}{devices})")
        await until_ready(
            self._await_ready("engine", listening.address),
            host.ended(),
            lambda status: EngineDied(f"{name} {describe_exit(status)} while it was starting"),
        )
        self._report(f"{name} READY at {listening.address} (pid {listening.pid})")

    async def _keep(self, index: int) -> None:
        name, restarts = self._placing.name_of(index), Restarts(self._limits)
        loop = asyncio.get_running_loop()
        while True:
            ending, status = await self._ending_of(name)
            if self._is_stopping:
                return
            if status == 0:
                # It was drained by an operator or the coordinator.
                self._num_kept -= 1
                self._report(f"{name} {ending}; it was drained")
                await self._release(name)
                return
            delay_s = restarts.begin(loop.time())
            if delay_s is None:
                self._num_kept -= 1
                if not self._num_kept:
                    raise EngineDied(f"{name} {ending} after {restarts.tries}")
                await self._release(name)
                deaths = f"{restarts.num_deaths} deaths, the last: {ending}"
                self._report(f"ERROR {name} stays down after {restarts.tries}: {deaths}")
                self._on_change()
                return
            self._report(f"{name} {ending}; starts again in {delay_s:g} s ({restarts.count})")
            await asyncio.sleep(delay_s)
            await self._restart(index)

    async def _restart(self, index: int) -> None:
        name = self._placing.name_of(index)
        try:
            async with asyncio.timeout(self._limits.startup_s):
                await self._start(index)
        except (EngineDied, HostLost, TimeoutError) as error:
            # `_keep` notices that nothing runs, and counts it.
            self._report(f"{name} did not start: {error or 'it took too long'}")
            await self._release(name)
            return
        self._on_change()

    async def _ending_of(self, name: str) -> tuple[str, int | None]:
        """Wait for an engine's end; returns a description, and its exit code unless its host was lost."""
        host = self._hosts.get(name)
        if host is None:
            return "is not running", None
        try:
            status = await host.ended()
        except HostLost as lost:
            await self._release(name)
            return f"was lost with its host ({lost})", None
        return describe_exit(status), status

    async def _end(self, name: str) -> None:
        try:
            status = await self._hosts[name].drain(self._limits.stop_s)
            self._report(f"{name} {describe_exit(status)}")
        except HostLost as lost:
            self._report(f"{name} was lost with its host ({lost})")
        await self._release(name)

    async def _release(self, name: str) -> None:
        # On another host the engine gets another port.
        self.placements.pop(name, None)
        host = self._hosts.pop(name, None)
        if host is not None:
            await _unless_lost(host.dismiss())


def limits_of(placing: Placing) -> SupervisorLimits:
    """Timeouts and restart limits of a placement."""
    config = placing.config
    return SupervisorLimits(startup_s=config.startup_timeout_s, stop_s=config.drain_deadline_s + _TEARDOWN_S)


async def _unless_lost(work: Awaitable[object]) -> None:
    try:
        await work
    except HostLost:
        return
