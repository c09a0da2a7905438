"""Results of benchmarks are of commits of the history, measured on unchanged trees."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.report import RESULTS


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def test_each_result_is_of_a_commit_of_the_history() -> None:
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the history is not here")
    history = set(_git("rev-list", "HEAD").split())
    reports = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    assert len(reports) > 20
    # A changed tree has "-dirty" behind its commit.
    others = {name: report.get("commit") for name, report in reports.items()}
    assert {name: commit for name, commit in others.items() if commit not in history} == {}
