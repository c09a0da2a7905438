"""One run: streams sent, a phase awaited, an engine struck, and what that did to them. Knows no table."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import grpc.aio

from benchmarks import failover_faults as faults
from benchmarks.failover_history import Oracle, Violation, count_kinds, num_repeats
from benchmarks.failover_load import Case, Load, StreamRecord, engine_ids
from benchmarks.failover_processes import Fleet, ServiceProcess, log_instant
from benchmarks.load import percentile

MIN_IN_FLIGHT = 20
STOPPED_S = 5.0
# Tokens of the median stream that still count as its first ones, or already as its last ones.
_EDGE_TOKENS = 4
_PHASE_LIMIT_S = 60.0
_STALE_LIMIT_S = 15.0
_POLL_S = 0.002
_LOG_LIMIT_S = 10.0


class Phase(Enum):
    """How far the median of the streams on the struck engine is, by what its client has seen of it."""

    PREFILL = "prefill"
    FIRST_TOKEN = "first token"
    MID_DECODE = "mid-decode"
    LAST_TOKEN = "last token"


class Fault(Enum):
    """What happens to the engine."""

    KILL = "kill"
    STOP = "stop"


class PhaseMissed(Exception):
    """The streams were past the phase before anything could be done to them."""


@dataclass(slots=True)
class RunResult:
    """What one strike did."""

    phase: Phase
    victim: str
    num_in_flight: int  # streams on the struck engine
    num_handles: int  # outputs there, by the frontend's own status
    violations: list[Violation] = field(default_factory=list)
    num_streams: int = 0
    num_repeats: int = 0
    detected_s: float = 0.0  # until the frontend does not call the engine ready any more
    recovered_s: list[float] = field(default_factory=list)  # of each stream there, until its next tokens
    num_moved: int = 0  # requests that went on elsewhere, by the frontend's own status
    num_stale: int = 0

    def count(self, kind: str) -> int:
        """Streams that broke this kind of promise."""
        return count_kinds(self.violations).get(kind, 0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What an undisturbed run on this machine shows, and what limits of time are multiplied by for it."""

    gap_p99_s: float
    scale: float


# The gap between tokens of one of 64 streams where two engines have two cores to themselves.
_NOMINAL_GAP_S = 0.15


def calibrate(records: Sequence[StreamRecord]) -> Calibration:
    """From the gaps between the tokens of streams that nothing happened to."""
    gap_p99_s = percentile([gap for record in records for gap in record.gaps_s], 99)
    return Calibration(gap_p99_s, max(1.0, gap_p99_s / _NOMINAL_GAP_S))


def phase_of(records: Sequence[StreamRecord]) -> Phase:
    """The phase of the median of these streams, which are open."""
    num_tokens = statistics.median(record.num_tokens for record in records)
    if num_tokens < 1:
        return Phase.PREFILL
    if num_tokens <= _EDGE_TOKENS:
        return Phase.FIRST_TOKEN
    if num_tokens >= records[0].case.sampling.max_tokens - _EDGE_TOKENS:
        return Phase.LAST_TOKEN
    return Phase.MID_DECODE


async def run_once(
    fleet: Fleet,
    channel: grpc.aio.Channel,
    cases: Sequence[Case],
    oracle: Oracle,
    *,
    label: str,
    phase: Phase,
    victim: ServiceProcess,
    fault: Fault,
) -> RunResult:
    """Strike `victim` in `phase` of the load and follow every stream to its end. Raises PhaseMissed."""
    frontend = fleet["frontend-0"]
    num_moved = await moved_requests(frontend)
    load = Load(label=label)
    load.send(channel, cases)
    try:
        result, on_victim = await _await_phase(frontend, channel, load, victim, phase)
    except PhaseMissed:
        await load.finish()
        raise
    instant = time.time()
    struck_at = await (faults.kill(victim) if fault is Fault.KILL else faults.stop(victim))
    if fault is Fault.STOP:
        await asyncio.sleep(STOPPED_S)
        await faults.resume(victim)
    await load.finish()
    if fault is Fault.STOP:
        result.num_stale = await stale_outputs(frontend, victim.address)
    result.num_moved = await moved_requests(frontend) - num_moved
    result.num_streams = len(load.records)
    result.violations = oracle.violations(load.records)
    result.num_repeats = num_repeats(load.records)
    result.recovered_s = recoveries(on_victim, struck_at)
    result.detected_s = await detected_at(frontend, victim.address, instant) - instant
    return result


