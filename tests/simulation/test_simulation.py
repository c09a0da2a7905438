"""Random workloads: no invariant breaks, and they are hard enough to show it. The long run is by command."""

from __future__ import annotations

import pytest

from tests.simulation.campaign import COVERED, Report, run_campaign
from tests.simulation.setup import POLICIES

NUM_SEEDS = 160
NUM_REQUESTS = 100


@pytest.fixture(scope="module")
def report() -> Report:
    return run_campaign(range(NUM_SEEDS), NUM_REQUESTS)


def test_no_invariant_breaks(report: Report):
    assert [(fault.seed, fault.step, fault.detail) for fault in report.faults] == []


@pytest.mark.parametrize("name", COVERED)
def test_what_makes_workloads_hard_happens_often_enough(report: Report, name: str):
    assert name not in report.too_rare, f"{name} happens in {report.shares.get(name, 0.0)} of the seeds"


@pytest.mark.parametrize(
    "shape",
    [
        *sorted(set(POLICIES)),
        "FullAttention",
        "SlidingWindow",
        "FullAttention+SlidingWindow",
        "FullAttention+SlidingWindow+SlidingWindow",
        "ChunkedLocal+FullAttention",
        "FullAttention+CrossAttention",
        "overlapped",
        "overlapped with drafts",
    ],
)
def test_engines_of_every_shape_are_drawn(report: Report, shape: str):
    assert report.shapes[shape] > 0


@pytest.mark.parametrize(
    "name",
    [
        "accepted_draft",
        "segment",
        "chunked_prefill",
        "early_segment",
        "encoder_clip",
        "ends_by_error",
        "ends_by_repetition",
        "given",
        "padding_draft",
        "passed_over",
        "pause_all",
        "pause_new",
        "refused",
        "remote_load",
        "reset",
        "reset_running",
        "retained",
        "turn_cancelled",
        "turn_ended",
    ],
)
def test_everything_else_happens_at_all(report: Report, name: str):
    assert report.totals[name] > 0
