"""A stack under constant streams in which a service is struck, and the gaps that clients see."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from benchmarks.rig import faults
from benchmarks.rig.history import Oracle, Violation, count_kinds
from benchmarks.rig.lines import module
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from benchmarks.rig.streams import Case, Flow, Load, StreamRecord, make_cases
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel

NUM_ENGINES = 2
# What a disturbed stretch may add to the 99.9th percentile of an undisturbed one.
MAX_ADDED_GAP_S = 0.05
_POLL_S = 0.05
# Each look costs the frontend a connection.
_LOOK_S = 0.5
_MAX_BATCHED_TOKENS = 128
_REBUILD_LIMIT_S = 30.0
_BETWEEN_STARTS_S = 0.05
_FLOOD_RATE = 10_000
# The flood stands for one from another machine and should not take the cores of the stack, but with a lower
# priority than this it would be no flood.
_NICE = 5

Facts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time between two instants of the monotonic clock.

    In an outage the coordinator is struck, or not whole yet. Otherwise nothing happens.
    """

    is_outage: bool
    began_at: float
    ended_at: float

    @property
    def length_s(self) -> float:
        return self.ended_at - self.began_at


@dataclass(slots=True)
class Watched:
    """Stretches of one stack, and every stream that was under way."""

    flow: Flow
    stretches: list[Stretch] = field(default_factory=list)
    rebuilt_s: list[float] = field(default_factory=list)  # from each end of a fault to a whole topology
    max_num_lost: int = 0  # engines that a frontend did not route to at any look

    @property
    def records(self) -> list[StreamRecord]:
        return self.flow.load.records

    def gaps_s(self, *, in_outage: bool) -> list[float]:
        """Gaps of all streams that ended in a stretch of that kind."""
        chosen = [stretch for stretch in self.stretches if stretch.is_outage is in_outage]
        return [
            later - earlier
            for record in self.records
            for earlier, later in itertools.pairwise(record.token_instants)
            if any(stretch.began_at <= later < stretch.ended_at for stretch in chosen)
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a stack's streams. Times in s."""

    num_streams: int
    num_errors: int
    num_differing: int
    calm_gaps: int
    calm_p999_s: float
    calm_max_s: float
    outage_gaps: int
    outage_p999_s: float
    outage_max_s: float
    violations: tuple[Violation, ...]

    @property
    def over_s(self) -> float:
        """The excess of an outage's longest gap over its limit; 0 or less is well."""
        return self.outage_max_s - self.calm_p999_s - MAX_ADDED_GAP_S


def judge(watched: Watched, oracle: Oracle) -> Verdict:
    """Hold all streams against the undisturbed run, and outage gaps against calm ones."""
    calm, outage = (watched.gaps_s(in_outage=in_outage) for in_outage in (False, True))
    if not calm or not outage:
        raise ValueError(f"{len(calm)} gaps while calm and {len(outage)} while not: nothing to compare")
    violations = oracle.violations(watched.records)
    kinds = count_kinds(violations)
    return Verdict(
        num_streams=len(watched.records),
        num_errors=sum(kinds.get(kind, 0) for kind in ("error", "order", "end")),
        num_differing=kinds.get("content", 0),
        calm_gaps=len(calm),
        calm_p999_s=quantile(calm, 0.999),
        calm_max_s=max(calm),
        outage_gaps=len(outage),
        outage_p999_s=quantile(outage, 0.999),
        outage_max_s=max(outage),
        violations=tuple(violations),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the values that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Rig:
    """Coordinator, two engines, one frontend, and a channel to it."""

    def __init__(
        self, fleet: Fleet, channel: grpc.aio.Channel, cases: Sequence[Case], oracle: Oracle
    ) -> None:
        self.fleet = fleet
        self.channel = channel
        self.oracle = oracle
        self.cases = cases

    @property
    def coordinator(self) -> ServiceProcess:
        return self.fleet["coordinator-0"]

    @property
    def frontend(self) -> ServiceProcess:
        return self.fleet["frontend-0"]

    @contextlib.asynccontextmanager
    async def streams(self, label: str, *, finds_engines: bool = False) -> AsyncIterator[Watched]:
        """A stream for each case at any time, followed by the next when it ends, while the block lasts."""
        flow = Flow(self.channel, self.cases, label)
        watched = Watched(flow)
        looking = asyncio.ensure_future(self._look(watched))
        try:
            async with flow.running(
                len(self.cases), between_starts_s=_BETWEEN_STARTS_S, finds_engines=finds_engines
            ):
                yield watched
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def until_known(self) -> float:
        """Wait until the coordinator knows every engine as ready; how long that took, in s."""
        began_at = time.monotonic()
        async with asyncio.timeout(_REBUILD_LIMIT_S):
            while (await self.coordinator.status())["num_ready"] != NUM_ENGINES:  # noqa: ASYNC110  It is silent.
                await asyncio.sleep(_POLL_S)
        return time.monotonic() - began_at

    async def _look(self, watched: Watched) -> None:
        while True:
            status = await self.frontend.status()
            num_ready = list(status.values()).count("ready")
            watched.max_num_lost = max(watched.max_num_lost, NUM_ENGINES - num_ready)
            await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def stretch(watched: Watched, *, is_outage: bool) -> AsyncIterator[None]:
    """Record the block as one stretch."""
    began_at = time.monotonic()
    yield
    watched.stretches.append(Stretch(is_outage, began_at, time.monotonic()))


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    *,
    num_streams: int = 64,
    num_tokens: int = 128,
    route: Callable[[str, ServiceProcess], Awaitable[str]] | None = None,
) -> AsyncIterator[Rig]:
    """A stack that is warm, with what an undisturbed run says recorded.

    `route` returns where a service, by its name, finds the coordinator, if not at its own address.
    """
    cases = make_cases(num_streams, num_tokens=num_tokens)
    async with Fleet(folder) as fleet:
        coordinator = fleet.add(ServicePlan("coordinator", 0))
        await fleet.start()
        names = [f"engine-{index}" for index in range(NUM_ENGINES)] + ["frontend-0"]
        addresses = [await route(name, coordinator) if route else coordinator.address for name in names]
        for index in range(NUM_ENGINES):
            fleet.add(ServicePlan("engine", index, engine_flags(index, addresses[index])))
        frontend = fleet.add(ServicePlan("frontend", 0, frontend_flags(addresses[-1])))
        await fleet.start()
        await fleet.until_routed()
        async with open_channel(frontend.address, profile="public") as channel:
            load = Load(label="undisturbed")
            load.send(channel, cases)
            yield Rig(fleet, channel, cases, Oracle(await load.finish()))


def engine_flags(index: int, coordinator: str) -> tuple[str, ...]:
    return (
        str(embedded_model()),
        "--num-threads=1",
        # Else a step with long prompts takes longer than what is looked for.
        f"--max-num-batched-tokens={_MAX_BATCHED_TOKENS}",
        f"--data-parallel-rank={index}",
        f"--data-parallel-size={NUM_ENGINES}",
        f"--coordinator={coordinator}",
    )


def frontend_flags(coordinator: str) -> tuple[str, ...]:
    return (f"--coordinator={coordinator}", "--text-workers=1", "--drain-lag-s=0")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a coordinator, its duration, and its repetitions."""

    name: str
    # Strikes a coordinator and lets it be well again; what there is to report of it.
    strike: Callable[[ServiceProcess, float], Awaitable[Facts]]
    outage_s: float
    num_rounds: int


async def _kill(coordinator: ServiceProcess, seconds: float) -> Facts:
    await faults.kill(coordinator)
    await asyncio.sleep(seconds)
    await coordinator.start()
    return {}


async def _freeze(coordinator: ServiceProcess, seconds: float) -> Facts:
    await faults.stop(coordinator)
    await asyncio.sleep(seconds)
    await faults.resume(coordinator)
    return {}


async def _terminate(coordinator: ServiceProcess, seconds: float) -> Facts:
    began_at = await faults.terminate(coordinator)
    status = await coordinator.ended()
    ended_s = time.monotonic() - began_at
    await asyncio.sleep(seconds)
    await coordinator.start()
    return {"exit_status": status, "ended_s": ended_s}


async def _flood(coordinator: ServiceProcess, seconds: float) -> Facts:
    busy_s, began_at = _cpu_s(coordinator), time.monotonic()
    flags = (coordinator.address, f"--rate={_FLOOD_RATE}", f"--seconds={seconds}")
    process = await asyncio.create_subprocess_exec(
        "nice", f"-n{_NICE}", *module("benchmarks.rig.flood", *flags), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    counts = json.loads(output)
    busy_s, wall_s = _cpu_s(coordinator) - busy_s, time.monotonic() - began_at
    return {
        "flood_messages_per_s": counts["num_sent"] / seconds,
        "flood_sessions": counts["num_sessions"],
        "flood_cut_off": counts["statuses"].get("RESOURCE_EXHAUSTED", 0),
        "flood_cpu_share": busy_s / wall_s,
    }


def _cpu_s(process: ServiceProcess) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


FAULTS = (
    Fault("kill -9", _kill, 3.0, 3),
    Fault("SIGSTOP", _freeze, 30.0, 1),
    Fault("SIGTERM", _terminate, 3.0, 3),
    Fault("flood", _flood, 5.0, 3),
)
