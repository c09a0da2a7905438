"""The measurement of HTTP, keys and TLS: its promises, and a small run of real processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import Row
from benchmarks.scenarios.http import Files, measure_frontends, shortfalls


def row(part: str, mode: str, *, cpu_ratio_low: float, tokens_ratio_high: float) -> Row:
    ratios = {"cpu_ratio": 1.5, "cpu_ratio_low": cpu_ratio_low}
    rates = {"tokens_ratio": 0.9, "tokens_ratio_high": tokens_ratio_high}
    return {"part": part, "mode": mode, "streams": 256, **ratios, **rates}


def test_what_is_worse_than_promised_in_the_whole_interval_is_named() -> None:
    rows = [
        row("frontend", "HTTP", cpu_ratio_low=1.2, tokens_ratio_high=0.9),
        row("frontend", "HTTP", cpu_ratio_low=1.4, tokens_ratio_high=0.9),
        row("stack", "gRPC, mTLS", cpu_ratio_low=1.4, tokens_ratio_high=0.96),
        row("stack", "gRPC, mTLS", cpu_ratio_low=1.4, tokens_ratio_high=0.94),
    ]
    assert shortfalls(rows) == [
        "frontend: HTTP at 256 streams takes 1.50 times gRPC's CPU, at most 1.3 is promised",
        "stack: gRPC, mTLS at 256 streams has 0.90 of the tokens a second, 0.95 are promised",
    ]


async def test_every_mode_streams_through_a_real_frontend(tmp_path: Path) -> None:
    options = argparse.Namespace(streams=[3], rounds=1, tokens=8, rate=50.0)
    rows = await measure_frontends(options, Files(tmp_path))
    assert [each["mode"] for each in rows] == [
        "gRPC", "gRPC, key", "gRPC, mTLS", "HTTP", "HTTP, key", "HTTPS, mTLS",
    ]  # fmt: skip
    for each in rows:
        assert isinstance(each["cpu_us_per_token"], float) and each["cpu_us_per_token"] > 0
