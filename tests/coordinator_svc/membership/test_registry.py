"""Membership: places, states, leases. No network, no real time."""

from __future__ import annotations

import logging

import pytest

from coordinator_svc.membership.load import Load, LoadReport, LoadTable, PublishTimer
from coordinator_svc.membership.registry import EngineRegistry, Member, MemberState, Registration
from coordinator_svc.membership.topology import (
    MAX_NOTED,
    MAX_REPORTS_PER_S,
    MIN_INTERVAL_S,
    EpochCheck,
    ReportInterval,
)
from triptych_kit.clock import FakeClock
from triptych_kit.errors import AlreadyExists, FailedPrecondition, InvalidTransition

LEGAL = {
    (MemberState.JOINING, MemberState.READY),
    (MemberState.JOINING, MemberState.DRAINING),
    (MemberState.JOINING, MemberState.GONE),
    (MemberState.READY, MemberState.DRAINING),
    (MemberState.READY, MemberState.GONE),
    (MemberState.DRAINING, MemberState.READY),
    (MemberState.DRAINING, MemberState.GONE),
}


def engine(engine_id: str = "a", epoch: int = 1, *, rank: int = 0, size: int = 1) -> Registration:
    return Registration(engine_id, epoch, "127.0.0.1:7000", dp_group="g", dp_rank=rank, dp_size=size)


def registry_at(clock: FakeClock) -> EngineRegistry:
    return EngineRegistry(clock, lease_s=3.0)


def pass_time(registry: EngineRegistry, clock: FakeClock, seconds: float) -> list[Member]:
    """Let time pass as in a coordinator that runs: it looks for ended leases several times a second."""
    gone: list[Member] = []
    for _ in range(round(seconds / 0.25)):
        clock.advance(0.25)
        gone += registry.expire()
    return gone


@pytest.mark.parametrize("before", MemberState)
@pytest.mark.parametrize("after", MemberState)
def test_member_moves_as_the_table_says(before: MemberState, after: MemberState) -> None:
    member = Member(engine(), session_id=1, version=1, state=before)
    if (before, after) in LEGAL:
        assert member.move_to(after, 2).state is after
    else:
        with pytest.raises(InvalidTransition):
            member.move_to(after, 2)


def test_a_new_engine_joins_and_becomes_ready_by_its_report() -> None:
    registry = registry_at(FakeClock())
    assert registry.register(engine(), session_id=1).state is MemberState.JOINING
    assert registry.report("a", 1, MemberState.READY).state is MemberState.READY
    assert [member.registration.engine_id for member in registry.members()] == ["a"]


def test_every_visible_change_raises_the_version_and_a_renewal_does_not() -> None:
    registry = registry_at(FakeClock())
    versions = [registry.version]
    registry.register(engine(), session_id=1)
    versions.append(registry.version)
    registry.report("a", 1, MemberState.READY)
    versions.append(registry.version)
    registry.lose_session("a", 1)
    versions.append(registry.version)
    assert versions == sorted(set(versions))
    registry.register(engine(), session_id=2)
    version = registry.version
    registry.report("a", 2, MemberState.READY)
    registry.register(engine(), session_id=2)
    assert registry.version == version


def test_a_lost_session_leaves_the_engine_unreported_until_the_lease_ends() -> None:
    clock = FakeClock()
    registry = registry_at(clock)
    registry.register(engine(), session_id=1)
    registry.lose_session("a", 1)
    assert pass_time(registry, clock, 2.75) == []
    member = registry.find("a")
    assert member is not None
    assert not member.is_reporting
    gone = pass_time(registry, clock, 0.5)
    assert [member.state for member in gone] == [MemberState.GONE]
    assert registry.find("a") is None


def test_reports_keep_the_lease_and_silence_ends_it_under_an_open_session() -> None:
    clock = FakeClock()
    registry = registry_at(clock)
    registry.register(engine(), session_id=1)
    for _ in range(10):
        assert pass_time(registry, clock, 1.0) == []
        registry.report("a", 1, MemberState.READY)
    assert len(pass_time(registry, clock, 3.25)) == 1
    with pytest.raises(FailedPrecondition, match="register again"):
        registry.report("a", 1, MemberState.READY)


