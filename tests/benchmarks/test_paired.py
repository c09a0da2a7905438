"""Two versions are measured in turns, and only an interval that is worse than the bound as a whole fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paired import (
    SCENARIOS,
    CellProcess,
    Checkout,
    Comparison,
    MeasureFailed,
    Metrics,
    Scenario,
    Turn,
    alternate,
    main,
    run_turn,
)
from benchmarks.report import median_interval

BASE, HEAD = Checkout("base", Path("base")), Checkout("head", Path("head"))


def test_the_interval_holds_the_median_and_depends_on_the_seed_alone() -> None:
    values = [0.98, 1.0, 1.01, 0.99, 1.02, 1.0, 1.03, 0.97, 1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.01]
    interval = median_interval(values, seed=3)
    assert interval == median_interval(values, seed=3)
    assert interval.estimate == 1.0
    assert 0.97 <= interval.low <= 1.0 <= interval.high <= 1.03


@pytest.mark.parametrize(
    ("head", "higher_is_better", "falls_short"),
    [
        ([95, 96, 95, 94, 95, 95], True, True),
        ([95, 96, 95, 99, 101, 99], True, False),  # The interval reaches beyond the bound.
        ([120, 121, 119, 120, 120, 121], True, False),  # Better.
        ([105, 104, 106, 105, 105, 104], False, True),
        ([101, 101, 101, 101, 101, 101], False, False),  # Worse within the bound.
        ([80, 80, 80, 80, 80], True, False),  # Too few rounds for an interval of 95 %.
    ],
)
def test_a_metric_falls_short_where_its_whole_interval_is_beyond_the_bound(
    head: list[float], higher_is_better: bool, falls_short: bool
) -> None:
    row = Comparison("rate", [100.0] * len(head), head, higher_is_better).row(bound=0.02, seed=0)
    assert row["falls_short"] is falls_short


def test_the_first_of_a_round_alternates_and_the_first_turns_are_not_counted() -> None:
    turns: list[str] = []

    def measure(checkout: Checkout) -> Metrics:
        turns.append(checkout.name)
        return {"rate": float(len(turns))}

    (comparison,) = alternate([measure], BASE, HEAD, 2, higher_is_better=True)
    assert turns == ["base", "head", "base", "head", "head", "base"]
    assert (comparison.base, comparison.head) == ([3.0, 6.0], [4.0, 5.0])


def test_differences_that_may_be_negative_have_no_geometric_mean() -> None:
    compared = alternate([lambda _: {"a": 1.0, "b": -0.1}], BASE, HEAD, 1, higher_is_better=False)
    assert [each.metric for each in compared] == ["a", "b"]


def test_a_turn_runs_in_the_checkout_and_reads_the_last_line_or_the_report(tmp_path: Path) -> None:
    program = (
        'import os, sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"rows": [{"us": 7.0}]}\');'
        "print('first'); print('{\"size\": %d}' % len(os.listdir()))"
    )
    (tmp_path / "file").touch()
    turn = Turn(tmp_path, tmp_path, tmp_path / "report.json", core=0)
    printed = Scenario(lambda turn: [sys.executable, "-c", program, str(turn.output)], higher_is_better=True)
    assert run_turn(printed, turn) == {"size": 2}
    reported = Scenario(printed.command, higher_is_better=False, read_report=lambda record: record["rows"][0])
    assert run_turn(reported, turn) == {"us": 7.0}


def test_a_living_process_measures_each_cell_in_turn_with_the_geometric_mean_of_all(tmp_path: Path) -> None:
    program = (
        "import json, sys; print('{}', flush=True);"
        "[print(json.dumps({'rate': len(each['cell']) * 4.0 ** each['seed']}), flush=True)"
        " for each in map(json.loads, sys.stdin)]"
    )
    scenario = Scenario(lambda turn: [sys.executable, "-c", program], higher_is_better=True)
    with CellProcess(scenario, Turn(tmp_path, tmp_path, tmp_path / "report.json", core=0)) as process:
        cells = [lambda _, cell=cell: process.measure(cell) for cell in ("1", "64")]
        compared = {each.metric: each for each in alternate(cells, BASE, HEAD, 1, higher_is_better=True)}
    # Seeds 0 to 3 are those of the turns that are not counted.
    assert {name: (each.base, each.head) for name, each in compared.items()} == {
        "rate_1": ([4.0**4], [4.0**5]),
        "rate_64": ([2 * 4.0**6], [2 * 4.0**7]),
        "geometric_mean": ([pytest.approx(2**10.5)], [pytest.approx(2**12.5)]),
    }


def test_an_option_of_one_version_reaches_its_engine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    option = "enable_prefix_caching=false"
    with_option = Turn(Path(), Path("M1"), Path(), core=1, options=(option,))
    without = replace(with_option, options=())
    assert SCENARIOS["engine"].command(with_option) == [*SCENARIOS["engine"].command(without), option]
    with pytest.raises(SystemExit):
        main([".", ".", "scheduler", "--base-option", option])
    assert "scheduler takes no options of an engine" in capsys.readouterr().err


@pytest.mark.parametrize("num_answers", [0, 1])
def test_a_living_process_that_hangs_is_an_error_that_names_its_version(
    num_answers: int, tmp_path: Path
) -> None:
    program = f"import sys; print('{{}}\\n' * {num_answers}, flush=True); [each for each in sys.stdin]"
    scenario = Scenario(lambda turn: [sys.executable, "-c", program], higher_is_better=True)
    turn = Turn(tmp_path, tmp_path, tmp_path / "report.json", core=0)

    def measure(checkout: Checkout) -> Metrics:
        with CellProcess(scenario, turn, answer_s=0.5) as process:
            return process.measure("64")

    with pytest.raises(MeasureFailed, match=r"^base: .* gave no answer within 0\.5 s$"):
        alternate([measure], BASE, HEAD, 1, higher_is_better=True)


def test_a_command_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    scenario = Scenario(
        lambda turn: [sys.executable, "-c", "raise SystemExit('broken')"], higher_is_better=True
    )
    with pytest.raises(MeasureFailed, match="broken"):
        run_turn(scenario, Turn(tmp_path, tmp_path, tmp_path / "report.json", core=0))
