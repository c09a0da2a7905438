"""The form that all benchmarks share."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.report import RESULTS, Report, machine, percentile, print_tables, report_file


def test_a_report_has_six_parts(tmp_path):
    path = tmp_path / "report.json"
    Report("smoke", {"seed": 1}, [{"streams": 8, "rates": [1.0, 2.0]}]).write(
        path, "python -m benchmarks smoke"
    )
    record = json.loads(path.read_text())
    assert sorted(record) == ["benchmark", "command", "commit", "machine", "rows", "settings"]
    assert (record["benchmark"], record["command"]) == ("smoke", "python -m benchmarks smoke")
    assert record["settings"] == {"seed": 1}
    assert record["rows"] == [{"streams": 8, "rates": [1.0, 2.0]}]


@pytest.mark.parametrize("commit", ["1f2e-dirty", "unknown"])
def test_a_result_of_a_changed_tree_is_refused_before_anything_is_measured(monkeypatch, tmp_path, commit):
    monkeypatch.setattr("benchmarks.report.current_commit", lambda: commit)
    name = str(RESULTS / "smoke.json")
    with pytest.raises(argparse.ArgumentTypeError, match=f"needs an unchanged tree .* is at {commit}$"):
        report_file(name)
    assert report_file(str(tmp_path / "smoke.json")) == tmp_path / "smoke.json"
    monkeypatch.setattr("benchmarks.report.current_commit", lambda: "1f2e")
    assert report_file(name) == RESULTS / "smoke.json"


def test_the_machine_names_its_cores_and_packages():
    facts = machine()
    assert facts["num_cores"] >= 1
    assert facts["torch"]


def test_rows_of_the_same_columns_are_a_table_without_empty_columns(capsys):
    print_tables([{"streams": 1, "ratio": 0.5, "peer": None}, {"streams": 32, "ratio": None, "peer": None}])
    print_tables([{"part": "a"}, {"other": 2}])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["streams  ratio", "      1   0.50", "     32      -", "part", "   a", "other", "    2"]


def test_percentiles_lie_between_neighbours():
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
