"""What is known of an engine's load: which report counts, and what is ours beside it."""

from __future__ import annotations

import random

from frontend_svc.engines.routing.account import EngineAccount, LoadReport


def test_what_was_sent_since_the_report_is_added_to_it():
    account = EngineAccount("h:1")
    account.report(LoadReport(7, 1, num_running=3, num_waiting=2, num_waiting_tokens=50), is_direct=True)
    account.send(1, 100)
    info = account.info()
    assert (info.num_requests, info.num_queued_tokens, info.num_in_flight) == (6, 150, 1)
    account.report(LoadReport(7, 2, num_running=4, num_waiting=2), is_direct=True)
    info = account.info()
    # It runs, and our own count knows that its prompt is not computed yet.
    assert (info.num_unreported, info.num_requests, info.num_queued_tokens) == (0, 6, 100)
    account.begin(1)
    assert account.info().num_queued_tokens == 0
    account.end(1)
    assert account.info().num_in_flight == 0


def test_a_prompt_that_is_computed_is_queued_no_more_reported_or_not():
    account = EngineAccount("h:1")
    account.send(1, 100)
    account.begin(1)
    account.begin(1)
    info = account.info()
    assert (info.num_unreported, info.num_unreported_tokens, info.num_pending_tokens) == (1, 0, 0)


def test_what_has_become_of_ours_since_the_report_is_taken_from_it():
    account = EngineAccount("h:1")
    for handle in range(3):
        account.send(handle, 10)
    account.report(LoadReport(7, 1, num_running=2, num_waiting=2, num_waiting_tokens=35), is_direct=True)
    account.begin(0)
    info = account.info()
    assert (info.num_running, info.num_waiting, info.num_waiting_tokens) == (2, 2, 25)
    for handle in range(3):
        account.end(handle)
    info = account.info()
    assert (info.num_running, info.num_waiting, info.num_waiting_tokens) == (0, 1, 5)
    account.report(LoadReport(7, 2, num_running=2, num_waiting_tokens=35), is_direct=True)
    info = account.info()
    assert (info.num_running, info.num_waiting_tokens) == (2, 35)
    # One that the report does not know of is not taken from it.
    account.send(9, 50)
    account.end(9)
    info = account.info()
    assert (info.num_requests, info.num_queued_tokens) == (2, 35)


def test_the_newest_step_wins_whatever_its_source():
    account = EngineAccount("h:1")
    for report, is_direct, is_taken in (
        (LoadReport(7, 5, 1), True, True),
        (LoadReport(7, 4, 9), False, False),
        (LoadReport(7, 5, 9), False, False),  # as old as what the engine said itself, at best
        (LoadReport(7, 6, 2), False, True),
        (LoadReport(7, 6, 3), False, True),  # a load may change between two steps
        (LoadReport(7, 6, 4), True, True),
        (LoadReport(7, 5, 9), True, False),
        (LoadReport(8, 99, 9), False, False),  # of another process
    ):
        assert account.report(report, is_direct=is_direct) is is_taken
    assert account.info().num_running == 4


def test_a_load_from_a_step_that_is_not_there_yet_hides_nothing_that_the_engine_says_itself():
    account = EngineAccount("h:1")
    assert account.report(LoadReport(7, 5, num_running=1), is_direct=True)
    assert account.report(LoadReport(7, 2**63, num_running=900), is_direct=False)
    assert account.report(LoadReport(7, 6, num_running=2), is_direct=True)
    assert account.info().num_running == 2
    # What is behind the engine's own last word stays behind, as does what others say of it.
    assert not account.report(LoadReport(7, 5, num_running=9), is_direct=True)
    assert not account.report(LoadReport(7, 6, num_running=9), is_direct=False)
    assert account.info().num_running == 2


def test_reports_of_an_earlier_process_end_with_it():
    account = EngineAccount("h:1")
    account.report(LoadReport(7, 500, num_running=9), is_direct=False)
    account.meet(8)
    assert account.info().num_running == 0
    assert not account.report(LoadReport(7, 501, num_running=9), is_direct=False)
    assert account.report(LoadReport(8, 1, num_running=2), is_direct=False)
    account.send(1, 10)
    account.reset()
    assert account.info().num_requests == 0
    assert account.report(LoadReport(9, 1, num_running=1), is_direct=False)


def test_an_unreported_engine_weighs_by_our_own_requests_unless_it_reports_itself():
    relayed, direct = EngineAccount("h:1"), EngineAccount("h:2")
    for account, is_direct in ((relayed, False), (direct, True)):
        account.send(1, 10)
        account.report(LoadReport(7, 1, num_running=30, num_waiting_tokens=400), is_direct=is_direct)
        account.unreport()
    assert (relayed.info().num_requests, relayed.info().num_queued_tokens) == (1, 10)
    assert (direct.info().num_requests, direct.info().num_queued_tokens) == (30, 400)


def test_a_load_beyond_all_bounds_is_that_of_a_full_engine():
    account = EngineAccount("h:1")
    huge = 2**63
    account.report(
        LoadReport(7, 1, huge, huge, huge, num_used_blocks=huge, num_total_blocks=10), is_direct=True
    )
    info = account.info()
    assert (info.num_used_blocks, info.num_total_blocks) == (10, 10)
    assert info.num_requests < 2**32 and info.num_queued_tokens <= 2**32


def test_facts_of_the_engine_outlive_its_reports():
    account = EngineAccount("h:1")
    account.set_facts(dp_rank=3)
    account.set_facts(block_size=16)
    account.hold(True)
    account.reset()
    info = account.info()
    assert (info.address, info.dp_rank, info.block_size, info.is_held) == ("h:1", 3, 16, True)


def test_slots_are_as_last_reported_and_none_once_the_engine_is_lost():
    account = EngineAccount("h:1")
    account.note_slots(["a", "b"])
    account.note_slots(["b"])
    assert account.info().slots == {"b"}
    account.reset()
    assert account.info().slots == frozenset()


def test_counts_are_those_of_a_recount_after_any_order_of_calls():
    chance, account = random.Random(5), EngineAccount("h:1")
    tokens: dict[int, int] = {}
    unreported: set[int] = set()
    for handle in range(2000):
        what = chance.randrange(5)
        known = chance.choice(list(tokens)) if tokens else -1
        if what <= 1:
            tokens[handle] = chance.randrange(100)
            unreported.add(handle)
            account.send(handle, tokens[handle])
        elif what == 2:
            account.begin(known)
            if tokens:
                tokens[known] = 0
        elif what == 3:
            account.end(known)
            tokens.pop(known, None)
            unreported.discard(known)
        else:
            account.report(LoadReport(1, handle), is_direct=True)
            unreported.clear()
        info = account.info()
        assert (info.num_in_flight, info.num_pending_tokens) == (len(tokens), sum(tokens.values()))
        assert info.num_unreported == len(unreported)
        assert info.num_unreported_tokens == sum(tokens[one] for one in unreported)
