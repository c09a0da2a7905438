"""Results of benchmarks: percentiles, intervals, tables, JSON. Knows no benchmark."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Value = str | int | float | bool | None | list[float]
Row = Mapping[str, Value]
_REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "triton")
_NUM_RESAMPLES = 10_000
_UNKNOWN, _CHANGED = "unknown", "-dirty"
RESULTS = _REPOSITORY / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Report:
    benchmark: str
    settings: Mapping[str, Value]
    rows: Sequence[Row]
    shortfalls: Sequence[str] = ()  # promises that were not kept, in words

    def write(self, path: Path, command: str) -> None:
        """Write the report with its command line, and the commit and the machine it was made on."""
        record = {
            "benchmark": self.benchmark,
            "command": command,
            "commit": current_commit(),
            "machine": machine(),
            "settings": dict(self.settings),
            "rows": [dict(row) for row in self.rows],
        }
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and the interval that holds it with 95 % confidence."""

    estimate: float
    low: float
    high: float

    def falls_short(self, bound: float, *, higher_is_better: bool) -> bool:
        """Whether a ratio is worse than 1 by more than `bound` in the whole interval."""
        return self.high < 1 - bound if higher_is_better else self.low > 1 + bound


def report_file(text: str) -> Path:
    """The path of a report, as a type of argparse: a result needs the commit that it was made on."""
    path = Path(text)
    if path.resolve().is_relative_to(RESULTS) and not is_commit(commit := current_commit()):
        raise argparse.ArgumentTypeError(
            f"{text} is a result, which needs an unchanged tree of a commit; the tree is at {commit}"
        )
    return path


def is_commit(text: str) -> bool:
    """Whether it is a commit, of an unchanged tree."""
    return text != _UNKNOWN and not text.endswith(_CHANGED)


def median_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The median of the values with its percentile bootstrap interval, a function of the seed."""
    choose = random.Random(seed)
    medians = sorted(statistics.median(choose.choices(values, k=len(values))) for _ in range(_NUM_RESAMPLES))
    return Interval(
        statistics.median(values), medians[int(0.025 * _NUM_RESAMPLES)], medians[int(0.975 * _NUM_RESAMPLES)]
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The `percent`-th percentile, interpolated between neighbours."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def current_commit() -> str:
    """The commit of the source tree, "-dirty" where files differ from it; "unknown" outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return _UNKNOWN
    return f"{commit}{_CHANGED}" if _git("status", "--porcelain") else commit


def machine() -> dict[str, Value]:
    """Processor, cores this process may use, memory, system and the packages that matter for speed."""
    facts: dict[str, Value] = {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    return facts | {package: _version_of(package) for package in _PACKAGES}


def print_tables(rows: Sequence[Row]) -> None:
    """Print a table for each group of rows with the same columns, without lists and empty columns."""
    for columns, group in itertools.groupby(rows, key=tuple):
        table = list(group)
        shown = [
            name
            for name in columns
            if any(not isinstance(row[name], list) and row[name] is not None for row in table)
        ]
        print_table([{name: row[name] for name in shown} for row in table])


def print_table(rows: Sequence[Row]) -> None:
    columns = list(rows[0])
    cells = [columns, *([_shown(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)


def _git(*arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ("git", *arguments), cwd=_REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
