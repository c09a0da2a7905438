"""Compare two versions on one machine: `python -m benchmarks.paired BASE HEAD SCENARIO`.

BASE and HEAD are git revisions or folders with checkouts. Both are measured in turns; which of them is first
alternates. `engine` keeps a process of each alive and takes turns of about half a second, as the speed of a
host changes within minutes; the others start new processes for each turn. For each metric, and for the
geometric mean of several, the median of the ratios HEAD / BASE is printed with a 95 % bootstrap interval. The
exit code is 1 where a metric falls short (its whole interval is worse than the bound), and 2 where a version
could not be measured. `engine` also compares options of one version:

    python -m benchmarks.paired . . engine --base-option enable_prefix_caching=false
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean

from benchmarks.report import Report, Row, median_interval, print_table, report_file
from benchmarks.rig.lines import LineProcess, LineProcessFailed

_REPOSITORY = Path(__file__).resolve().parent.parent
_PROBES = Path(__file__).resolve().parent / "probes"
_NATIVE = Path("kernels/triptych_kernels/cpu")
_TURN_LIMIT_S = 180.0
_BUILD_LIMIT_S = 600.0
# From fewer rounds no interval of the median has a confidence of 95 %.
_MIN_ROUNDS = 6
_MEAN = "geometric_mean"

Metrics = dict[str, float]
_Record = Mapping[str, list[dict[str, float]]]


class MeasureFailed(Exception):
    """A checkout could not be prepared or measured."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A version of the source tree that can be run. options: NAME=JSON, of its engine."""

    name: str
    folder: Path
    options: tuple[str, ...] = ()


_Measure = Callable[[Checkout], Metrics]


@dataclass(frozen=True, slots=True)
class Turn:
    """The surroundings of one turn's command."""

    checkout: Path
    model: Path
    output: Path  # where a benchmark of the checkout writes its JSON
    core: int
    options: tuple[str, ...] = ()  # those of the checkout


