"""What is kept for a frontend whose stream may break."""

from __future__ import annotations

from engine_svc.replay import ReplayRing
from triptych.engine.v1 import engine_pb2


def message(seq: int, num_bytes: int = 10) -> engine_pb2.ConnectResponse:
    dead = engine_pb2.Dead(reason="x" * num_bytes)
    return engine_pb2.ConnectResponse(seq=seq, dead=dead)


def filled(num_messages: int, *, max_bytes: int = 10_000) -> ReplayRing:
    ring = ReplayRing(max_bytes=max_bytes)
    for seq in range(1, num_messages + 1):
        ring.keep(message(seq))
    return ring


def test_what_is_acknowledged_is_forgotten_and_the_rest_is_sent_again_as_it_was():
    ring = filled(5)
    ring.acknowledge(3)
    assert [kept.seq for kept in ring.messages()] == [4, 5]
    assert ring.size_bytes == message(4).ByteSize() + message(5).ByteSize()
    assert ring.acknowledged == 3


def test_an_older_ack_and_one_of_what_was_never_sent_change_nothing_that_counts():
    ring = filled(4)
    ring.acknowledge(2)
    ring.acknowledge(1)
    assert ring.acknowledged == 2
    ring.acknowledge(99)
    assert (ring.acknowledged, ring.messages(), ring.size_bytes) == (4, [], 0)
    ring.keep(message(5))
    assert [kept.seq for kept in ring.messages()] == [5]


def test_a_session_can_go_on_from_any_place_that_was_not_acknowledged_yet():
    ring = filled(5)
    ring.acknowledge(3)
    assert [seq for seq in range(8) if ring.covers(seq)] == [3, 4, 5]


def test_it_is_full_while_more_than_its_limit_is_unacknowledged():
    ring = ReplayRing(max_bytes=500)
    ring.keep(message(1, num_bytes=400))
    assert not ring.is_full
    ring.keep(message(2, num_bytes=5000))
    assert ring.is_full
    ring.acknowledge(1)
    assert ring.is_full
    ring.acknowledge(2)
    assert not ring.is_full
