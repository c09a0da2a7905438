"""Loads: their order within an engine, and when a subscriber hears of them."""

from __future__ import annotations

import pytest

from coordinator_svc.membership.load import Load, LoadReport, LoadTable, PublishTimer


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
def test_members_are_published_at_once_loads_soon_and_nothing_now_and_then(
    elapsed_s: float, members: bool, loads: bool, wait_s: float
) -> None:
    timer = PublishTimer(now=100.0)
    due = timer.wait_s(100.0 + elapsed_s, members_changed=members, loads_changed=loads)
    assert due == pytest.approx(wait_s)
