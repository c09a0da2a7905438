"""Drafts: when they are planned, what becomes of the wrong ones, how they are counted, and padding."""

from __future__ import annotations

import pytest

from engine_svc.core.request import DraftUse, Request
from engine_svc.speculation.accounting import UNKNOWN_DRAFT, DraftCounter, DraftStats, is_last_token_in_flight
from tests.engine_svc.scheduler.fakes import Stage, granted, request


def test_drafts_may_leave_nothing_for_the_next():
    stage = Stage(num_speculative_tokens=3, max_num_batched_tokens=4)
    stage.add(request("a", 2), request("b", 2))
    for drafts in ([1], [1, 2, 3]):
        stage.update(stage.schedule(), drafts={"a": drafts})
    assert granted(stage.schedule()) == {"a": 4}
    assert stage.scheduler.running_ids == ["a", "b"]


def test_drafts_for_who_was_preempted_meanwhile_are_dropped():
    stage = Stage(num_speculative_tokens=2)
    late = request("a", 8)
    stage.add(late)
    plan = stage.schedule()
    stage.preempt_running()
    stage.update(plan, {"a": [42]}, {"a": [10, 11]})
    plan = stage.schedule()
    assert (granted(plan), plan.draft_token_ids) == ({"a": 9}, [[]])


@pytest.mark.parametrize(
    ("drafts", "sampled", "stats"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], DraftStats(1, 3, 3, (1, 1, 1))),
        ([[1, 2, 3]], [[1, 5]], DraftStats(1, 3, 1, (1, 0, 0))),
        ([[1, 2], [3]], [[1, 4], [3, 4]], DraftStats(2, 3, 2, (2, 0))),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], DraftStats(2, 3, 3, (2, 1))),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7], [4, 8]], DraftStats(2, 6, 3, (2, 1, 0))),
        ([[1], [4, 5, 6]], [[9], [4, 5, 6, 7]], DraftStats(2, 4, 3, (1, 1, 1))),
        ([[], []], [[5], [6]], DraftStats()),
    ],
)
def test_drafts_are_counted_by_row_and_position(drafts, sampled, stats):
    """Behaviour 25."""
    stage = Stage(num_speculative_tokens=3)
    names = [f"r{index}" for index in range(len(drafts))]
    stage.add(*(request(name, 8) for name in names))
    stage.update(stage.schedule(), drafts=dict(zip(names, drafts, strict=True)))
    assert stage.scheduler.stats().drafts == DraftStats()
    stage.update(stage.schedule(), dict(zip(names, sampled, strict=True)))
    assert stage.scheduler.stats().drafts == stats


def test_the_last_output_of_a_request_has_its_drafts_and_no_other_has():
    stage = Stage(num_speculative_tokens=2)
    drafting, aborted, plain = (request(name, 8, max_tokens=2) for name in "abc")
    stage.add(drafting, aborted, plain)
    first = stage.update(stage.schedule())
    for drafted in (drafting, aborted):
        drafted.drafts = DraftUse(2, 1)
    ended = stage.scheduler.abort([aborted.request_id], 1.0)
    last = stage.update(stage.schedule())
    found = {output.request_id: output.drafts for output in (*ended, *last)}
    assert found == {"a": DraftUse(2, 1), "b": DraftUse(2, 1), "c": None}
    assert [output.drafts for output in first] == [None] * 3


def test_counts_of_drafts_go_on_from_step_to_step():
    counter = DraftCounter()
    for num_drafts, num_accepted in ((1, 1), (3, 2), (2, 0)):
        counter.add(num_drafts, num_accepted)
    assert counter.stats() == DraftStats(3, 6, 3, (2, 1, 0))


def _with_a_cached_prompt(**options: object) -> tuple[Stage, Request]:
    """A decode that runs, and a prompt of 9 tokens of which all but the last are cached."""
    stage = Stage(**{"num_speculative_tokens": 3, "block_size": 4, **options})
    earlier = request("earlier", 9, salt="same", max_tokens=1)
    stage.add(request("decode", 2), earlier)
    while not earlier.is_finished:
        stage.step()
    return stage, request("new", 9, salt="same")