def test_an_engine_that_loads_may_be_silent_for_long_under_an_open_session() -> None:
    clock = FakeClock()
    registry = registry_at(clock)
    registry.register(engine(), session_id=1)
    assert pass_time(registry, clock, 59.75) == []
    assert len(pass_time(registry, clock, 0.5)) == 1


def test_the_session_of_an_engine_that_loads_leaves_it_one_lease() -> None:
    clock = FakeClock()
    registry = registry_at(clock)
    registry.register(engine(), session_id=1)
    registry.lose_session("a", 1)
    assert pass_time(registry, clock, 2.75) == []
    assert len(pass_time(registry, clock, 0.5)) == 1


def test_a_stopped_coordinator_ends_no_lease_for_its_own_silence() -> None:
    clock = FakeClock()
    registry = registry_at(clock)
    registry.register(engine(), session_id=1)
    registry.report("a", 1, MemberState.READY)
    clock.advance(30.0)
    assert registry.expire() == []
    assert len(pass_time(registry, clock, 3.25)) == 1


def test_the_same_process_continues_its_membership_under_a_new_session() -> None:
    registry = registry_at(FakeClock())
    registry.register(engine(), session_id=1)
    registry.report("a", 1, MemberState.READY)
    member = registry.register(engine(), session_id=2)
    assert member.state is MemberState.READY
    assert member.session_id == 2
    registry.lose_session("a", 1)
    found = registry.find("a")
    assert found is not None
    assert found.is_reporting


def test_a_live_engine_id_is_not_given_twice() -> None:
    registry = registry_at(FakeClock())
    registry.register(engine(epoch=1), session_id=1)
    with pytest.raises(AlreadyExists, match="engine id a"):
        registry.register(engine(epoch=2), session_id=2)
    found = registry.find("a")
    assert found is not None
    assert found.registration.engine_epoch == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_an_engine_without_a_group_takes_no_rank_of_one_in_either_order(is_first: bool) -> None:
    registry = registry_at(FakeClock())
    both = [engine("alone", rank=0, size=1), engine("ranked", rank=0, size=2)]
    for session_id, one in enumerate(both if is_first else both[::-1]):
        registry.register(one, session_id=session_id)
    assert len(registry.members()) == 2


def lockstep(engine_id: str, rank: int, parallel_config_hash: str, *, group: str = "g") -> Registration:
    return Registration(
        engine_id,
        rank + 1,
        "127.0.0.1:7000",
        dp_group=group,
        dp_rank=rank,
        dp_size=4,
        is_lockstep=True,
        parallel_config_hash=parallel_config_hash,
    )


def test_ranks_of_a_group_are_configured_alike_or_refused_with_both_hashes() -> None:
    registry = registry_at(FakeClock())
    registry.register(lockstep("a", 0, "one"), session_id=1)
    before = (registry.version, registry.members())
    with pytest.raises(FailedPrecondition, match=r"'two'.*'one'") as refused:
        registry.register(lockstep("b", 1, "two"), session_id=2)
    assert refused.value.reason == "PARALLEL_CONFIG_MISMATCH"
    assert refused.value.metadata == {"hash": "two", "held": "one"}
    with pytest.raises(FailedPrecondition, match="no lockstep"):
        registry.register(engine("b", rank=1, size=4), session_id=2)
    assert (registry.version, registry.members()) == before
    registry.register(lockstep("c", 1, "two", group="other"), session_id=3)


@pytest.mark.parametrize("is_first", [True, False])
def test_an_engine_that_stands_alone_lives_beside_a_group_without_a_name(is_first: bool) -> None:
    registry = registry_at(FakeClock())
    alone = Registration("alone", 1, "127.0.0.1:7000")
    both = [alone, lockstep("a", 0, "one", group="")]
    for session_id, one in enumerate(both if is_first else both[::-1]):
        registry.register(one, session_id=session_id)
    assert len(registry.members()) == 2


def test_a_hash_that_is_not_known_yet_is_compared_when_it_is() -> None:
    registry = registry_at(FakeClock())
    registry.register(lockstep("a", 0, ""), session_id=1)
    registry.register(lockstep("b", 1, "two"), session_id=2)
    with pytest.raises(FailedPrecondition, match=r"'one'.*'two'"):
        registry.register(lockstep("a", 0, "one"), session_id=1)


