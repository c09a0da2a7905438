"""How often an engine reports, and that no interval keeps it from renewing its lease in time."""

from __future__ import annotations

import pytest

from engine_svc.membership.membership import ReportPace


def reported(at: float, *, renew_after_s: float | None = None) -> ReportPace:
    pace = ReportPace()
    if renew_after_s is not None:
        pace.set_renewal(renew_after_s)
    pace.note_report(at)
    return pace


def test_the_first_report_is_due_at_once():
    assert ReportPace().must_renew(0.0)


@pytest.mark.parametrize(("has_work", "wait_s"), [(True, 0.1), (False, 0.5)])
def test_an_engine_without_work_looks_less_often(has_work, wait_s):
    assert reported(7.0).wait_s(7.0, has_work=has_work) == wait_s


def test_no_interval_is_shorter_than_the_least():
    pace = reported(7.0)
    pace.set_interval(0.0)
    assert pace.wait_s(7.0, has_work=True) == 0.1


@pytest.mark.parametrize("interval_s", [0.1, 0.7, 3600.0])
@pytest.mark.parametrize("renew_after_s", [0.2, 1.0])
@pytest.mark.parametrize("has_work", [True, False])
def test_a_lease_is_renewed_in_time_however_long_the_interval_is(interval_s, renew_after_s, has_work):
    pace, now = reported(0.0, renew_after_s=renew_after_s), 0.0
    pace.set_interval(interval_s)
    while not pace.must_renew(now):
        now += pace.wait_s(now, has_work=has_work)
    assert now == pytest.approx(renew_after_s)


def test_what_was_late_is_not_waited_for():
    assert reported(0.0, renew_after_s=1.0).wait_s(5.0, has_work=True) == 0.0
