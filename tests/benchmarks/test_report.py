"""The form that all benchmarks share."""

from __future__ import annotations

import json

from benchmarks.report import Report, machine, print_table


def test_a_report_has_the_five_parts(tmp_path):
    path = tmp_path / "report.json"
    Report("smoke", {"seed": 1}, [{"streams": 8, "rates": [1.0, 2.0]}]).write(path)
    record = json.loads(path.read_text())
    assert sorted(record) == ["benchmark", "commit", "machine", "rows", "settings"]
    assert record["benchmark"] == "smoke"
    assert record["settings"] == {"seed": 1}
    assert record["rows"] == [{"streams": 8, "rates": [1.0, 2.0]}]


def test_the_machine_names_its_cores_and_packages():
    facts = machine()
    assert facts["num_cores"] >= 1
    assert facts["torch"]


def test_a_table_has_a_line_for_each_row_under_its_columns(capsys):
    print_table([{"streams": 1, "ratio": 0.5}, {"streams": 32, "ratio": None}])
    assert capsys.readouterr().out.splitlines() == ["streams  ratio", "      1   0.50", "     32      -"]
