"""Streams while the coordinator is killed, frozen, asked to end or flooded: errors, differences, gaps.

    python -m benchmarks.coordinator_outage                      # every fault below
    python -m benchmarks.coordinator_outage --fault SIGSTOP      # 30 s of SIGSTOP

64 streams at any time over two engines and a frontend, and a new one for each that ends. In one run, outages
and calm stretches take turns: an outage lasts until the coordinator knows every engine again, and a stretch
of the same length follows in which nothing is done. No stream may fail or differ from an undisturbed run, and
no gap in an outage may be more than 50 ms above the 99.9th percentile of those in calm stretches.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil

from service_kit.process import prepare_process

prepare_process("client")

from benchmarks import failover_faults as faults  # noqa: E402
from benchmarks.coordinator_outage_rig import (  # noqa: E402
    MAX_ADDED_GAP_S,
    Verdict,
    Watched,
    judge,
    rig,
    stretch,
)
from benchmarks.failover_processes import ServiceProcess  # noqa: E402
from benchmarks.report import Report, Row, print_table  # noqa: E402

Facts: TypeAlias = dict[str, float]

_RESULTS = Path(__file__).resolve().parent / "results" / "coordinator_outage.json"
_MAX_REBUILD_S = 2.0
_MAX_END_S = 1.0
# What the streams feel of an outage ends with it, or soon after.
_SETTLE_S = 1.0
_FLOOD_RATE = 10_000
# Its work is that of another machine: here, it should not take the cores of the stack it floods; with less of
# them than that it would be no flood.
_NICE = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a coordinator, for how long, and how often."""

    name: str
    # Strikes a coordinator and lets it be well again; what there is to say of it.
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
    process = await asyncio.create_subprocess_exec(
        "nice", f"-n{_NICE}", sys.executable, "-m", "benchmarks.coordinator_outage_flood",
        coordinator.address, f"--rate={_FLOOD_RATE}", f"--seconds={seconds}",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    told = json.loads(output)
    busy_s, wall_s = _cpu_s(coordinator) - busy_s, time.monotonic() - began_at
    return {
        "flood_messages_per_s": told["num_sent"] / seconds,
        "flood_sessions": told["num_sessions"],
        "flood_cut_off": told["statuses"].get("RESOURCE_EXHAUSTED", 0),
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


def main() -> int:
    """Strike, print the table, write the report; 1 where a promise broke."""
    arguments = _parse()
    rows: list[Row] = []
    broken: list[str] = []
    for fault in FAULTS:
        if arguments.fault in (None, fault.name):
            watched, verdict, facts = asyncio.run(_run(fault, arguments))
            row = _row(fault, watched, verdict, facts)
            print_table([row])
            rows.append(row)
            problems = [*broken_promises(watched, verdict, facts), *map(str, verdict.violations[:3])]
            broken += [f"{fault.name}: {text}" for text in problems]
    for text in broken:
        print(f"BROKEN {text}")
    settings = {name: getattr(arguments, name) for name in ("streams", "tokens")}
    Report("coordinator_outage", settings, [*_kept(arguments.json, rows), *rows]).write(arguments.json)
    return 1 if broken else 0


def broken_promises(watched: Watched, verdict: Verdict, facts: Facts) -> list[str]:
    """What a run does not keep, in words."""
    found = []
    if verdict.num_errors:
        found.append(f"{verdict.num_errors} streams failed")
    if verdict.num_differing:
        found.append(f"{verdict.num_differing} streams differ from the undisturbed run")
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


async def _run(fault: Fault, arguments: argparse.Namespace) -> tuple[Watched, Verdict, Facts]:
    facts: list[Facts] = []
    # Else a full collection, over all that was recorded, would stop the clients and look like a gap.
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        async with rig(Path(folder), num_streams=arguments.streams, num_tokens=arguments.tokens) as stack:
            async with stack.streams(fault.name.replace(" ", "")) as watched:
                for _ in range(arguments.rounds or fault.num_rounds):
                    async with stretch(watched, is_outage=True):
                        facts.append(await fault.strike(stack.coordinator, fault.outage_s))
                        watched.rebuilt_s.append(await stack.until_known())
                        await asyncio.sleep(_SETTLE_S)
                    async with stretch(watched, is_outage=False):
                        await asyncio.sleep(watched.stretches[-1].length_s)
            verdict = judge(watched, stack.oracle)
    return watched, verdict, {key: max(each[key] for each in facts) for key in facts[0]}


def _row(fault: Fault, watched: Watched, verdict: Verdict, facts: Facts) -> Row:
    return {
        "fault": fault.name,
        "outages": len(watched.rebuilt_s),
        "outage_s": fault.outage_s,
        "streams": verdict.num_streams,
        "errors": verdict.num_errors,
        "differing": verdict.num_differing,
        "engines_lost": watched.max_num_lost,
        "calm_gaps": verdict.calm_gaps,
        "calm_p999_ms": verdict.calm_p999_s * 1000,
        "calm_max_ms": verdict.calm_max_s * 1000,
        "outage_gaps": verdict.outage_gaps,
        "outage_p999_ms": verdict.outage_p999_s * 1000,
        "outage_max_ms": verdict.outage_max_s * 1000,
        "limit_ms": (verdict.calm_p999_s + MAX_ADDED_GAP_S) * 1000,
        "over_ms": verdict.over_s * 1000,
        "rebuilt_max_s": max(watched.rebuilt_s),
        **facts,
    }


def _kept(path: Path, rows: list[Row]) -> list[Row]:
    """Rows of an earlier report about faults that were not tried now."""
    if not path.exists():
        return []
    tried = {row["fault"] for row in rows}
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["fault"] not in tried]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--rounds", type=int, help="outages (default: as the fault has it)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an output")
    parser.add_argument("--json", type=Path, default=_RESULTS, help="where the report goes")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
