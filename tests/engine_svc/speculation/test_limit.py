"""SurvivalLimit: drafts where they pay, and next to none where they do not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine_svc.core.request import Request
from engine_svc.core.step import StepCosts
from engine_svc.speculation.accounting import DraftGrants
from engine_svc.speculation.limit import SurvivalLimit
from tests.engine_svc.scheduler.fakes import request

MAX_DRAFTS = 8
FLAT = StepCosts((1, 64), (10e-3, 12e-3))
STEEP = StepCosts((1, 64), (1e-3, 64e-3))
# What a processor takes: the weights are read once, and each position is computed.
USUAL = StepCosts((1, 2, 4, 8, 16, 64), (10e-3, 10.6e-3, 11.8e-3, 14.2e-3, 19e-3, 48e-3))
# A small model, for which the host takes long to propose.
HOST = StepCosts(
    (1, 8, 64),
    (0.7e-3, 1.2e-3, 6e-3),
    seconds_per_drafted_step=0.15e-3,
    seconds_per_drafted_row=0.02e-3,
)


def rows_of(count: int, num_tokens: int = 10) -> list[Request]:
    return [request(str(index), num_tokens) for index in range(count)]


def learn(limit: SurvivalLimit, rows: Sequence[Request], num_accepted: Sequence[int]) -> list[int]:
    """What rows may have once so many of their drafts were accepted again and again."""
    limit.grant(rows)
    for _ in range(40):
        for row, accepted in zip(rows, num_accepted, strict=True):
            limit.note(row, MAX_DRAFTS, accepted)
    return granted(limit, rows)


def granted(limit: SurvivalLimit, rows: Sequence[Request]) -> list[int]:
    return list(limit.grant(rows)) or [0] * len(rows)


@pytest.mark.parametrize(
    ("costs", "accepted", "allowed"),
    [(FLAT, 8, 8), (STEEP, 8, 0), (FLAT, 0, 0), (USUAL, 8, 8), (USUAL, 3, 3)],
)
def test_drafts_are_allowed_where_they_pay(costs, accepted, allowed):
    assert learn(SurvivalLimit(costs, MAX_DRAFTS), rows_of(1), [accepted]) == [allowed]


def test_rows_share_one_budget_by_what_they_had_accepted():
    few, some, many = learn(SurvivalLimit(USUAL, MAX_DRAFTS), rows_of(3), [0, 3, 8])
    assert few < some < many


@pytest.mark.parametrize(("num_tokens", "allowed"), [(10, True), (4000, False)])
def test_reading_long_contexts_has_a_price(num_tokens, allowed):
    limit = SurvivalLimit(StepCosts(FLAT.counts, FLAT.seconds, seconds_per_read=1e-5), MAX_DRAFTS)
    rows = rows_of(1, num_tokens)
    limit.grant(rows)
    for step in range(40):
        limit.note(rows[0], MAX_DRAFTS, step % 2)
    assert bool(limit.grant(rows)) is allowed


def test_a_step_in_the_costs_is_taken_if_what_lies_behind_it_pays():
    costs = StepCosts((1, 2, 16, 17), (10e-3, 18e-3, 18e-3, 90e-3))
    assert learn(SurvivalLimit(costs, MAX_DRAFTS), rows_of(1), [8]) == [8]


def test_a_text_that_becomes_predictable_gets_drafts_again():
    limit, rows = SurvivalLimit(FLAT, MAX_DRAFTS), rows_of(1)
    assert learn(limit, rows, [0]) == [0]
    allowed = []
    for _ in range(600):
        allowed += granted(limit, rows)
        if allowed[-1]:
            limit.note(rows[0], allowed[-1], allowed[-1])
    assert allowed[-1] == MAX_DRAFTS


@pytest.mark.parametrize("costs", [FLAT, STEEP, USUAL, HOST], ids=["flat", "steep", "usual", "host"])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 64])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("proposed", [0.0, 0.3, 1.0])
def test_tokens_never_come_slower_than_without_drafts(costs, num_rows, chance, proposed):
    choose = random.Random(3)
    seconds, num_tokens, num_steps = 0.0, 0, 0
    limit = SurvivalLimit(costs, MAX_DRAFTS)
    for _ in range(8):  # batches of new requests, of 200 steps each
        rows = rows_of(num_rows)
        for _ in range(200):
            allowed = granted(limit, rows)
            found = [num_drafts if choose.random() < proposed else 0 for num_drafts in allowed]
            seconds += costs.of(num_rows + sum(found)) + any(allowed) * costs.seconds_per_drafted_step
            seconds += sum(map(bool, allowed)) * costs.seconds_per_drafted_row
            num_steps += 1
            num_tokens += num_rows
            for row, num_drafts, num_found in zip(rows, allowed, found, strict=True):
                if num_drafts:
                    right = (n for n in range(num_found) if choose.random() >= chance)
                    num_accepted = next(right, num_found)
                    num_tokens += num_accepted
                    limit.note(row, num_found, num_accepted)
    gain = (num_tokens / seconds) / (num_rows / costs.of(num_rows))
    assert gain > 0.99
    if num_rows == 1 and chance == 0.95 and proposed == 1.0 and costs is not STEEP:
        assert gain > 3


def test_rows_for_which_nothing_is_proposed_have_no_drafts():
    limit, rows = SurvivalLimit(HOST, MAX_DRAFTS), rows_of(4)
    for _ in range(100):
        for row, allowed in zip(rows, granted(limit, rows), strict=True):
            if allowed:
                limit.note(row, 0, 0)
    seconds = 0.0
    for _ in range(5000):
        allowed = granted(limit, rows)
        seconds += any(allowed) * HOST.seconds_per_drafted_step
        seconds += sum(map(bool, allowed)) * HOST.seconds_per_drafted_row
        for row, num_drafts in zip(rows, allowed, strict=True):
            if num_drafts:
                limit.note(row, 0, 0)
    assert 0.0 < seconds < 0.002 * 5000 * HOST.of(4)


def test_rows_that_come_and_go_are_not_decided_about_in_each_step():
    limit, rows = SurvivalLimit(StepCosts((1, 1024), (10e-3, 12e-3)), MAX_DRAFTS), rows_of(64)
    assert all(learn(limit, rows, [8] * 64))
    num_at_once = 0
    for number in range(64):
        rows = [*rows[1:], request(f"new {number}", 10)]
        allowed = granted(limit, rows)
        assert allowed[0]
        num_at_once += allowed[-1] > 0
    assert 8 <= num_at_once <= 10


def test_a_step_without_a_change_passes_as_if_it_had_been_asked_about():
    """Rows come, go and gain, and steps that pass are the most."""
    choose = random.Random(4)
    asked, grants_limit = SurvivalLimit(HOST, MAX_DRAFTS), SurvivalLimit(HOST, MAX_DRAFTS)
    grants, num_asked = DraftGrants(grants_limit), 0
    running, num_added = rows_of(4), 4
    grants_limit_grant = grants_limit.grant

    def count_asked(rows: Sequence[Request]) -> Sequence[int]:
        nonlocal num_asked
        num_asked += 1
        return grants_limit_grant(rows)

    grants_limit.grant = count_asked  # type: ignore[method-assign]
    for _ in range(5000):
        if choose.random() < 0.01:
            for limit in (asked, grants_limit):
                limit.forget(running[0])
            del running[0]
        if choose.random() < 0.01 or not running:
            running.append(request(f"new {num_added}", 10))
            num_added += 1
        for row in running:
            row.num_computed_tokens = len(row.token_ids) - 1
        grants.grant(running)
        wanted = granted(asked, running)
        assert [len(row.draft_token_ids) for row in running] == wanted
        for row, num_drafts in zip(running, wanted, strict=True):
            if num_drafts:
                num_accepted = choose.choice((0, 0, 0, num_drafts))
                asked.note(row, num_drafts, num_accepted)
                grants.note(row, num_drafts, num_accepted)
    assert num_asked < 2500