@dataclass(frozen=True, slots=True)
class Scenario:
    """How one turn is measured: a command that runs in the checkout, and its metrics."""

    command: Callable[[Turn], list[str]]
    higher_is_better: bool
    # Reads the report of the checkout's own benchmark. None: the metrics are the last line of the output.
    read_report: Callable[[_Record], Metrics] | None = None
    is_pinned: bool = False
    # Measured one by one by a process that lives through all rounds. Empty: a new process measures all.
    cells: Sequence[str] = ()
    num_rounds: int = 15


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of both versions, a value for each round."""

    metric: str
    base: Sequence[float]
    head: Sequence[float]
    higher_is_better: bool

    def row(self, bound: float, seed: int) -> Row:
        ratios = [head / base for base, head in zip(self.base, self.head, strict=True)]
        interval = median_interval(ratios, seed)
        return {
            "metric": self.metric,
            "base": statistics.median(self.base),
            "head": statistics.median(self.head),
            "ratio": interval.estimate,
            "low": interval.low,
            "high": interval.high,
            "falls_short": len(ratios) >= _MIN_ROUNDS
            and interval.falls_short(bound, higher_is_better=self.higher_is_better),
            "base_rounds": list(self.base),
            "head_rounds": list(self.head),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        rows = _compare(options)
    except MeasureFailed as error:
        print(error, file=sys.stderr)
        return 2
    columns = ("metric", "base", "head", "ratio", "low", "high", "falls_short")
    print_table([{column: row[column] for column in columns} for row in rows])
    if options.json is not None:
        settings = {
            name: getattr(options, name) for name in ("scenario", "base", "head", "rounds", "bound", "seed")
        }
        settings["base_option"] = " ".join(options.base_option)
        words = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(("python", "-m", "benchmarks.paired", *words))
        Report("paired", settings, rows).write(options.json, command)
    return int(any(row["falls_short"] for row in rows))


def _compare(options: argparse.Namespace) -> list[Row]:
    scenario = SCENARIOS[options.scenario]
    with ExitStack() as stack:
        base = stack.enter_context(open_checkout(options.base))
        base = replace(base, options=tuple(options.base_option))
        head = stack.enter_context(open_checkout(options.head))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if options.model is None:
            _make_model(folder / "M1")
        model = options.model or folder / "M1"

        def turn_of(checkout: Checkout) -> Turn:
            output = folder / "turn.json"
            return Turn(checkout.folder, model.resolve(), output, options.core, checkout.options)

        measures: list[_Measure] = [lambda checkout: run_turn(scenario, turn_of(checkout))]
        if scenario.cells:
            living: dict[Checkout, CellProcess] = {}
            for each in (base, head):
                with _named(each):
                    living[each] = stack.enter_context(CellProcess(scenario, turn_of(each)))
            measures = [partial(_measure_cell, living, cell) for cell in scenario.cells]
        comparisons = alternate(measures, base, head, options.rounds, scenario.higher_is_better)
    return [comparison.row(options.bound, options.seed) for comparison in comparisons]


@contextmanager
def _named(checkout: Checkout) -> Iterator[None]:
    """Errors name the version that could not be measured."""
    try:
        yield
    except (MeasureFailed, LineProcessFailed) as error:
        version = " ".join((checkout.name, *checkout.options))
        raise MeasureFailed(f"{version}: {error}") from error


def _measure_cell(living: Mapping[Checkout, CellProcess], cell: str, checkout: Checkout) -> Metrics:
    return living[checkout].measure(cell)


def alternate(
    measures: Sequence[_Measure],
    base: Checkout,
    head: Checkout,
    num_rounds: int,
    higher_is_better: bool,
) -> list[Comparison]:
    """Take each measure of both versions in turns; base comes first in every other round."""
    base_rounds: list[Metrics] = []
    head_rounds: list[Metrics] = []
    # The first turns are not counted: they read files for the first time.
    for checkout, measure in itertools.product((base, head), measures):
        with _named(checkout):
            measure(checkout)
    for round_index in range(num_rounds):
        turns = [(base, Metrics()), (head, Metrics())]
        for measure in measures:
            for checkout, metrics in turns if round_index % 2 == 0 else reversed(turns):
                with _named(checkout):
                    metrics |= measure(checkout)
        for rounds, (_, metrics) in zip((base_rounds, head_rounds), turns, strict=True):
            rounds.append(metrics)
        print(
            f"round {round_index + 1} of {num_rounds}: {base_rounds[-1]} {head_rounds[-1]}", file=sys.stderr
        )
    all_rounds = (*base_rounds, *head_rounds)
    # Differences of times may be negative: they have no such mean.
    if len(base_rounds[0]) > 1 and min(min(metrics.values()) for metrics in all_rounds) > 0:
        for metrics in all_rounds:
            metrics[_MEAN] = geometric_mean(metrics.values())
    return [
        Comparison(
            metric,
            [metrics[metric] for metrics in base_rounds],
            [metrics[metric] for metrics in head_rounds],
            higher_is_better,
        )
        for metric in base_rounds[0]
    ]


class CellProcess(LineProcess):
    """The process of a checkout that measures one cell at a time."""

    def __init__(self, scenario: Scenario, turn: Turn, *, answer_s: float = _TURN_LIMIT_S) -> None:
        super().__init__(
            scenario.command(turn),
            environment=_environment(turn),
            folder=turn.checkout,
            answer_s=answer_s,
        )
        self._seeds = itertools.count()

    def measure(self, cell: str) -> Metrics:
        answer = self.ask(cell=cell, seed=next(self._seeds))
        return {f"{name}_{cell}": value for name, value in answer.items()}


def run_turn(scenario: Scenario, turn: Turn) -> Metrics:
    """Run the scenario's command in a checkout. MeasureFailed where it gives no metrics."""
    turn.output.unlink(missing_ok=True)
    try:
        ended = subprocess.run(
            scenario.command(turn),
            cwd=turn.checkout,
            env=os.environ | _environment(turn),
            capture_output=True,
            text=True,
            timeout=_TURN_LIMIT_S,
            preexec_fn=(lambda: os.sched_setaffinity(0, {turn.core})) if scenario.is_pinned else None,
        )
    except subprocess.TimeoutExpired as error:
        raise MeasureFailed(f"a turn took more than {_TURN_LIMIT_S:.0f} s") from error
    if scenario.read_report is not None:
        # A benchmark that misses a goal of its own ends with 1 and has written its report all the same.
        if not turn.output.exists():
            raise MeasureFailed(f"no report from {ended.args}:\n{ended.stderr[-2000:]}")
        return scenario.read_report(json.loads(turn.output.read_text(encoding="utf-8")))
    if ended.returncode:
        raise MeasureFailed(f"exit code {ended.returncode} of {ended.args}:\n{ended.stderr[-2000:]}")
    metrics: Metrics = json.loads(ended.stdout.splitlines()[-1])
    return metrics


def _environment(turn: Turn) -> dict[str, str]:
    roots = [str(turn.checkout / name) for name in (".", "protos", "kernels")]
    return {"PYTHONPATH": os.pathsep.join(roots), "PYTHONSAFEPATH": "1"}


@contextmanager
def open_checkout(name: str) -> Iterator[Checkout]:
    """The folder of that name, or a temporary worktree of that revision with the native module built."""
    if Path(name).is_dir():
        if _native_module(Path(name)) is None:
            raise MeasureFailed(
                f"{name} has no native module: run `python setup.py build_ext --inplace` in it"
            )
        yield Checkout(name, Path(name).resolve())
        return
    with tempfile.TemporaryDirectory() as folder:
        worktree = Path(folder, "checkout")
        _run(["git", "worktree", "add", "--detach", "--quiet", str(worktree), name], _REPOSITORY)
        try:
            _provide_native_module(worktree)
            yield Checkout(name, worktree)
        finally:
            _run(["git", "worktree", "remove", "--force", str(worktree)], _REPOSITORY)


