"""Who knows a later coordinator is refused, and said to be so once."""

from __future__ import annotations

import logging

import pytest

from coordinator_svc.membership.topology import MAX_NOTED, EpochCheck
from service_kit.errors import FailedPrecondition


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


def test_who_asks_again_and_again_is_logged_once_until_it_is_taken(caplog: pytest.LogCaptureFixture) -> None:
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


def test_who_was_refused_is_noted_within_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    check = EpochCheck(5)
    with caplog.at_level(logging.ERROR):
        for index in range(MAX_NOTED + 1):
            refuse(check, f"engine {index}", 6)
        refuse(check, f"engine {MAX_NOTED}", 6)
        assert len(caplog.records) == MAX_NOTED + 1
        refuse(check, "engine 0", 6)
    assert len(caplog.records) == MAX_NOTED + 2
