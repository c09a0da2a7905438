"""What is kept for a frontend whose stream may break."""

from __future__ import annotations

from engine_svc.session.replay import ReplayRing


def message(seq: int, num_bytes: int = 10) -> bytes:
    return bytes([seq]) * num_bytes


def filled(num_messages: int, *, max_bytes: int = 10_000) -> ReplayRing:
    ring = ReplayRing(max_bytes=max_bytes)
    for seq in range(1, num_messages + 1):
        ring.keep(seq, message(seq))
    return ring


def test_what_is_acknowledged_is_forgotten_and_the_rest_is_sent_again_as_it_was():
    ring = filled(5)
    ring.acknowledge(3)
    assert ring.messages() == [message(4), message(5)]
    assert ring.size_bytes == 20
    assert ring.acknowledged == 3


def test_an_older_ack_and_one_of_what_was_never_sent_change_nothing_that_counts():
    ring = filled(4)
    ring.acknowledge(2)
    ring.acknowledge(1)
    assert ring.acknowledged == 2
    ring.acknowledge(99)
    assert (ring.acknowledged, ring.messages(), ring.size_bytes) == (4, [], 0)
    ring.keep(5, message(5))
    assert ring.messages() == [message(5)]


def test_a_session_can_go_on_from_any_place_that_was_not_acknowledged_yet():
    ring = filled(5)
    ring.acknowledge(3)
    assert [seq for seq in range(8) if ring.covers(seq)] == [3, 4, 5]


def test_it_is_full_while_more_than_its_limit_is_unacknowledged():
    ring = ReplayRing(max_bytes=500)
    ring.keep(1, message(1, num_bytes=400))
    assert not ring.is_full
    ring.keep(2, message(2, num_bytes=5000))
    assert ring.is_full
    ring.acknowledge(1)
    assert ring.is_full
    ring.acknowledge(2)
    assert not ring.is_full
