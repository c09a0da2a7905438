"""What is promised to one tenant beside another."""

from __future__ import annotations

from benchmarks.scenarios.tenants import shortfalls


def test_late_and_refused_requests_break_the_promise() -> None:
    kept = {"load": "slow bodies", "request": "short", "beside_p99_ms": 90.0, "p99_at_most_ms": 90.0}
    rows = [{**kept, "refused": ""}, {**kept, "beside_p99_ms": 91.0, "refused": "3 429 queue_full"}]
    assert shortfalls(rows) == [
        "short beside slow bodies: 3 429 queue_full",
        "short beside slow bodies: p99 is 91 ms, at most 90 is promised",
    ]
