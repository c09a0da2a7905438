"""Seeds by command: `python -m tests.composition --seeds 0-1999 --jobs 1`.

Prints what was drawn how often, what the processes counted, and the first difference in full.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.composition.generator import Coverage, conditions_of, possible_pairs, rig_of
from tests.composition.runner import Report, run_rig

_LISTS = Path(__file__).with_name("seeds.txt")
_PROGRESS_EVERY = 25


def run_seeds(seeds: Sequence[int], *, num_jobs: int = 1) -> Report:
    """Run seeds, those of one rig after one another, so many rigs at a time."""
    parts = {rig: list(of_rig) for rig, of_rig in groupby(sorted(seeds, key=rig_of), key=rig_of)}
    report = Report()
    with tempfile.TemporaryDirectory(prefix="composition-") as folder:
        for each in asyncio.run(_run_parts(parts, Path(folder), num_jobs)):
            report.add(each)
    return report


async def _run_parts(parts: Mapping[int, Sequence[int]], folder: Path, num_jobs: int) -> list[Report]:
    slots = asyncio.Semaphore(num_jobs)

    async def run(rig: int, seeds: Sequence[int]) -> Report:
        async with slots:
            return await run_rig(rig, seeds, folder / f"rig-{rig}", functools.partial(_print_progress, rig))

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(rig, seeds)) for rig, seeds in parts.items()]
    return [task.result() for task in running]


def _print_progress(rig: int, report: Report) -> None:
    newest = f"seed {report.cases[-1].seed},"
    for difference in report.differences:
        if difference.startswith(newest):
            print(f"differs: {difference.partition(chr(10))[0]}", file=sys.stderr, flush=True)
    if len(report.cases) % _PROGRESS_EVERY == 0:
        print(
            f"rig {rig}: {len(report.cases)} seeds, {report.run_s / len(report.cases):.2f} s each, "
            f"{len(report.differences)} differences",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    """Run the seeds that are asked for; 1 where an answer differs."""
    parser = argparse.ArgumentParser(prog="tests.composition", description=__doc__)
    parser.add_argument("--seeds", default="test", help="as in 0-99,123, or a list of seeds.txt")
    parser.add_argument("--jobs", type=int, default=1, help="rigs at a time")
    arguments = parser.parse_args()
    report = run_seeds(parse_seeds(arguments.seeds), num_jobs=arguments.jobs)
    _print(report)
    return 1 if report.differences else 0


def parse_seeds(text: str) -> list[int]:
    """Of ranges and numbers, or of the name of a list."""
    lines = _LISTS.read_text(encoding="utf-8").splitlines()
    text = dict(line.split() for line in lines if not line.startswith("#")).get(text, text)
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def _print(report: Report) -> None:
    coverage = Coverage.of(report.cases)
    for name, count in sorted(coverage.names.items()):
        print(f"  {name:28} {count:6}")
    for refusal, count in coverage.refusals.items():
        print(f"  refused: {' with '.join(sorted(refusal.names)):55} {count:6}")
    pairs = [coverage.pairs.get(pair, 0) for pair in possible_pairs()]
    print(f"  {len(pairs)} pairs, each at least {min(pairs)} times")
    for rig, counts in report.evidence.items():
        names = ", ".join(condition.name for condition in conditions_of(rig)) or "no condition"
        print(f"  rig {rig}, {names}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    print(f"  outputs: {', '.join(f'{name} {count}' for name, count in report.stats.items())}")
    num_requests = sum(len(case.drawn) for case in report.cases)
    num_seeds = len(report.cases)
    print(
        f"{num_seeds} seeds, {num_requests} requests, {len(report.distinct_ids)} distinct ids, "
        f"{report.run_s:.0f} s and {report.start_s:.0f} s of starts, {report.run_s / num_seeds:.2f} s a seed"
    )
    print(*report.differences[:1], sep="\n")
    print(f"{len(report.differences)} differences")


if __name__ == "__main__":
    sys.exit(main())
