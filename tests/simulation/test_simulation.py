"""Random workloads: no invariant breaks, and they are hard enough to show it. The long run is by command."""

from __future__ import annotations

import sys
from types import CodeType, FrameType, FunctionType

import pytest

from engine_svc.cache.block_pool import JoinedPools
from engine_svc.cache.groups import AlignedStates, KeptStates, states_of
from engine_svc.cache.kv_cache import KVCache
from engine_svc.scheduler.budget import ChunkEnds
from tests.simulation.campaign import COVERED, Report, run_campaign
from tests.simulation.paged_runner import STATES
from tests.simulation.setup import POLICIES
from tests.simulation.simulation import Simulation

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
        "FullAttention+AlignedState",
        "FullAttention+EveryState",
        "FullAttention+KeptState",
        "FullAttention+SlidingWindow+KeptState",
        "KeptState",
        "overlapped",
        "overlapped with drafts",
    ],
)
def test_engines_of_every_shape_are_drawn(report: Report, shape: str):
    assert report.shapes[shape] > 0


def _code_of(*owners: type) -> set[CodeType]:
    functions = (function for owner in owners for function in vars(owner).values())
    return {function.__code__ for function in functions if isinstance(function, FunctionType)}


def _calls(simulation: Simulation, code: set[CodeType]) -> int:
    """How often a simulation calls any of these functions."""
    num_calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code in code

    sys.setprofile(note)
    try:
        simulation.run(20)
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_model_without_states_reaches_no_code_of_states():
    code = _code_of(KeptStates, AlignedStates, JoinedPools, ChunkEnds, *STATES)
    code |= {KVCache._is_too_new.__code__, states_of.__code__}
    num_calls = {True: 0, False: 0}
    for seed in range(24):
        simulation = Simulation(seed)
        has_states = any(isinstance(kind, STATES) for kind in simulation.setup.cache.groups)
        num_calls[has_states] += _calls(simulation, code)
    assert num_calls[False] == 0 < num_calls[True]


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
