"""Mutants of the scheduler and of the cache against their tests: how many are noticed, and which are not.

    python -m tests.mutation.run --count 240 --json mutants.json

Each mutant runs in a copy of the tree, against the stages of tests in turn, until something fails. One that
takes far longer than the original counts as killed, by the time limit. Status 0: at least 90 % were killed.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.copied_tree import ROOT, CopiedTree, Stages, Verdict
from tests.mutation.mutants import Mutant, make_mutants
from tests.mutation.report import make_report, print_report

FOLDERS = ("engine_svc/scheduler", "engine_svc/cache")
# From the fastest to the slowest: most mutants do not live to see the last.
STAGES = (
    ("tests/engine_svc/scheduler", "tests/engine_svc/cache"),
    ("tests/conformance",),
    ("tests/simulation",),
)
LEAST_KILLED_SHARE = 0.9
# A stage may take this many times what it takes for the original, and so much at least.
_PATIENCE = 4
_LEAST_LIMIT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make, run, report."""
    options = _parser().parse_args(arguments)
    mutants = draw(_mutants_of_files(options.files or _sources()), options.count, options.seed)
    stages = STAGES[: options.stages]
    verdicts = judge_all(mutants, stages, options.jobs)
    report = make_report(verdicts, stages)
    print_report(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if report["killed_share"] >= LEAST_KILLED_SHARE else 1


def draw(mutants_of_files: Iterable[Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, drawn by `seed`: one of each file, then of each the same share; 0: every one.

    A larger draw by the same seed begins with the smaller ones.
    """
    drawn: list[tuple[float, str, Mutant]] = []
    for mutants in filter(None, mutants_of_files):
        path, order = mutants[0].path, list(mutants)
        random.Random(f"{seed} {path}").shuffle(order)
        drawn += [(place / len(order), path, mutant) for place, mutant in enumerate(order)]
    drawn.sort(key=lambda entry: entry[:2])
    return [mutant for _, _, mutant in (drawn[:count] if count else drawn)]


def judge_all(mutants: Sequence[Mutant], stages: Stages, num_jobs: int) -> list[Verdict]:
    """Run the tests on every mutant, so many at a time, and tell of each when it is done."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(num_jobs) as executor:
        trees = [CopiedTree(Path(folder, str(index))) for index in range(num_jobs)]
        cpu_s, *_ = executor.map(lambda tree: tree.warm_up(stages), trees)
        print(f"without a mutant the stages take {cpu_s} s", flush=True)
        limits_s = [max(_LEAST_LIMIT_S, _PATIENCE * stage_s) for stage_s in cpu_s]
        idle: queue.SimpleQueue[CopiedTree] = queue.SimpleQueue()
        for tree in trees:
            idle.put(tree)

        def judge(mutant: Mutant) -> Verdict:
            tree = idle.get()
            try:
                verdict = tree.judge(mutant, stages, limits_s)
            finally:
                idle.put(tree)
            killer = f" by {verdict.test}" if verdict.test else ""
            print(f"{verdict.outcome:10} {mutant.path}:{mutant.line} {mutant.kind.value}{killer}", flush=True)
            return verdict

        verdicts = list(executor.map(judge, mutants))
        for tree in trees:
            tree.close()
    return verdicts


def _mutants_of_files(paths: Iterable[str]) -> list[list[Mutant]]:
    return [make_mutants(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths]


def _sources() -> list[str]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file.relative_to(ROOT).as_posix() for file in files]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.run", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=240, help="mutants to draw; 0: all there are")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="mutants to run at a time")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="of the tests, from the fastest on")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--files", nargs="+", help="files below the root; else all of scheduler and cache")
    return parser


if __name__ == "__main__":
    sys.exit(main())
