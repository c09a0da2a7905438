"""A stack that grows and shrinks under streams: what is lost, what differs, how soon a new engine serves.

    python -m benchmarks.scaling                       # both kinds of engines, three rounds each
    python -m benchmarks.scaling --kind experts --rounds 1

Two engines become four and two again by `triptych admin scale`, round after round, while streams of every
kind run: once engines that stand alone with the embedded model, once engines that share the experts of a
small Mixtral and step together. Every stream must say what an undisturbed run says.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from service_kit.process import prepare_process

prepare_process("client")

from benchmarks.checkpoint import make_mixture  # noqa: E402
from benchmarks.failover_history import count_kinds  # noqa: E402
from benchmarks.failover_load import make_cases  # noqa: E402
from benchmarks.failover_runs import Calibration  # noqa: E402
from benchmarks.load import percentile  # noqa: E402
from benchmarks.report import Report, Row, print_table  # noqa: E402
from benchmarks.scaling_runs import (  # noqa: E402
    ScalingRun,
    broken_promises,
    record_undisturbed,
    scale_under_load,
)
from benchmarks.scaling_stack import ServedStack  # noqa: E402
from service_kit.channel import open_channel  # noqa: E402

_RESULTS = Path(__file__).resolve().parent / "results" / "scaling.json"
_KINDS = ("alone", "experts")
_SIZES = (4, 2)


def main() -> int:
    """Run what was asked for, print the table and write the report; 1 where a promise broke."""
    arguments = _parse()
    rows: list[Row] = []
    broken: list[str] = []
    for kind in [arguments.kind] if arguments.kind else _KINDS:
        run, calibration = asyncio.run(_run(kind, arguments))
        rows.append(_row(kind, run, calibration))
        broken += [f"{kind}: {text}" for text in broken_promises(run, calibration)]
        for violation in run.violations[:3]:
            print(f"  {violation}")
    print_table(rows)
    for text in broken:
        print(f"BROKEN {text}")
    settings = {name: getattr(arguments, name) for name in ("rounds", "streams", "tokens", "seed")}
    Report("scaling", settings, rows).write(arguments.json)
    return 1 if broken else 0


async def _run(kind: str, arguments: argparse.Namespace) -> tuple[ScalingRun, Calibration]:
    cases = make_cases(2 * arguments.streams, num_tokens=arguments.tokens, seed=arguments.seed)
    flags = ["--data-parallel-size=2"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "experts":
            make_mixture(folder / "mixture", seed=arguments.seed)
            flags += ["--expert-parallel", str(folder / "mixture")]
        async with (
            ServedStack(folder, flags) as stack,
            open_channel(stack.address, profile="public") as channel,
        ):
            oracle, calibration = await record_undisturbed(channel, cases)
            run = await scale_under_load(
                stack,
                channel,
                cases,
                oracle,
                sizes=_SIZES * arguments.rounds,
                num_streams=arguments.streams,
                is_exact=kind == "alone",
            )
    return run, calibration


def _row(kind: str, run: ScalingRun, calibration: Calibration) -> Row:
    kinds = count_kinds(run.violations)
    served = list(run.served_after_s.values())
    first = [record.token_instants[0] - record.sent_at for record in run.records if record.token_instants]
    grown = [change.took_s for change in run.changes[::2]]
    shrunk = [change.took_s for change in run.changes[1::2]]
    return {
        "engines": kind,
        "changes": len(run.changes),
        "failed_changes": sum(change.exit_code != 0 for change in run.changes),
        "streams": len(run.records),
        "lost": run.num_lost,
        "errors": kinds.get("error", 0),
        "disordered": kinds.get("order", 0) + kinds.get("end", 0),
        "differing": kinds.get("content", 0),
        "came": len(served),
        "served_after_ready_max_s": max(served, default=0.0),
        "left_with_0": sum("exited with code 0" in ending for ending in run.endings),
        "grow_max_s": max(grown, default=0.0),
        "shrink_max_s": max(shrunk, default=0.0),
        "ttft_p99_s": percentile(first, 99),
        "gap_p99_ms": percentile(run.gaps_s, 99) * 1000,
        "gap_max_ms": max(run.gaps_s) * 1000,
        "undisturbed_gap_p99_ms": calibration.gap_p99_s * 1000,
        "scale": calibration.scale,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=_KINDS, help="engines that stand alone, or share experts")
    parser.add_argument("--rounds", type=int, default=3, help="times to grow and to shrink")
    parser.add_argument("--streams", type=int, default=16, help="that run at any time")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an output")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=_RESULTS, help="where the report goes")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
