"""One scenario under way: its stack, its streams, what is noted when a fault strikes. Knows no fault."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.rig.faults import FaultMissed
from benchmarks.rig.history import Oracle
from benchmarks.rig.processes import ServiceProcess
from benchmarks.rig.streams import Case, Load, StreamRecord
from benchmarks.rig.watch import MIN_IN_FLIGHT, Calibration, moved_requests, placed
from tests.chaos.fault_plugin import MARKER_POSITION, EngineFault
from tests.chaos.stacks import Stack, StackPlan, Stacks, cases_with_marks, keep_logs

NUM_STREAMS = 64
NUM_TOKENS = 128
_MOMENT_LIMIT_S = 60.0
_POLL_S = 0.002

Check = Callable[["Scene"], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is run, what strikes it, and what must hold afterwards."""

    name: str
    strike: Callable[[Scene], Awaitable[None]]
    checks: tuple[Check, ...]
    stack: StackPlan = field(default_factory=StackPlan)
    num_streams: int = NUM_STREAMS
    median_tokens: int = 40  # of the streams, seen by their clients, when it strikes
    marked: EngineFault | None = None  # one more request that asks for this


@dataclass(slots=True)
class Scene:
    """A scenario that is played."""

    scenario: Scenario
    stack: Stack
    stacks: Stacks
    cases: list[Case]
    oracle: Oracle
    calibration: Calibration
    load: Load
    instants: dict[str, float] = field(default_factory=dict)  # monotonic, by what happened
    wall_instants: dict[str, float] = field(default_factory=dict)  # the same in s since 1970, as logs have it
    notes: dict[str, float] = field(default_factory=dict)
    engine_of: dict[str, str] = field(
        default_factory=dict
    )  # the engine of a stream when it began, by their names
    on_victim: list[StreamRecord] = field(default_factory=list)

    @property
    def engines(self) -> list[ServiceProcess]:
        return self.stack.engines

    @property
    def frontend(self) -> ServiceProcess:
        return self.stack.frontends[0]

    @property
    def unmarked(self) -> list[StreamRecord]:
        return [record for record in self.load.records if record.case.key < self.scenario.num_streams]

    @property
    def marked(self) -> StreamRecord:
        return next(record for record in self.load.records if record.case.key >= NUM_STREAMS)

    def note_instant(self, name: str) -> None:
        self.instants[name] = time.monotonic()
        self.wall_instants[name] = time.time()

    async def until_median(self, num_tokens: int) -> None:
        """Wait until the clients have seen so many tokens of the median stream."""
        async with asyncio.timeout(_MOMENT_LIMIT_S):
            while statistics.median(record.num_tokens for record in self.load.records) < num_tokens:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def find_engines(self) -> None:
        """Note which engine has which stream, once every stream is somewhere."""
        names = {str((await engine.status())["engine_id"]): engine.name for engine in self.engines}
        where = await placed(self.stack.channel(), self.load)
        self.engine_of = {request_id: names[engine_id] for request_id, engine_id in where.items()}

    def find_victims(self, engine: ServiceProcess, *, at_least: int = MIN_IN_FLIGHT) -> None:
        """Note which open streams an engine has now. FaultMissed when they are too few to show anything."""
        self.on_victim = [
            record
            for record in self.load.records
            if record.ended_at is None and self.engine_of.get(record.request_id) == engine.name
        ]
        if len(self.on_victim) < at_least:
            num_open = self.load.num_open
            raise FaultMissed(f"{engine.name} has {len(self.on_victim)} of {num_open} open streams")


async def play(stacks: Stacks, scenario: Scenario) -> Scene:
    """Run the load, strike, wait for every stream, mend the stack. Raises FaultMissed if nothing struck."""
    cases = await _recorded_cases(stacks, scenario)
    stack = await stacks.get(scenario.stack)
    plain = cases[: scenario.num_streams]
    oracle = await stacks.oracle(stack, cases)
    load = Load(label=stacks.label())
    scene = Scene(scenario, stack, stacks, plain, oracle, stack.calibration, load)
    try:
        scene.notes["moved_before"] = await moved_requests(scene.frontend)
        load.send(stack.channel(), plain)
        await scene.find_engines()
        await scene.until_median(scenario.median_tokens)
        if scenario.marked is not None:
            mark = next(case for case in cases if case.token_ids[MARKER_POSITION] == scenario.marked.value)
            load.send(stack.channel(), [mark])
        await scenario.strike(scene)
        await load.finish()
        scene.note_instant("finished")
    except BaseException:
        await stacks.drop()
        raise
    return scene


async def judge(scene: Scene) -> list[str]:
    """Everything that did not hold, in words; a stack with which something is wrong is not used again."""
    problems = [problem for check in scene.scenario.checks for problem in await check(scene)]
    try:
        problems += await scene.stacks.leaks()
    except (TimeoutError, RuntimeError) as error:
        problems.append(f"the stack did not come back to what it was: {error!r}")
    scale = scene.calibration
    print(
        f"\n{scene.scenario.name}: gap p99 undisturbed {scale.gap_p99_s * 1000:.0f} ms, limits times"
        f" {scale.scale:.2f}; {' '.join(f'{key}={value:.3f}' for key, value in scene.notes.items())}"
    )
    if problems:
        problems.append(f"logs: {keep_logs(scene.stack.folder, scene.scenario.name)}")
        await scene.stacks.drop()
    return problems


async def _recorded_cases(stacks: Stacks, scenario: Scenario) -> list[Case]:
    cases = cases_with_marks(NUM_STREAMS, NUM_TOKENS)
    if scenario.stack.tensor_parallel_size > 1:
        return cases[: scenario.num_streams]
    if scenario.stack.has_plugin and not stacks.has_oracle(cases):
        # What engines with faults should say is recorded from engines without.
        await stacks.oracle(await stacks.get(StackPlan()), cases)
    return cases
