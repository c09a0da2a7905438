"""Streams that go on when one of two engines is killed: errors, differences, detection, recovery.

    python -m benchmarks.failover                                  # all three parts below
    python -m benchmarks.failover --fault kill --runs 20
    python -m benchmarks.failover --fault stop --runs 1
    python -m benchmarks.failover --by-hand --dtype bfloat16 --runs 1

64 streams, greedy, seeded, four outputs, stop strings, penalties and logprobs, over a coordinator, two
engines and a frontend; `--by-hand` is without coordinator. The engine is struck while the median of its
streams is in prefill, at its first token, midway or at its last, in turn; its streams must say what an
undisturbed run says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from service_kit.process import prepare_process

prepare_process("client")

import grpc.aio  # noqa: E402

from benchmarks.failover_history import Oracle  # noqa: E402
from benchmarks.failover_load import Case, Load, make_cases  # noqa: E402
from benchmarks.failover_processes import Fleet, ServicePlan  # noqa: E402
from benchmarks.failover_runs import (  # noqa: E402
    MIN_IN_FLIGHT,
    Calibration,
    Fault,
    Phase,
    PhaseMissed,
    RunResult,
    calibrate,
    run_once,
)
from benchmarks.load import percentile  # noqa: E402
from benchmarks.report import Report, Row, print_table  # noqa: E402
from launcher.services import embedded_model  # noqa: E402
from service_kit.channel import open_channel  # noqa: E402

_RESULTS = Path(__file__).resolve().parent / "results" / "failover.json"
_MAX_DETECTION_S = 0.25
_MAX_STOP_DETECTION_S = 2.0
_MAX_RECOVERY_S = 2.0
_MIN_RUNS_A_PHASE = 3
_MAX_MISSED = 40
_NUM_CALIBRATIONS = 3
# The engine is stopped for 5 s; its streams are moved by then, and have to run for a while yet.
_STOP_PHASES = (Phase.MID_DECODE,)


@dataclass(frozen=True, slots=True)
class Part:
    """One stack and what is done to it."""

    fault: Fault
    num_runs: int
    is_by_hand: bool
    dtype: str

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"{self.fault.value}, {'by hand' if self.is_by_hand else 'with coordinator'}, {self.dtype}"

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of its runs, in turn."""
        return tuple(Phase) if self.fault is Fault.KILL else _STOP_PHASES


def main() -> int:
    """Run the parts that were asked for, print their tables and write the report; 1 where a promise broke."""
    arguments = _parse()
    parts = _parts(arguments)
    cases = make_cases(arguments.streams, num_tokens=arguments.tokens, seed=arguments.seed)
    rows: list[Row] = []
    broken: list[str] = []
    for part in parts:
        results, calibration = asyncio.run(run_part(part, cases))
        run_rows = [_run_row(part, number, result) for number, result in enumerate(results)]
        total = _total_row(part, results, calibration)
        print_table([{key: row[key] for key in row if key != "violations"} for row in run_rows])
        print_table([total])
        rows += [*run_rows, total]
        found = broken_promises(part, results, calibration)
        broken += [f"{part.name}: {text}" for text in found]
        for result in results:
            for violation in result.violations[:3]:
                print(f"  {violation}")
    for text in broken:
        print(f"BROKEN {text}")
    settings = {name: getattr(arguments, name) for name in ("streams", "tokens", "seed")}
    Report("failover", settings, rows).write(arguments.json)
    return 1 if broken else 0


async def run_part(part: Part, cases: Sequence[Case]) -> tuple[list[RunResult], Calibration]:
    """Start a stack, record what nothing disturbs, then strike its engines in turn."""
    async with _stack(part) as (fleet, channel):
        undisturbed = []
        for number in range(_NUM_CALIBRATIONS):
            load = Load(label=f"undisturbed-{number}")
            load.send(channel, cases)
            undisturbed.append(await load.finish())
        # The first run warms up; the others are what this machine can do.
        oracle = Oracle(undisturbed[0])
        calibration = calibrate([record for records in undisturbed[1:] for record in records])
        results: list[RunResult] = []
        num_missed = 0
        while len(results) < part.num_runs:
            number = len(results)
            victim = fleet[f"engine-{number % 2}"]
            try:
                result = await run_once(
                    fleet,
                    channel,
                    cases,
                    oracle,
                    label=f"run-{number}-{num_missed}",
                    phase=part.phases[number % len(part.phases)],
                    victim=victim,
                    fault=part.fault,
                )
            except PhaseMissed as missed:
                num_missed += 1
                print(f"run {number} again: {missed}", file=sys.stderr)
                if num_missed > _MAX_MISSED:
                    raise
                continue
            await fleet.start()
            await fleet.until_routed()
            if not result.num_moved and not result.violations and num_missed < _MAX_MISSED:
                # All that the engine had to say was on its way when it died: nothing was put to the test.
                num_missed += 1
                print(f"run {number} again: {victim.name} had ended everything", file=sys.stderr)
                continue
            results.append(result)
    return results, calibration


