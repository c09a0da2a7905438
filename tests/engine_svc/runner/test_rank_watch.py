"""Whatever becomes of a rank, somebody is told, and nothing is waited for any more."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import sys
from collections.abc import Mapping

import pytest

from engine_svc.runner.progress_board import ProgressBoard
from engine_svc.runner.rank_watch import RankLost, RankStart, RankWatch, WatchLimits

PATIENCE_S = 60.0


def lost_after(spec: Mapping[str, object]) -> RankLost:
    """What is told of a rank that does what `spec` says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    start = RankStart("tests.engine_svc.runner.doomed_rank", spec, (), environment)
    told: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    board = ProgressBoard.create(1)
    watch = RankWatch([start], board, limits=WatchLimits(), on_lost=told.put)
    try:
        lost = told.get(timeout=PATIENCE_S)
        assert select.select([watch.lost_fd], [], [], 0)[0] == [watch.lost_fd]
        with pytest.raises(RankLost, match=re.escape(lost.why)):
            watch.next_message(0.0)
    finally:
        watch.stop(grace_s=0.0)
        board.close()
    return lost


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
    ids=["SIGKILL", "a-real-time-signal"],
)
def test_a_rank_that_any_signal_ends_is_lost(number: int, name: str) -> None:
    assert str(lost_after({"signal": int(number)})) == f"rank 0 was ended by {name}"


def test_a_watch_that_fails_has_lost_its_ranks() -> None:
    assert "can no longer be watched (JSONDecodeError)" in str(lost_after({"says": "no message\n"}))
