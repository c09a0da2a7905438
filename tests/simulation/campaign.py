"""Many seeds, in one process or several: how often what happened, and which seeds are broken."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.simulation.broken import BrokenInvariant
from tests.simulation.simulation import Simulation

# What makes a workload hard. Each must happen in at least this share of the seeds.
COVERED = ("preemption", "eviction", "hit", "rejected_draft", "abort_in_flight", "priority_give_back")
MIN_SHARE = 0.05
# A core may fail in any way that a bug has: that is a finding, and the next seed is to be tried.
FAILURES = (
    BrokenInvariant,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A seed whose life breaks an invariant, or the core itself."""

    seed: int
    invariant: str
    detail: str
    step: int
    trace: str


@dataclass(slots=True)
class Report:
    """What a campaign saw."""

    num_requests: int  # of each seed
    num_seeds: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    totals: Counter[str] = field(default_factory=Counter)
    num_seeds_with: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)  # seeds by policy, groups and so on
    max_preemptions: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def shares(self) -> dict[str, float]:
        """In which share of the seeds each thing happened."""
        return {name: round(num / self.num_seeds, 4) for name, num in sorted(self.num_seeds_with.items())}

    @property
    def too_rare(self) -> list[str]:
        return [name for name in COVERED if self.num_seeds_with[name] < MIN_SHARE * self.num_seeds]

    def as_json(self) -> dict[str, object]:
        return {
            "num_seeds": self.num_seeds,
            "num_requests_per_seed": self.num_requests,
            "elapsed_s": round(self.elapsed_s, 1),
            "cpu_ms_per_seed": round(1000 * self.cpu_s / max(1, self.num_seeds), 2),
            "num_broken": len(self.faults),
            "coverage": {name: self.shares.get(name, 0.0) for name in COVERED},
            "too_rare": self.too_rare,
            "shares": self.shares,
            "shapes": dict(sorted(self.shapes.items())),
            "totals": dict(sorted(self.totals.items())),
            "max_preemptions": self.max_preemptions,
            "broken": [
                {"seed": fault.seed, "step": fault.step, "invariant": fault.invariant, "detail": fault.detail}
                for fault in self.faults
            ],
        }


@dataclass(frozen=True, slots=True)
class _Life:
    """What became of one seed."""

    counts: Counter[str]
    shapes: tuple[str, ...]
    max_preemptions: int
    cpu_s: float
    fault: Fault | None


def run_campaign(
    seeds: Iterable[int],
    num_requests: int,
    num_jobs: int = 1,
    on_progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run every seed to its end, or to its first broken invariant; print the state after each."""
    report = Report(num_requests)
    begun_at = time.monotonic()
    live = functools.partial(_live, num_requests=num_requests)
    with contextlib.ExitStack() as stack:
        lives: Iterable[_Life] = map(live, seeds)
        if num_jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(num_jobs))
            lives = pool.imap_unordered(live, seeds, chunksize=20)
        for life in lives:
            _add(report, life)
            on_progress(report)
    report.elapsed_s = time.monotonic() - begun_at
    report.faults.sort(key=lambda fault: fault.seed)
    return report


def _live(seed: int, num_requests: int) -> _Life:
    begun_at = time.process_time()
    simulation = Simulation(seed)
    fault = None
    counts: Counter[str] = Counter()
    try:
        counts = simulation.run(num_requests)
    except FAILURES as error:
        name = error.name if isinstance(error, BrokenInvariant) else "crash"
        where = "".join(traceback.format_exception(error)[-4:])
        fault = Fault(seed, name, f"{type(error).__name__}: {error}", simulation.world.num_steps, where)
    setup = simulation.setup
    shapes = [setup.policy, "+".join(type(kind).__name__ for kind in setup.cache.groups)]
    shapes += ["overlapped"] * setup.scheduler.async_scheduling
    shapes += ["overlapped with drafts"] * (
        setup.scheduler.async_scheduling and setup.scheduler.num_speculative_tokens > 0
    )
    cpu_s = time.process_time() - begun_at
    return _Life(counts, tuple(shapes), simulation.world.max_preemptions, cpu_s, fault)


def _add(report: Report, life: _Life) -> None:
    report.num_seeds += 1
    report.totals += life.counts
    report.num_seeds_with.update(life.counts.keys())
    report.shapes.update(life.shapes)
    report.cpu_s += life.cpu_s
    report.max_preemptions = max(report.max_preemptions, life.max_preemptions)
    if life.fault is not None:
        report.faults.append(life.fault)
