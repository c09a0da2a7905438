"""The verb `replay`: whether the scheduler of this version decides what a trace says."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine_svc.build.engine import Core, build_core
from engine_svc.build.features import replayed_features
from engine_svc.features.sched_trace.recorded_case import SUFFIX, read_case
from engine_svc.features.sched_trace.records import Record, Setup
from engine_svc.features.sched_trace.replay import BadTrace, Run, read_lines, replay
from engine_svc.scheduler.feature import SchedulerFeature

# More than any record has: of a file of something else that is large, not all is read as one line.
_MAX_LINE_BYTES = 1 << 28


def run_replay(path: Path) -> int:
    """Replay every run of a file, and print a line each.

    Returns 0 if all decide the same, 1 if one does not, 2 if the file cannot be read.
    """
    num_runs, differs = 0, False
    try:
        for run in replay_file(path):
            num_runs += 1
            differs = differs or run.difference is not None
            print(f"run {num_runs}: {described(run)}", flush=True)
        if not num_runs:
            raise BadTrace("it is empty")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        print(f"triptych replay: {path}: {cause}", file=sys.stderr)
        return 2
    return 1 if differs else 0


def replay_file(path: Path) -> Iterator[Run]:
    """Replay each run of a file up to its first difference. Raises BadTrace, OSError."""
    yield from replay(_records(path), _build)


def described(run: Run) -> str:
    setup = run.setup
    steps = setup.scheduler.max_steps_in_flight
    end = "; the file ends within a line" if run.is_cut else ""
    verdict = "the same decisions" if run.difference is None else f"other decisions from {run.difference}"
    return (
        f"{setup.policy}, {steps} step{'s' if steps > 1 else ''} in flight, "
        f"{setup.cache.num_blocks - 1} blocks: {run.num_steps} steps, {run.num_requests} requests, "
        f"{run.num_preemptions} preemptions, {run.num_hits} prefix hits of {run.num_hit_tokens} tokens: "
        f"{verdict}{end}"
    )


def _records(path: Path) -> Iterator[Record | None]:
    if path.name.endswith(SUFFIX):
        yield from read_case(path)
        return
    with path.open("rb") as file:
        yield from read_lines(iter(lambda: file.readline(_MAX_LINE_BYTES), b""))


def _build(setup: Setup, features: Sequence[SchedulerFeature]) -> Core:
    return build_core(
        setup.scheduler,
        setup.cache,
        policy=setup.policy,
        scheduler_class=setup.scheduler_class,
        features=[*features, *replayed_features(setup.features)],
    )
