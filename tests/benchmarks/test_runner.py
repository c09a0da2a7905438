"""The runner lists scenarios, runs one, and writes its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main, scenario_names
from benchmarks.plot import PANELS


def test_without_a_scenario_all_are_listed_with_what_they_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name in scenario_names():
        (line,) = [line for line in listed.splitlines() if line.startswith(f"  {name} ")]
        assert len(line.split()) > 3


def test_a_scenario_that_there_is_not_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().out


def test_the_scheduler_writes_a_row_for_each_size_without_and_with_overlap(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    words = ["--rounds", "1", "--steps", "20", "--lead-in", "2", "--running", "1", "4"]
    assert main(["scheduler", "--json", str(path), *words]) == 0
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = record["rows"]
    assert [(row["running"], row["overlapped"]) for row in rows] == [
        (1, False), (4, False), (1, True), (4, True),
    ]  # fmt: skip
    assert all(row["per_decode_us"] > 0 and row["num_steps"] == 20 and row["ratio"] is None for row in rows)
    assert record["settings"]["peer"] is None


def test_what_is_drawn_are_scenarios() -> None:
    assert set(PANELS) <= set(scenario_names())