def test_an_evicted_engine_holds_no_lease() -> None:
    registry = registry_at(FakeClock())
    registry.register(engine(), session_id=1)
    evicted = registry.evict("a")
    assert evicted is not None
    assert registry.members() == []
    assert registry.evict("a") is None
    with pytest.raises(FailedPrecondition, match="register again"):
        registry.report("a", 1, MemberState.READY)


def test_engines_without_a_group_of_ranks_stand_side_by_side() -> None:
    registry = registry_at(FakeClock())
    registry.register(engine("a"), session_id=1)
    registry.register(engine("b"), session_id=2)
    assert len(registry.members()) == 2


def test_a_restarted_engine_replaces_the_one_that_lost_its_session() -> None:
    registry = registry_at(FakeClock())
    registry.register(engine("a", epoch=1, rank=1, size=2), session_id=1)
    registry.report("a", 1, MemberState.READY)
    registry.lose_session("a", 1)
    member = registry.register(engine("a", epoch=2, rank=1, size=2), session_id=2)
    assert member.state is MemberState.JOINING
    assert member.registration.engine_epoch == 2
    assert len(registry.members()) == 1


def test_a_refused_engine_changes_nothing() -> None:
    registry = registry_at(FakeClock())
    registry.register(engine("a", epoch=1, rank=0, size=2), session_id=1)
    registry.lose_session("a", 1)
    registry.register(engine("b", rank=1, size=2), session_id=2)
    before = (registry.version, registry.members())
    with pytest.raises(AlreadyExists, match="rank 1"):
        registry.register(engine("a", epoch=2, rank=1, size=2), session_id=3)
    assert (registry.version, registry.members()) == before


def test_an_engine_that_was_to_leave_may_report_that_it_stays_but_not_that_it_loads_again() -> None:
    registry = registry_at(FakeClock())
    registry.register(engine(), session_id=1)
    registry.report("a", 1, MemberState.DRAINING)
    assert registry.report("a", 1, MemberState.READY).state is MemberState.READY
    with pytest.raises(FailedPrecondition, match="JOINING after READY"):
        registry.report("a", 1, MemberState.JOINING)


# Loads: their order within an engine, and when a subscriber gets them.


def report(seq: int, *, step: int = 0, epoch: int = 1, running: int = 0) -> LoadReport:
    return LoadReport(epoch, seq, step, Load(num_running=running))


def test_a_newer_report_replaces_an_older_one() -> None:
    table = LoadTable()
    assert table.put("a", report(1, running=1))
    assert table.put("a", report(2, running=5))
    found = table.find("a")
    assert found is not None
    assert found.load.num_running == 5


@pytest.mark.parametrize(
    "stale",
    [report(2, step=10), report(1, step=99), report(3, step=9)],
    ids=["same seq", "older seq", "step going backwards"],
)
def test_a_stale_report_is_dropped_and_counted(stale: LoadReport) -> None:
    table = LoadTable()
    table.put("a", report(2, step=10, running=7))
    assert not table.put("a", stale)
    assert table.num_stale == 1
    found = table.find("a")
    assert found is not None
    assert found.load.num_running == 7


def test_engines_do_not_share_an_order() -> None:
    table = LoadTable()
    assert table.put("fast", report(900, step=90_000))
    assert table.put("slow", report(1, step=3))


def test_another_epoch_starts_its_own_order() -> None:
    table = LoadTable()
    table.put("a", report(900, step=90_000))
    assert table.put("a", report(1, step=0, epoch=2, running=1))


def test_a_new_session_counts_anew_so_that_a_step_from_the_future_ends_with_the_one_before() -> None:
    table = LoadTable()
    table.put("a", report(50, step=2**63))
    table.restart_order("a")
    assert table.put("a", report(1, step=99, running=2))
    assert not table.put("a", report(2, step=98, running=3))


def test_only_loads_that_changed_are_to_be_published() -> None:
    table = LoadTable()
    table.put("a", report(1, running=1))
    table.put("b", report(1, running=1))
    seen = table.version
    table.put("a", report(2, step=5, running=1))
    assert table.changed_since(seen) == {}
    table.put("b", report(2, running=2))
    assert list(table.changed_since(seen)) == ["b"]


