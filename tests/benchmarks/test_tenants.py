"""What is promised to one tenant beside another."""

from __future__ import annotations

from benchmarks.scenarios.tenants import shortfalls


def test_late_and_refused_requests_break_the_promise() -> None:
    kept = {"request": "short", "alone_p99_ms": 20.0, "beside_p99_ms": 89.0, "refused": ""}
    rows = [
        {"load": "schemas", **kept},
        {"load": "schemas", **kept, "request": "new schema", "beside_p99_ms": 5000.0},
        {"load": "slow bodies", **kept, "beside_p99_ms": 91.0},
        {"load": "open requests", **kept, "beside_p99_ms": 900.0},
        {"load": "open requests", **kept, "refused": "3 429 queue_full"},
    ]
    assert shortfalls(rows) == [
        "short beside slow bodies: p99 is 91 ms, at most 90 is promised",
        "short beside open requests: 3 429 queue_full",
    ]