async def _await_phase(
    frontend: ServiceProcess, channel: grpc.aio.Channel, load: Load, victim: ServiceProcess, phase: Phase
) -> tuple[RunResult, list[StreamRecord]]:
    """Wait for the phase; the streams that are on the victim now. Nothing runs before the strike."""
    victim_id = str((await victim.status())["engine_id"])
    where = await placed(channel, load)
    there = [record for record in load.records if where.get(record.request_id) == victim_id]
    async with asyncio.timeout(_PHASE_LIMIT_S):
        while True:
            handles = int((await frontend.status()).get(f"engine.{victim.address}.num_in_flight", 0))
            open_there = [record for record in there if record.ended_at is None]
            if min(len(open_there), handles) < MIN_IN_FLIGHT:
                counts = f"{len(open_there)} streams, {handles} outputs"
                raise PhaseMissed(f"{counts} are open on {victim.name} before {phase.value}")
            now = phase_of(open_there)
            if now is phase and (phase is not Phase.MID_DECODE or _is_midway(open_there)):
                return RunResult(phase, victim.name, len(open_there), handles), open_there
            if list(Phase).index(now) > list(Phase).index(phase):
                raise PhaseMissed(f"{phase.value} was over at the first look")
            await asyncio.sleep(_POLL_S)


def _is_midway(records: Sequence[StreamRecord]) -> bool:
    middle = records[0].case.sampling.max_tokens / 2
    return statistics.median(record.num_tokens for record in records) >= middle


async def placed(channel: grpc.aio.Channel, load: Load) -> dict[str, str]:
    """Which engine has which stream, once all of them are somewhere."""
    where: dict[str, str] = {}
    async with asyncio.timeout(_PHASE_LIMIT_S):
        while True:
            unknown = [record for record in load.records if not where.get(record.request_id)]
            open_ones = [record for record in unknown if record.ended_at is None]
            if not open_ones:
                return where
            where |= await engine_ids(channel, open_ones)


def recoveries(records: Sequence[StreamRecord], struck_at: float) -> list[float]:
    """Of each stream, the time from the strike to the end of its longest silence that ends after it.

    What the engine had sent before still comes in after the strike. A stream without another token counts to
    its end.
    """
    found = []
    for record in records:
        end = record.ended_at or time.monotonic()
        at = [record.sent_at, *record.token_instants]
        silences = [
            (later - earlier, later) for earlier, later in itertools.pairwise(at) if later > struck_at
        ]
        found.append((max(silences)[1] if silences else end) - struck_at)
    return found


async def detected_at(frontend: ServiceProcess, address: str, since: float) -> float:
    """When the frontend logged that an engine is not ready any more, in s since 1970, after `since`."""
    async with asyncio.timeout(_LOG_LIMIT_S):
        while True:
            for record in frontend.log_records():
                if record.get("msg") != "engine state" or record.get("engine") != address:
                    continue
                # A line's instant is cut to the millisecond.
                if record.get("state") != "ready" and log_instant(record) >= since - 0.001:
                    return log_instant(record)
            await asyncio.sleep(0.05)


async def moved_requests(frontend: ServiceProcess) -> int:
    """Requests that a frontend has sent on to another engine since it started."""
    return int((await frontend.status())["num_moved_requests"])


async def stale_outputs(frontend: ServiceProcess, address: str) -> int:
    """Outputs of moved requests that the engine sent all the same, once there are any; 0 after the limit."""
    key = f"engine.{address}.stale_outputs"
    try:
        async with asyncio.timeout(_STALE_LIMIT_S):
            while not (count := (await frontend.status()).get(key, 0)):  # noqa: ASYNC110  It does not tell.
                await asyncio.sleep(0.05)
    except TimeoutError:
        return 0
    return int(count)
