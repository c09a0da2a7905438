"""Stacks that scenarios share: started once for all that want the same, mended after each. Knows no fault."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from benchmarks.rig.history import Oracle, order_violations
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from benchmarks.rig.streams import Case, Load, StreamRecord, make_cases
from benchmarks.rig.watch import Calibration, calibrate
from tests.chaos.fault_plugin import FOLDER_VARIABLE, MARKER_POSITION, EngineFault, write_distribution
from tests.chaos.leaks import SPARE_TASKS, Baseline, leaks, take_baseline
from tests.chaos.proxy import TcpProxy
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel

_REPOSITORY = Path(__file__).resolve().parents[2]
# So many that every engine gets some.
_NUM_EXERCISES = 8
_EXERCISE_TOKENS = 8
# Threads that gRPC has started for a burst end when they have had nothing to do for 20 s.
_LEAKS_WITHIN_S = 40.0


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What a scenario needs to run on. Two equal plans share one stack."""

    num_frontends: int = 1
    has_proxies: bool = False  # between frontends and engines, and then there is no coordinator
    has_plugin: bool = False
    tensor_parallel_size: int = 1
    engine_flags: tuple[str, ...] = ()
    frontend_flags: tuple[str, ...] = ()
    model: Path = field(default_factory=embedded_model)
    num_engines: int = 2
    num_streams: int = 64  # of the loads it gets

    @property
    def needs_ranks(self) -> bool:
        """Whether engines get a data-parallel rank, which one engine alone has at the coordinator."""
        return not self.has_proxies and self.tensor_parallel_size == 1


