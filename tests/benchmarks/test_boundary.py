"""The arithmetic of the boundary's rows, and a short run of real processes."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.scenarios import boundary
from benchmarks.scenarios.boundary import BARE, OURS, Round, shortfalls, summary


def one_round(engine_cpu_s: float, first_output_s: tuple[float, ...]) -> Round:
    return Round(
        engine_cpu_s=engine_cpu_s,
        pace_cpu_s=0.002,
        frontend_cpu_s=0.009,
        rows_cpu_s=0.00003,
        num_steps=100,
        num_messages=101,
        first_output_s=first_output_s,
    )


def test_a_row_is_of_medians_less_the_pace_and_the_rows() -> None:
    rounds = [one_round(0.008, (0.0001,)), one_round(0.018, (0.0002,)), one_round(0.006, (0.0009,))]
    row = summary(OURS, 16, rounds)
    assert row["engine_us"] == pytest.approx(60)
    assert row["stream_us"] == pytest.approx(60)
    assert row["first_p50_us"] == pytest.approx(200)
    assert row["messages_a_step"] == pytest.approx(1.01)


def test_what_costs_a_tenth_more_than_the_bare_stream_is_named_at_the_judged_number_of_requests() -> None:
    bare = summary(BARE, 256, [one_round(0.008, (0.0002,))])
    kept = summary(OURS, 256, [one_round(0.0082, (0.0002,))])
    assert shortfalls([kept, bare]) == []
    (found,) = shortfalls([summary(OURS, 256, [one_round(0.009, (0.0002,))]), bare])
    assert found.startswith("engine_us is 70.0, 1.17 times")
    assert shortfalls([summary(OURS, 16, [one_round(0.9, (0.2,))]), bare]) == []


def test_both_streams_deliver_every_token() -> None:
    parser = argparse.ArgumentParser()
    boundary.add_options(parser)
    words = ["--requests", "3", "--rounds", "1", "--steps", "5", "--lead-in", "1"]
    rows = boundary.run(parser.parse_args(words)).rows
    assert [row["arrangement"] for row in rows] == [OURS, BARE]
    assert all(float(str(row["first_p50_us"])) > 0 for row in rows)
