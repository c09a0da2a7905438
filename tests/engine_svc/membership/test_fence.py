"""Which of two coordinators is obeyed."""

from __future__ import annotations

from engine_svc.membership.membership import Fence
from service_kit.clock import FakeClock


def test_only_the_highest_epoch_is_obeyed_within_its_lease():
    clock = FakeClock()
    fence = Fence(clock)
    assert fence.hear(5, 3.0)
    assert fence.hear(7, 3.0)
    clock.advance(2.9)
    assert not fence.hear(5, 3.0)
    assert fence.epoch == 7


def test_each_word_of_the_highest_renews_its_lease():
    clock = FakeClock()
    fence = Fence(clock)
    for _ in range(3):
        assert fence.hear(7, 3.0)
        clock.advance(2.0)
    assert not fence.hear(5, 3.0)


def test_a_lower_epoch_is_obeyed_after_a_lease_without_the_highest():
    clock = FakeClock()
    fence = Fence(clock)
    assert fence.hear(7, 3.0)
    assert fence.least == 7
    clock.advance(3.0)
    assert fence.least == 0
    assert fence.hear(5, 3.0)
    # What comes back then is newer again.
    assert fence.hear(7, 3.0)
    assert not fence.hear(5, 3.0)