class Stack:
    """The processes of one plan, channels to its frontends, and what they were like when idle."""

    def __init__(self, plan: StackPlan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.fleet = Fleet(folder)
        self.proxies: dict[str, TcpProxy] = {}
        self.baseline = Baseline({})
        self.calibration = Calibration(0.0, 1.0)
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def frontends(self) -> list[ServiceProcess]:
        return self.fleet.of("frontend")

    @property
    def processes(self) -> list[ServiceProcess]:
        return list(self.fleet.processes.values())

    @property
    def engines(self) -> list[ServiceProcess]:
        return self.fleet.of("engine")

    def route_of(self, engine: ServiceProcess) -> str:
        """The address by which frontends know an engine."""
        proxy = self.proxies.get(engine.name)
        return proxy.address if proxy is not None else engine.address

    def channel(self, index: int = 0) -> grpc.aio.Channel:
        """A connection to a frontend, kept for the stack's life."""
        frontend = self.frontends[index]
        if frontend.name not in self._channels:
            self._channels[frontend.name] = open_channel(frontend.address, profile="public")
        return self._channels[frontend.name]

    async def start(self) -> None:
        """Start everything; returns when every frontend can use every engine."""
        known: tuple[str, ...] = ()
        if not self.plan.has_proxies:
            coordinator = self.fleet.add(ServicePlan("coordinator", 0))
            await self.fleet.start()
            known = (f"--coordinator={coordinator.address}",)
        for index in range(self.plan.num_engines):
            engine = self.fleet.add(
                ServicePlan("engine", index, (*self._engine_flags(index), *known), self._engine_environment())
            )
            if self.plan.has_proxies:
                self.proxies[engine.name] = await TcpProxy(engine.address).__aenter__()
        known += tuple(f"--engine={proxy.address}" for proxy in self.proxies.values())
        for index in range(self.plan.num_frontends):
            flags = (*known, "--text-workers=1", "--drain-lag-s=1", *self.plan.frontend_flags)
            self.fleet.add(ServicePlan("frontend", index, flags))
        await self.fleet.start()
        await self.fleet.until_routed()

    async def mend(self) -> None:
        """Start again what a scenario has ended; proxies let everything pass."""
        await self.fleet.release()
        for proxy in self.proxies.values():
            proxy.release()
            proxy.delay_s = 0.0
        await self.fleet.start()
        await self.fleet.until_routed()

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        for proxy in self.proxies.values():
            proxy.release()
        await self.fleet.stop()
        for proxy in self.proxies.values():
            await proxy.__aexit__(None, None, None)

    def _engine_flags(self, index: int) -> tuple[str, ...]:
        flags = [str(self.plan.model), "--num-threads=1", *self.plan.engine_flags]
        if self.plan.tensor_parallel_size > 1:
            flags.append(f"--tensor-parallel-size={self.plan.tensor_parallel_size}")
        if self.plan.needs_ranks:
            flags += [f"--data-parallel-rank={index}", f"--data-parallel-size={self.plan.num_engines}"]
        return tuple(flags)

    def _engine_environment(self) -> dict[str, str]:
        if not self.plan.has_plugin:
            return {}
        installed = self.folder / "installed"
        if not installed.exists():
            write_distribution(installed)
        return {FOLDER_VARIABLE: str(self.folder), "PYTHONPATH": str(installed)}


class Stacks:
    """One stack at a time; the next scenario with the same plan gets it again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: Stack | None = None
        self._oracles: dict[tuple[int, int, int], Oracle] = {}
        self._num_loads = 0
        self._num_stacks = 0

    async def get(self, plan: StackPlan) -> Stack:
        """A stack of this plan that is idle, warm and whole."""
        if self._current is None or self._current.plan != plan:
            await self.drop()
            self._num_stacks += 1
            folder = self._folder / f"stack-{self._num_stacks}"
            folder.mkdir(parents=True)
            self._current = Stack(plan, folder)
            await self._current.start()
            # How fast this machine is with this stack when nothing happens.
            self._current.calibration = calibrate(
                await self.undisturbed(self._current, make_cases(plan.num_streams))
            )
            await self.exercise(self._current)
            self._current.baseline = await take_baseline(self._current.processes)
        await self._current.mend()
        return self._current

    async def leaks(self, *, spare_tasks: int = SPARE_TASKS) -> list[str]:
        """What the stack holds too much of when it is whole and without requests."""
        assert self._current is not None
        await self._current.mend()
        await self.exercise(self._current)
        return await leaks(
            self._current.processes,
            self._current.baseline,
            settle_s=_LEAKS_WITHIN_S * self._current.calibration.scale,
            spare_tasks=spare_tasks,
        )

    async def exercise(self, stack: Stack) -> None:
        """A few streams through every frontend: what a first use sets up is there then."""
        for index in range(len(stack.frontends)):
            load = Load(label=self.label())
            load.send(stack.channel(index), make_cases(_NUM_EXERCISES, num_tokens=_EXERCISE_TOKENS))
            violations = [each for record in await load.finish() for each in order_violations(record)]
            if violations:
                raise RuntimeError(f"a stack that nothing disturbs does not serve: {violations[0]}")

    async def drop(self) -> None:
        """End the stack: no other scenario goes on with what a failed one left."""
        current, self._current = self._current, None
        if current is not None:
            await current.stop()

    def label(self) -> str:
        """A name that no other load of this session has."""
        self._num_loads += 1
        return f"load-{self._num_loads}"

    async def oracle(self, stack: Stack, cases: Sequence[Case]) -> Oracle:
        """What these cases are answered with; recorded once for all stacks that compute alike."""
        key = _oracle_key(stack.plan.tensor_parallel_size, cases)
        if key not in self._oracles:
            if stack.plan.has_plugin:
                raise RuntimeError("an engine with faults says nothing about an undisturbed run")
            self._oracles[key] = Oracle(await self.undisturbed(stack, cases))
        return self._oracles[key]

    def has_oracle(self, cases: Sequence[Case]) -> bool:
        """Whether it is recorded already what an engine of one rank answers these with."""
        return _oracle_key(1, cases) in self._oracles

    async def undisturbed(self, stack: Stack, cases: Sequence[Case]) -> list[StreamRecord]:
        """The records of a load that nothing happens to."""
        load = Load(label=self.label())
        load.send(stack.channel(), cases)
        return await load.finish()


def _oracle_key(tensor_parallel_size: int, cases: Sequence[Case]) -> tuple[int, int, int]:
    return tensor_parallel_size, cases[0].sampling.max_tokens, len(cases)


def cases_with_marks(num_streams: int, num_tokens: int) -> list[Case]:
    """The load, and behind it a greedy case for each fault of engines, marked with it."""
    cases = make_cases(num_streams, num_tokens=num_tokens)
    plain = cases[0]
    for offset, fault in enumerate(EngineFault):
        token_ids = list(plain.token_ids)
        token_ids[MARKER_POSITION] = fault.value
        cases.append(Case(num_streams + offset, plain.kind, tuple(token_ids), plain.sampling))
    return cases


def keep_logs(folder: Path, scenario: str) -> Path:
    """Copy a failed stack's logs where they outlive the test; the new folder."""
    kept = _REPOSITORY / ".pytest_cache" / "chaos" / re.sub(r"\W+", "-", scenario)
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("installed"))
    os.utime(kept)
    return kept
