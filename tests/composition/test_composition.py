"""Requests together and disturbed, on real processes, are answered as each of them is alone."""

from __future__ import annotations

import pytest

from tests.composition.__main__ import parse_seeds, run_seeds
from tests.composition.runner import EVIDENCE, Report

# So that a stream that goes wrong cannot look like any other.
LEAST_DISTINCT_IDS = 200


def check(report: Report) -> None:
    assert not report.differences, report.differences[0]
    assert report.num_traces >= 2 * len(report.evidence)
    assert len(report.distinct_ids) >= LEAST_DISTINCT_IDS
    counts = {name: sum(each[name] for each in report.evidence.values()) for name in EVIDENCE}
    assert min(counts.values()) > 0, f"not disturbed: {counts}"
    stats = report.stats
    assert 0 < stats["num_preemptions"] <= counts["num_preemptions"]
    assert stats["num_kept_turns"] > 0
    assert stats["num_migrations"] > 0 and stats["num_timed"] == stats["num_outputs"]


def test_on_one_rig():
    check(run_seeds(parse_seeds("test")))


@pytest.mark.chaos
def test_on_two_rigs_one_of_them_with_divided_models():
    check(run_seeds(parse_seeds("chaos")))
