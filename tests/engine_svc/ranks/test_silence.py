"""When a rank has been silent for too long."""

from __future__ import annotations

from engine_svc.ranks.watch import Silence


def silence() -> Silence:
    return Silence(2, busy_limit_s=60.0, limit_s=4.0)


def test_a_rank_that_gives_signs_is_never_lost():
    one = silence()
    assert all(one.look([count, count], 3.0, may_be_busy=False) is None for count in range(1, 100))


def test_a_silent_rank_is_lost_at_the_limit_and_named():
    one = silence()
    looks = [one.look([count, 1], 1.0, may_be_busy=False) for count in range(1, 7)]
    assert looks == [None] * 4 + [(1, 4.0)] * 2


def test_busy_ranks_may_be_silent_for_longer():
    one = silence()
    assert all(one.look([0, 0], 1.0, may_be_busy=True) is None for _ in range(59))
    assert one.look([0, 0], 1.0, may_be_busy=True) == (0, 60.0)


def test_silence_of_busy_ranks_does_not_count_once_they_are_not():
    one = silence()
    for _ in range(2):
        for _ in range(30):
            assert one.look([0, 0], 1.0, may_be_busy=True) is None
        looks = [one.look([0, 0], 1.0, may_be_busy=False) for _ in range(4)]
        assert looks == [None, None, None, (0, 4.0)]
