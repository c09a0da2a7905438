"""How often engines report, by how many there are."""

from __future__ import annotations

from coordinator_svc.membership.topology import MAX_REPORTS_PER_S, MIN_INTERVAL_S, ReportInterval


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