def test_a_forgotten_engine_has_no_load() -> None:
    table = LoadTable()
    table.put("a", report(1))
    table.forget("a")
    assert table.find("a") is None
    assert table.changed_since(0) == {}


@pytest.mark.parametrize(
    ("elapsed_s", "members", "loads", "wait_s"),
    [
        (0.0, True, False, 0.0),
        (0.0, False, True, 0.1),
        (0.04, False, True, 0.06),
        (3.0, False, True, 0.0),
        (3.0, False, False, 2.0),
        (9.0, False, False, 0.0),
    ],
)
def test_members_are_published_at_once_loads_soon_and_nothing_now_and_then(elapsed_s, members, loads, wait_s):
    timer = PublishTimer(now=100.0)
    due = timer.wait_s(100.0 + elapsed_s, members_changed=members, loads_changed=loads)
    assert due == pytest.approx(wait_s)


# A peer that knows a later coordinator is refused, which is logged once.


def refuse(check: EpochCheck, who: str, epoch: int) -> None:
    with pytest.raises(FailedPrecondition, match=f"{who} knows coordinator epoch {epoch}") as refused:
        check.check(who, epoch)
    assert refused.value.reason == "STALE_COORDINATOR"


def test_only_a_later_epoch_is_refused() -> None:
    check = EpochCheck(5)
    for epoch in (0, 4, 5):
        check.check("engine a", epoch)
    refuse(check, "engine a", 6)
    assert check.num_refused == 1


def test_a_refused_sender_that_retries_is_logged_once_until_it_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = EpochCheck(5)
    with caplog.at_level(logging.ERROR):
        for _ in range(10):
            refuse(check, "engine a", 6)
            refuse(check, "frontend b", 6)
        assert (len(caplog.records), check.num_refused) == (2, 20)
        refuse(check, "engine a", 7)
        assert len(caplog.records) == 3
        check.check("engine a", 0)
        refuse(check, "engine a", 7)
    assert len(caplog.records) == 4


def test_refused_senders_are_noted_within_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    check = EpochCheck(5)
    with caplog.at_level(logging.ERROR):
        for index in range(MAX_NOTED + 1):
            refuse(check, f"engine {index}", 6)
        refuse(check, f"engine {MAX_NOTED}", 6)
        assert len(caplog.records) == MAX_NOTED + 1
        refuse(check, "engine 0", 6)
    assert len(caplog.records) == MAX_NOTED + 2


# How often engines report, by how many there are.


def test_few_engines_report_as_often_as_they_do_by_themselves() -> None:
    interval = ReportInterval(max_s=1.0)
    assert not any(interval.follow(num_engines) for num_engines in range(201))
    assert (interval.seconds, interval.is_default) == (MIN_INTERVAL_S, True)


def test_reports_of_all_stay_below_the_limit_and_not_far_below() -> None:
    interval = ReportInterval(max_s=10.0)
    for num_engines in (*range(4097), *range(4096, -1, -1)):
        interval.follow(num_engines)
        assert num_engines / interval.seconds <= MAX_REPORTS_PER_S
        assert interval.is_default or num_engines / interval.seconds >= MAX_REPORTS_PER_S / 2
    assert interval.is_default


def test_engines_that_come_and_go_one_by_one_change_it_seldom() -> None:
    interval = ReportInterval(max_s=10.0)
    assert sum(interval.follow(num_engines) for num_engines in range(4097)) < 20
    # Nor does one that comes and goes at a limit.
    for limit in range(1, 4096):
        interval.follow(limit)
        assert sum(interval.follow(limit + turn % 2) for turn in range(6)) <= 1


def test_it_is_never_longer_than_a_lease_allows() -> None:
    interval = ReportInterval(max_s=1.0)
    assert interval.follow(4096) and interval.seconds == 1.0
    assert not interval.follow(4000)


def test_a_lease_that_is_shorter_than_the_default_changes_nothing() -> None:
    interval = ReportInterval(max_s=0.05)
    assert not interval.follow(4096)
    assert interval.is_default