@contextlib.asynccontextmanager
async def _stack(part: Part) -> AsyncIterator[tuple[Fleet, grpc.aio.Channel]]:
    engine_flags = (str(embedded_model()), "--num-threads=1", f"--dtype={part.dtype}")
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(Path(folder)) as fleet:
            if part.is_by_hand:
                engines = [fleet.add(ServicePlan("engine", index, engine_flags)) for index in range(2)]
                # Each is started when the one before it serves, as by somebody who types the commands.
                for engine in engines:
                    await fleet.start([engine.name])
                flags = tuple(f"--engine={engine.address}" for engine in engines)
            else:
                coordinator = fleet.add(ServicePlan("coordinator", 0))
                await fleet.start()
                flags = (f"--coordinator={coordinator.address}",)
                for index in range(2):
                    fleet.add(ServicePlan("engine", index, (*engine_flags, *flags)))
            frontend = fleet.add(ServicePlan("frontend", 0, (*flags, "--text-workers=1")))
            await fleet.start()
            await fleet.until_routed()
            async with open_channel(frontend.address, profile="public") as channel:
                yield fleet, channel


def broken_promises(part: Part, results: Sequence[RunResult], calibration: Calibration) -> list[str]:
    """What these runs do not keep, in words; bf16 promises no more than that nothing fails."""
    found = []
    is_exact = part.dtype != "bfloat16"
    errors = sum(result.count(kind) for result in results for kind in ("error", "order", "end"))
    if errors:
        found.append(f"{errors} streams failed")
    if is_exact and (differing := sum(result.count("content") for result in results)):
        found.append(f"{differing} streams differ from the undisturbed run")
    if repeats := sum(result.num_repeats for result in results):
        found.append(f"{repeats} messages came twice")
    if (fewest := min(min(result.num_in_flight, result.num_handles) for result in results)) < MIN_IN_FLIGHT:
        found.append(f"only {fewest} streams were in flight on a struck engine")
    if not all(result.num_moved for result in results):
        found.append("a strike moved nothing")
    max_detection_s = _MAX_DETECTION_S if part.fault is Fault.KILL else _MAX_STOP_DETECTION_S
    if (slowest := max(result.detected_s for result in results)) > max_detection_s * calibration.scale:
        found.append(f"detection took {slowest:.3f} s")
    recovery_s = _recovery_p99_s(results) - (max_detection_s if part.fault is Fault.STOP else 0.0)
    if recovery_s > _MAX_RECOVERY_S * calibration.scale:
        found.append(f"recovery p99 is {recovery_s:.2f} s")
    if part.fault is Fault.STOP and not all(result.num_stale for result in results):
        found.append("no stale output was counted: the stopped engine never woke up to its old requests")
    if part.num_runs >= _MIN_RUNS_A_PHASE * len(part.phases):
        counts = {phase: sum(result.phase is phase for result in results) for phase in part.phases}
        found += [
            f"{count} runs in {phase.value}" for phase, count in counts.items() if count < _MIN_RUNS_A_PHASE
        ]
    return found


def _recovery_p99_s(results: Sequence[RunResult]) -> float:
    return percentile([each for result in results for each in result.recovered_s], 99)


def _run_row(part: Part, number: int, result: RunResult) -> Row:
    return {
        "part": part.name,
        "run": number,
        "phase": result.phase.value,
        "struck": result.victim,
        "in_flight": result.num_in_flight,
        "outputs": result.num_handles,
        "moved": result.num_moved,
        "errors": result.count("error"),
        "disordered": result.count("order") + result.count("end"),
        "differing": result.count("content"),
        "repeats": result.num_repeats,
        "stale": result.num_stale,
        "detected_ms": result.detected_s * 1000,
        "recovered_p50_s": percentile(result.recovered_s, 50),
        "recovered_max_s": max(result.recovered_s),
        "violations": "; ".join(map(str, result.violations[:3])),
    }


def _total_row(part: Part, results: Sequence[RunResult], calibration: Calibration) -> Row:
    num_streams = sum(result.num_streams for result in results)
    bad = {violation.request_id for result in results for violation in result.violations}
    return {
        "total": part.name,
        "runs": len(results),
        "streams": num_streams,
        "errors": sum(result.count("error") for result in results),
        "equal_share": 1.0 - len(bad) / num_streams,
        "repeats": sum(result.num_repeats for result in results),
        "stale": sum(result.num_stale for result in results),
        "detected_max_ms": max(result.detected_s for result in results) * 1000,
        "recovered_p99_s": _recovery_p99_s(results),
        "gap_p99_ms": calibration.gap_p99_s * 1000,
        "scale": calibration.scale,
        "recovery_limit_s": _MAX_RECOVERY_S * calibration.scale,
    }


def _parts(arguments: argparse.Namespace) -> list[Part]:
    if arguments.fault is None and not arguments.by_hand:
        return [
            Part(Fault.KILL, arguments.runs or 20, False, "auto"),
            Part(Fault.STOP, 3, False, "auto"),
            Part(Fault.KILL, 4, True, "bfloat16"),
        ]
    fault = Fault(arguments.fault or "kill")
    return [Part(fault, arguments.runs or 20, arguments.by_hand, arguments.dtype)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", choices=[fault.value for fault in Fault])
    parser.add_argument("--runs", type=int, help="strikes, of all phases in turn (default: 20)")
    parser.add_argument("--by-hand", action="store_true", help="no coordinator, each service started alone")
    parser.add_argument("--dtype", default="auto", help="type of weights and KV (default: the model's)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an output")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=_RESULTS, help="where the report goes")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
