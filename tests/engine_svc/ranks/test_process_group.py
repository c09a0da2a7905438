"""For how long ranks are waited for."""

from __future__ import annotations

import os
from typing import cast

import pytest

from engine_svc.core.step import StepPlan, StepResult
from engine_svc.ranks import process_group
from engine_svc.ranks.plan_channel import create_channel
from engine_svc.ranks.plan_codec import PlanEncoder
from engine_svc.ranks.process_group import GroupLimits, ProcessGroup
from engine_svc.ranks.progress_board import ProgressBoard
from engine_svc.ranks.result_codec import encode_result
from engine_svc.ranks.watch import RankLost, RankWatch

STEP_S = 3.0


class BlamingWatch:
    """A watch over two ranks that live."""

    lost_fd = None
    lost = None
    process_ids = (1, 2)

    def blame(self, rank: int, why: str) -> RankLost:
        return RankLost(rank, why)

    def stop(self) -> None:
        """There are no ranks."""


class Results:
    """Yields nothing for `num_waits` waits, then a result."""

    def __init__(self, num_waits: float) -> None:
        self.num_waits = num_waits
        self.waited_s: list[float] = []
        self.written_fd = os.eventfd(0)  # nothing is written there

    def receive(self, *, timeout_s: float) -> bytes | None:
        self.waited_s.append(timeout_s)
        is_there = len(self.waited_s) > self.num_waits
        return encode_result(StepResult(1, [[7]])) if is_there else None

    def close(self) -> None:
        os.close(self.written_fd)


@pytest.fixture
def group_with(monkeypatch):
    """Makes a group whose results are those given."""
    made = []

    def make(results: Results) -> ProcessGroup:
        monkeypatch.setattr(process_group, "ChannelReader", lambda *arguments, **options: results)
        group = ProcessGroup(
            cast(RankWatch, BlamingWatch()),
            ProgressBoard.create(2),
            create_channel(2),
            create_channel(1),
            PlanEncoder(max_num_seqs=4, num_groups=1),
            GroupLimits(step_s=STEP_S),
        )
        made.append(group)
        return group

    yield make
    for group in made:
        group.shutdown()


def test_a_wait_that_was_over_because_all_stood_still_is_not_the_ranks_fault(group_with):
    # The clock went on while neither they nor we did: the first wait ended at once, whatever it was for.
    assert group_with(Results(num_waits=1)).launch(StepPlan(1)).result().sampled == [[7]]


def test_a_step_is_waited_for_as_long_as_it_may_take(group_with):
    results = Results(num_waits=float("inf"))
    pending = group_with(results).launch(StepPlan(1))
    with pytest.raises(RankLost, match="rank 0 did not finish a step in 3 s"):
        pending.result()
    assert sum(results.waited_s) == pytest.approx(STEP_S)
