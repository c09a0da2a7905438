"""The situations whose cost must grow no faster than their size."""

from __future__ import annotations

import gc
import json

import pytest

from benchmarks.scheduler_scaling import ending_together, main, under_pressure, with_waiting


@pytest.fixture(autouse=True)
def _unfrozen():
    yield
    gc.unfreeze()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "least-recompute"])
def test_a_queue_is_filled_looked_at_shortened_and_served(policy):
    rows = list(with_waiting(20, policy))
    assert [row["what"] for row in rows] == [
        "add to the queue",
        "step before the queue",
        "abort from the queue",
        "serve from the queue",
    ]
    assert all(row["size"] == 20 and row["us"] > 0 for row in rows)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "least-recompute"])
def test_there_is_pressure(policy):
    (row,) = under_pressure(8, policy)
    assert row["num_preemptions"] > 0


def test_all_end_in_the_last_step():
    (row,) = ending_together(8, "fcfs")
    assert row["us"] > 0


def test_the_report_has_every_situation_at_every_size(tmp_path):
    path = tmp_path / "scaling.json"
    sizes = ["--waiting", "4", "8", "--running", "2", "4", "8"]
    main([*sizes, "--policies", "fcfs", "--repeats", "2", "--json", str(path)])
    record = json.loads(path.read_text())
    assert record["benchmark"] == "scheduler_scaling"
    assert [row["size"] for row in record["rows"]] == [4] * 4 + [8] * 4 + [2, 4, 8] * 2
