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

from engine_svc.ranks import watch as rank_watch
from engine_svc.ranks.progress_board import ProgressBoard
from engine_svc.ranks.watch import RankLost, RankStart, RankWatch, WatchLimits
from service_kit import stacks
from tests.engine_svc.session.unread import exit_code_unread

PATIENCE_S = 60.0


def start_of(spec: Mapping[str, object]) -> RankStart:
    """Of a rank that does what `spec` says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return RankStart("tests.engine_svc.ranks.doomed_rank", spec, (), environment)


def lost_after(spec: Mapping[str, object]) -> RankLost:
    """What is told of a rank that does what `spec` says."""
    told: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    board = ProgressBoard.create(1)
    watch = RankWatch([start_of(spec)], board, limits=WatchLimits(), on_lost=told.put)
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


def test_ranks_that_are_given_up_write_down_where_they_stand(monkeypatch, capfd) -> None:
    monkeypatch.setattr(stacks, "_WAIT_S", 2.0)
    monkeypatch.setattr(stacks, "_MAX_WAIT_S", 4.0)
    monkeypatch.setattr(rank_watch, "_WRITE_S", 30.0)
    board = ProgressBoard.create(2)
    starts = [start_of({"says": '{"ready": {}}\n'}) for _ in range(2)]
    watch = RankWatch(starts, board, limits=WatchLimits())
    try:
        for _ in starts:
            watch.next_message(PATIENCE_S)
        process_ids = watch.process_ids
        assert str(watch.blame(1, "did not finish a step")) == "rank 1 did not finish a step"
    finally:
        watch.stop(grace_s=0.0)
        board.close()
    written = capfd.readouterr().err
    first, second = (written.index(f"Rank {rank} (process {process_ids[rank]}):") for rank in range(2))
    for text in (written[first:second], written[second:]):
        assert re.search(r'File ".*doomed_rank\.py", line \d+ in main', text), text


ASKING = """
from service_kit.stacks import write_beside, write_stacks_of
write_beside(lambda: write_stacks_of([1 << 22]), 0.05)
os._exit(7)
"""


def test_whoever_asks_for_stacks_goes_on_where_nobody_reads_them() -> None:
    assert exit_code_unread(ASKING) == 7
