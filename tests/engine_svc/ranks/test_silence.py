"""When a rank has been silent for too long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_svc.ranks.watch import Silence, WatchLimits


class Looks:
    """Looks at the heartbeats of two ranks ten times a second."""

    def __init__(self) -> None:
        self._silence = Silence(2, WatchLimits(hang_s=4.0, start_hang_s=60.0))
        self._num_looks = 0

    def until_lost(
        self, beats: Callable[[int], list[int]], most_s: float, *, may_be_busy: bool = False
    ) -> tuple[float, int, float] | None:
        """After how long a rank is lost, which one, and the limit; None if none is."""
        for number in range(round(most_s * 10)):
            self._num_looks += 1
            lost = self._silence.look(beats(number), self._num_looks / 10, may_be_busy=may_be_busy)
            if lost is not None:
                return (number / 10, *lost)
        return None


def test_a_rank_that_gives_signs_is_never_lost():
    assert Looks().until_lost(lambda number: [number // 30, number // 30], 100.0) is None


def test_a_silent_rank_is_lost_at_the_limit_and_named():
    assert Looks().until_lost(lambda number: [number, 1], 10.0) == (pytest.approx(4.0, abs=0.2), 1, 4.0)


def test_busy_ranks_may_be_silent_for_longer():
    lost = Looks().until_lost(lambda number: [0, 0], 100.0, may_be_busy=True)
    assert lost == (pytest.approx(60.0, abs=0.2), 0, 60.0)


def test_silence_of_busy_ranks_does_not_count_once_they_are_not():
    looks = Looks()
    assert looks.until_lost(lambda number: [0, 0], 30.0, may_be_busy=True) is None
    lost = looks.until_lost(lambda number: [0, 0], 10.0)
    assert lost == (pytest.approx(4.0, abs=0.2), 0, 4.0)
