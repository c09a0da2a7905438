"""What is kept for a frontend whose stream may break."""

from __future__ import annotations

from engine_svc.session.replay import ReplayBuffer


def message(seq: int, num_bytes: int = 10) -> bytes:
    return bytes([seq]) * num_bytes


def filled(num_messages: int, *, max_bytes: int = 10_000) -> ReplayBuffer:
    buffer = ReplayBuffer(max_bytes=max_bytes)
    for seq in range(1, num_messages + 1):
        buffer.keep(seq, message(seq))
    return buffer


def test_what_is_acknowledged_is_forgotten_and_the_rest_is_sent_again_as_it_was():
    buffer = filled(5)
    buffer.acknowledge(3)
    assert buffer.messages() == [message(4), message(5)]
    assert buffer.size_bytes == 20
    assert buffer.acknowledged == 3


def test_an_older_ack_and_one_of_what_was_never_sent_change_nothing_that_counts():
    buffer = filled(4)
    buffer.acknowledge(2)
    buffer.acknowledge(1)
    assert buffer.acknowledged == 2
    buffer.acknowledge(99)
    assert (buffer.acknowledged, buffer.messages(), buffer.size_bytes) == (4, [], 0)
    buffer.keep(5, message(5))
    assert buffer.messages() == [message(5)]


def test_a_session_can_go_on_from_any_place_that_was_not_acknowledged_yet():
    buffer = filled(5)
    buffer.acknowledge(3)
    assert [seq for seq in range(8) if buffer.covers(seq)] == [3, 4, 5]


def test_it_is_full_while_more_than_its_limit_is_unacknowledged():
    buffer = ReplayBuffer(max_bytes=500)
    buffer.keep(1, message(1, num_bytes=400))
    assert not buffer.is_full
    buffer.keep(2, message(2, num_bytes=5000))
    assert buffer.is_full
    buffer.acknowledge(1)
    assert buffer.is_full
    buffer.acknowledge(2)
    assert not buffer.is_full
