"""What is asked of ranks beside steps, and for how long they may be silent then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import cast

import pytest

from engine_svc.ranks.plan_channel import create_channel
from engine_svc.ranks.plan_codec import PlanEncoder
from engine_svc.ranks.process_group import GroupLimits, ProcessGroup
from engine_svc.ranks.progress_board import ProgressBoard
from engine_svc.ranks.watch import RankLost, RankMessage, RankWatch


class FakeWatch:
    """Two ranks that answer a call, unless one is lost."""

    def __init__(self) -> None:
        self.lost_fd = os.eventfd(0)
        self.lost: RankLost | None = None
        self.process_ids = [11, 12]
        self.may_be_busy = False
        self.was_busy: list[bool] = []  # at each answer
        self._num_answers = 0

    def next_message(self, timeout_s: float) -> tuple[int, RankMessage]:
        self.was_busy.append(self.may_be_busy)
        if self.lost is not None:
            raise self.lost
        self._num_answers += 1
        return self._num_answers - 1, {"answer": {"number": self._num_answers}}

    def stop(self) -> None:
        os.close(self.lost_fd)


@pytest.fixture
def watch() -> FakeWatch:
    return FakeWatch()


@pytest.fixture
def group(watch: FakeWatch) -> Iterator[ProcessGroup]:
    made = ProcessGroup(
        cast(RankWatch, watch),
        ProgressBoard.create(2),
        create_channel(2),
        create_channel(1),
        PlanEncoder(max_num_seqs=1, num_groups=1),
        GroupLimits(),
    )
    yield made
    made.shutdown()


def test_ranks_may_be_as_silent_as_at_their_start_while_they_do_what_they_are_called_for(
    watch: FakeWatch, group: ProcessGroup
) -> None:
    assert group.call("stop_profile") == [{"number": 1}, {"number": 2}]
    assert watch.was_busy == [True, True]
    assert not watch.may_be_busy


def test_a_rank_that_is_lost_in_a_call_is_told_of(watch: FakeWatch, group: ProcessGroup) -> None:
    watch.lost = RankLost(1, "was ended by SIGKILL")
    with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
        group.call("stop_profile")
    assert not watch.may_be_busy
