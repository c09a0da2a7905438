"""Streams while engines or the coordinator are killed, frozen, stopped or flooded: errors, gaps, recovery.

    python -m benchmarks chaos                          # every fault
    python -m benchmarks chaos --fault "engine kill" --rounds 20
    python -m benchmarks chaos --fault "coordinator SIGSTOP"

At any time 64 streams run over two engines and a frontend: greedy, seeded, four outputs, stop strings,
penalties and logprobs. Outages and calm stretches take turns: an outage lasts until the stack is whole again,
and a stretch of the same length follows in which nothing is done. No stream may fail or differ from an
undisturbed run. While the coordinator is out, no gap may be more than 50 ms above the 99.9th percentile of
the calm stretches. `make test-chaos` has further faults, without measuring times.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report, Row, percentile
from benchmarks.rig import faults
from benchmarks.rig.history import num_repeats
from benchmarks.rig.outage import FAULTS, MAX_ADDED_GAP_S, Facts, Rig, Verdict, Watched, judge, rig, stretch
from benchmarks.rig.streams import StreamRecord
from benchmarks.rig.watch import (
    MIN_IN_FLIGHT,
    calibrate,
    detected_at,
    moved_requests,
    recoveries,
    stale_outputs,
)

_COORDINATOR = {f"coordinator {fault.name}": fault for fault in FAULTS}
_ENGINE_ROUNDS = {"engine kill": 20, "engine freeze": 3}
_MAX_REBUILD_S = 2.0
_MAX_END_S = 1.0
# What the streams see of an outage ends with it, or soon after.
_SETTLE_S = 1.0
_FREEZE_S = 5.0
_BUSY_LIMIT_S = 60.0
_POLL_S = 0.02
_MAX_DETECTION_S = {"engine kill": 0.25, "engine freeze": 2.0}
_MAX_RECOVERY_S = 2.0


@dataclass(slots=True)
class EngineStrikes:
    """Effects of strikes on engines, one value for each."""

    num_on_victim: list[int] = field(default_factory=list)
    num_moved: list[int] = field(default_factory=list)
    num_stale: list[int] = field(default_factory=list)
    detected_s: list[float] = field(default_factory=list)
    struck: list[tuple[float, list[StreamRecord]]] = field(default_factory=list)

    @property
    def recovered_s(self) -> list[float]:
        """The time until tokens went on, of each stream on a struck engine."""
        return [each for at, records in self.struck for each in recoveries(records, at)]


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [*_ENGINE_ROUNDS, *_COORDINATOR]
    parser.add_argument("--fault", choices=names, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, help="outages (default: as the fault has it)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an output")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    broken: list[str] = []
    for name in options.fault or [*_ENGINE_ROUNDS, *_COORDINATOR]:
        row, found = asyncio.run(_strike(name, options))
        rows.append(row)
        broken += [f"{name}: {text}" for text in found]
    settings = {name: getattr(options, name) for name in ("streams", "tokens")}
    return Report("chaos", settings, rows, broken)


async def _strike(name: str, options: argparse.Namespace) -> tuple[Row, list[str]]:
    # Else a full collection, over all that was recorded, would stop the clients and look like a gap.
    gc.disable()
    strikes, facts = EngineStrikes(), list[Facts]()
    fault = _COORDINATOR.get(name)
    num_rounds = options.rounds or (fault.num_rounds if fault else _ENGINE_ROUNDS[name])
    with tempfile.TemporaryDirectory() as folder:
        async with rig(Path(folder), num_streams=options.streams, num_tokens=options.tokens) as stack:
            label = name.replace(" ", "")
            async with stack.streams(label, finds_engines=fault is None) as watched:
                for number in range(num_rounds):
                    async with stretch(watched, is_outage=True):
                        if fault is not None:
                            facts.append(await fault.strike(stack.coordinator, fault.outage_s))
                        else:
                            await _strike_engine(name, stack, watched, number, strikes)
                        watched.rebuilt_s.append(await stack.until_known())
                        await asyncio.sleep(_SETTLE_S)
                    async with stretch(watched, is_outage=False):
                        await asyncio.sleep(watched.stretches[-1].length_s)
            verdict = judge(watched, stack.oracle)
    row = _row(name, watched, verdict)
    if fault is not None:
        worst = {key: max(each[key] for each in facts) for key in facts[0]}
        limits = {
            "limit_ms": (verdict.calm_p999_s + MAX_ADDED_GAP_S) * 1000,
            "over_ms": verdict.over_s * 1000,
        }
        return {**row, **limits, **worst}, coordinator_shortfalls(watched, verdict, worst)
    scale = calibrate(watched.records).scale
    return {**row, **_engine_columns(strikes)}, engine_shortfalls(name, verdict, strikes, scale)


async def _strike_engine(
    name: str, stack: Rig, watched: Watched, number: int, strikes: EngineStrikes
) -> None:
    """Kill or freeze one of the engines once it has streams enough; returns when the stack is whole again."""
    engine, frontend = stack.fleet[f"engine-{number % 2}"], stack.frontend
    engine_id = str((await engine.status())["engine_id"])
    async with asyncio.timeout(_BUSY_LIMIT_S):
        while len(there := watched.flow.open_at(engine_id)) < min(MIN_IN_FLIGHT, len(stack.cases) // 4):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
    num_moved, instant = await moved_requests(frontend), time.time()
    there = watched.flow.open_at(engine_id)
    if name == "engine kill":
        struck_at = await faults.kill(engine)
    else:
        struck_at = await faults.stop(engine)
        await asyncio.sleep(_FREEZE_S)
        await faults.resume(engine)
        strikes.num_stale.append(await stale_outputs(frontend, engine.address))
    strikes.detected_s.append(await detected_at(frontend, engine.address, instant) - instant)
    await stack.fleet.start()
    await stack.fleet.until_routed()
    strikes.num_on_victim.append(len(there))
    strikes.num_moved.append(await moved_requests(frontend) - num_moved)
    strikes.struck.append((struck_at, there))


def _row(name: str, watched: Watched, verdict: Verdict) -> Row:
    return {
        "fault": name,
        "outages": len(watched.rebuilt_s),
        "streams": verdict.num_streams,
        "errors": verdict.num_errors,
        "differing": verdict.num_differing,
        "repeats": num_repeats(watched.records),
        "engines_lost": watched.max_num_lost,
        "calm_p999_ms": verdict.calm_p999_s * 1000,
        "calm_max_ms": verdict.calm_max_s * 1000,
        "outage_p999_ms": verdict.outage_p999_s * 1000,
        "outage_max_ms": verdict.outage_max_s * 1000,
        "rebuilt_max_s": max(watched.rebuilt_s),
    }


def _engine_columns(strikes: EngineStrikes) -> Row:
    return {
        "on_engine": statistics.median(strikes.num_on_victim),
        "moved": sum(strikes.num_moved),
        "stale": sum(strikes.num_stale),
        "detected_max_ms": max(strikes.detected_s) * 1000,
        "recovered_p50_s": percentile(strikes.recovered_s, 50),
        "recovered_p99_s": percentile(strikes.recovered_s, 99),
    }


def coordinator_shortfalls(watched: Watched, verdict: Verdict, facts: Facts) -> list[str]:
    found = _stream_shortfalls(verdict)
    if watched.max_num_lost:
        found.append(f"the frontend did not route to {watched.max_num_lost} engines at some time")
    if verdict.over_s > 0:
        found.append(f"a gap is {verdict.over_s * 1000:.0f} ms longer than it may be")
    if (slowest := max(watched.rebuilt_s)) > _MAX_REBUILD_S:
        found.append(f"the topology took {slowest:.2f} s to be whole again")
    if facts.get("exit_status", 0):
        found.append(f"it ended with {facts['exit_status']:g}")
    if facts.get("ended_s", 0.0) > _MAX_END_S:
        found.append(f"its end took {facts['ended_s']:.2f} s")
    return found


def engine_shortfalls(name: str, verdict: Verdict, strikes: EngineStrikes, scale: float) -> list[str]:
    """`scale` is what limits of time are multiplied by on this machine."""
    found = _stream_shortfalls(verdict)
    limit_s = _MAX_DETECTION_S[name]
    if not all(strikes.num_moved):
        found.append("a strike moved nothing")
    if (slowest := max(strikes.detected_s)) > limit_s * scale:
        found.append(f"detection took {slowest:.3f} s")
    away_s = limit_s if name == "engine freeze" else 0.0
    if (recovery_s := percentile(strikes.recovered_s, 99) - away_s) > _MAX_RECOVERY_S * scale:
        found.append(f"recovery p99 is {recovery_s:.2f} s")
    if name == "engine freeze" and not all(strikes.num_stale):
        found.append("no stale output was counted: the engine did not go on with its old requests")
    return found


def _stream_shortfalls(verdict: Verdict) -> list[str]:
    found = []
    if verdict.num_errors:
        found.append(f"{verdict.num_errors} streams failed")
    if verdict.num_differing:
        found.append(f"{verdict.num_differing} streams differ from the undisturbed run")
    return found + [str(violation) for violation in verdict.violations[:3]]
