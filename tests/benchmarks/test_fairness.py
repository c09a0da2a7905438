"""What is promised to two accounts of one engine."""

from __future__ import annotations

from benchmarks.report import Row
from benchmarks.scenarios.fairness import shortfalls


def test_late_first_tokens_and_shares_beside_the_weights_break_the_promise() -> None:
    kept: Row = {
        "case": "1:3",
        "beside_p50_ms": 60.0,
        "beside_p99_ms": 130.0,
        "p99_at_most_ms": 130.0,
        "share_of_other": 0.72,
        "share_by_weight": 0.75,
        "refused": "",
    }
    assert shortfalls([kept]) == []
    rows: list[Row] = [
        {**kept, "beside_p99_ms": 131.0},
        {**kept, "beside_p50_ms": 1001.0},
        {**kept, "share_of_other": 0.7},
        {**kept, "refused": "x"},
    ]
    assert shortfalls(rows) == [
        "1:3: p99 beside is 131 ms, at most 130 is promised",
        "1:3: p50 beside is 1001 ms, at most 1000 is promised",
        "1:3: the other has 0.700 of the tokens, 0.750 is promised",
        "1:3: x",
    ]