def _provide_native_module(worktree: Path) -> None:
    """Copy the module of this checkout where it has the same sources, else compile it."""
    built = _native_module(_REPOSITORY)
    if built is not None and _native_sources(worktree) == _native_sources(_REPOSITORY):
        shutil.copy2(built, worktree / _NATIVE)
        return
    print(f"compiling the native module of {worktree}", file=sys.stderr)
    _run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], worktree)


def _native_module(checkout: Path) -> Path | None:
    return next((checkout / _NATIVE).glob("_native*.so"), None)


def _native_sources(checkout: Path) -> dict[Path, bytes]:
    files = [file for file in (checkout / _NATIVE).rglob("*") if file.suffix in (".cpp", ".h")]
    return {file.relative_to(checkout): file.read_bytes() for file in files}


def _run(command: Sequence[str], folder: Path) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_BUILD_LIMIT_S)
    if ended.returncode:
        raise MeasureFailed(f"{' '.join(command)}: {ended.stderr.strip()}")


def _make_model(folder: Path) -> None:
    """The 14 M Llama with random weights."""
    import torch

    from benchmarks.checkpoint import CheckpointShape, make_checkpoint

    make_checkpoint(folder, CheckpointShape(), dtype=torch.bfloat16, seed=0)


def _probe(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(_PROBES / f"{name}.py"), *arguments]


def _benchmark(turn: Turn, name: str) -> list[str]:
    """The checkout's own benchmark: a module of its own in a348674, a scenario of one runner later."""
    if (turn.checkout / "benchmarks" / "scenarios").is_dir():
        return [sys.executable, "-m", "benchmarks", name, f"--json={turn.output}"]
    return [sys.executable, "-m", f"benchmarks.{name}", f"--json={turn.output}"]


def _engine_command(turn: Turn) -> list[str]:
    return _probe("engine", str(turn.model), str(turn.core), *turn.options)


def _host_overhead_command(turn: Turn) -> list[str]:
    return _probe("host_overhead", str(turn.model), str(turn.core))


def _first_token_command(turn: Turn) -> list[str]:
    return _probe("first_token", str(turn.model), "100")


def _scheduler_command(turn: Turn) -> list[str]:
    return [*_benchmark(turn, "scheduler"), "--running", "64", "256", "1024", "--rounds", "2"]


def _read_scheduler(record: _Record) -> Metrics:
    return {
        f"us_per_decode_{row['running']}{'_overlapped' if row['overlapped'] else ''}": row["per_decode_us"]
        for row in record["rows"]
    }


def _frontend_command(turn: Turn) -> list[str]:
    return [*_benchmark(turn, "frontend"), "--parts", "cpu", "--seconds", "4"]


def _read_frontend(record: _Record) -> Metrics:
    return {"frontend_us_per_token": record["rows"][0]["frontend_us_per_token"]}


SCENARIOS = {
    "engine": Scenario(_engine_command, higher_is_better=True, cells=("1", "8", "64", "64+"), num_rounds=40),
    "scheduler": Scenario(
        _scheduler_command, higher_is_better=False, read_report=_read_scheduler, is_pinned=True
    ),
    "frontend": Scenario(_frontend_command, higher_is_better=False, read_report=_read_frontend),
    "host-overhead": Scenario(_host_overhead_command, higher_is_better=False),
    "first-token": Scenario(_first_token_command, higher_is_better=False),
}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paired",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", help="git revision, or folder of a checkout")
    parser.add_argument("head", metavar="HEAD", help="as BASE")
    parser.add_argument("scenario", metavar="SCENARIO", choices=SCENARIOS, help=", ".join(SCENARIOS))
    parser.add_argument(
        "--rounds", type=int, help=f"alternations; no verdict from fewer than {_MIN_ROUNDS}; 15, engine 40"
    )
    parser.add_argument("--bound", type=float, default=0.02, help="how much worse HEAD may be")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a random Llama of 14 M")
    parser.add_argument("--core", type=int, default=1, help="the core that computes")
    parser.add_argument(
        "--base-option", action="append", default=[], help="NAME=JSON, a further option of BASE's engine"
    )
    parser.add_argument("--json", type=report_file, help="file for the report")
    options = parser.parse_args(arguments)
    if options.base_option and options.scenario != "engine":
        parser.error(f"{options.scenario} takes no options of an engine")
    options.rounds = options.rounds or SCENARIOS[options.scenario].num_rounds
    return options


if __name__ == "__main__":
    raise SystemExit(main())