# Behaviour 26.
def test_no_padding_beside_a_prompt_that_is_still_being_computed():
    stage, newcomer = _with_a_cached_prompt(max_num_batched_tokens=20)
    stage.add(request("long", 30))
    assert granted(stage.step()) == {"decode": 1, "long": 19}
    stage.add(newcomer)
    # It was in its prompt when the step began, though it ends it now.
    assert granted(stage.step()) == {"decode": 1, "long": 11, "new": 1}


def test_a_prompt_that_enters_in_the_same_step_changes_nothing():
    stage, newcomer = _with_a_cached_prompt()
    stage.add(request("prompt", 5), newcomer)
    assert granted(stage.step()) == {"decode": 1, "prompt": 5, "new": 4}


@pytest.mark.parametrize(("num_tokens", "planned"), [(9, 4), (10, 2)])
def test_only_who_has_a_single_token_to_compute_is_padded(num_tokens: int, planned: int):
    stage, _ = _with_a_cached_prompt()
    stage.add(request("new", num_tokens, salt="same"))
    assert granted(stage.step())["new"] == planned


def test_a_prompt_of_one_token_is_padded_only_beside_others():
    stage = Stage(num_speculative_tokens=3)
    stage.add(request("a", 1))
    assert granted(stage.step()) == {"a": 1}
    stage.add(request("b", 1))
    assert granted(stage.step()) == {"a": 1, "b": 4}


def test_a_cached_prompt_is_padded_even_when_it_runs_alone():
    stage, newcomer = _with_a_cached_prompt()
    stage.scheduler.abort(["decode"], now=2.0)
    stage.add(newcomer)
    assert granted(stage.step()) == {"new": 4}


@pytest.mark.parametrize(("max_model_len", "planned"), [(12, 1), (13, 4), (14, 4)])
def test_padding_stops_at_the_model_length(max_model_len: int, planned: int):
    stage, newcomer = _with_a_cached_prompt(max_model_len=max_model_len)
    stage.add(newcomer)
    plan = stage.schedule()
    assert granted(plan) == {"decode": 1, "new": planned}
    assert plan.draft_token_ids[1] == [UNKNOWN_DRAFT] * (planned - 1)


@pytest.mark.parametrize(("budget", "enters"), [(11, False), (12, True)])
def test_who_cannot_be_padded_in_full_waits(budget: int, enters: bool):
    stage, newcomer = _with_a_cached_prompt(max_num_batched_tokens=budget)
    stage.add(request("wide", 2))
    stage.step()
    stage.update(stage.schedule(), drafts={"wide": [1, 2, 3], "decode": [4, 5, 6]})
    stage.add(newcomer)
    plan = stage.step()
    assert granted(plan) == {"decode": 4, "wide": 4, **({"new": 4} if enters else {})}
    assert newcomer.draft_token_ids == []
    # What waited has all the room of the next step, and nothing of what it was padded with before.
    assert granted(stage.step())["new"] == (1 if enters else 4)


def test_padding_counts_to_the_limit_for_one_request():
    stage, newcomer = _with_a_cached_prompt(long_prefill_token_threshold=3)
    stage.add(newcomer)
    plan = stage.schedule()
    assert granted(plan) == {"decode": 1, "new": 3}
    assert plan.draft_token_ids[1] == [UNKNOWN_DRAFT] * 2


@pytest.mark.parametrize(
    ("num_computed", "num_placeholders", "max_tokens", "is_last"),
    [(8, 1, 1, True), (8, 1, 2, False), (9, 2, 1, True), (9, 1, 2, True), (9, 1, 3, False), (9, 2, 2, False)],
)
def test_the_last_token_is_in_flight_when_no_later_one_is_allowed(
    num_computed: int, num_placeholders: int, max_tokens: int, is_last: bool
):
    ahead = request("a", 8, max_tokens=max_tokens)
    ahead.num_computed_tokens, ahead.num_placeholders = num_computed, num_placeholders
    assert is_last_token_in_flight(ahead) is is_last


def test_what_fits_no_step_is_not_padded():
    stage = Stage(block_size=4, num_speculative_tokens=3, max_num_batched_tokens=3)
    stage.add(request("a", 1, max_tokens=9))
    stage.step()
    stage.add(request("b", 1, max_tokens=9))
    assert granted(stage.step()) == {"a": 1, "b": 1}
