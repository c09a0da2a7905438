"""The order of those who wait, and the place that a blocked one keeps."""

from __future__ import annotations

from engine_svc.core.request import Request, RequestStatus
from engine_svc.scheduler.waiting_queue import WaitingQueue
from tests.engine_svc.scheduler.fakes import ids_of, request


def _waiting(request_id: str, place: float, num_uncached: int = 1, *, blocked: bool = False) -> Request:
    queued = request(request_id, 4, blockers=["one"] if blocked else [])
    queued.order_key = (place, 0.0, request_id)
    queued.num_uncached_tokens = num_uncached
    if not blocked:
        queued.move_to(RequestStatus.WAITING)
    return queued


def _queue(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for queued in requests:
        queue.add(queued)
    return queue


def test_an_empty_queue_has_nothing():
    queue = WaitingQueue()
    assert (len(queue), queue.num_ready, queue.num_blocked, queue.num_uncached_tokens) == (0, 0, 0, 0)
    assert (queue.at(0), queue.blocked("a"), list(queue)) == (None, None, [])


def test_the_smallest_key_comes_first_whoever_came_first():
    queue = _queue(_waiting("a", 3), _waiting("b", 1), _waiting("c", 2))
    assert ids_of(queue) == ["b", "c", "a"]
    found = [queue.at(place) for place in range(4)]
    assert ids_of(one for one in found if one is not None) == ["b", "c", "a"]
    assert found[3] is None


def test_blocked_ones_keep_their_place_and_are_not_offered():
    queue = _queue(
        _waiting("a", 1), _waiting("b", 2, blocked=True), _waiting("c", 3), _waiting("d", 0, blocked=True)
    )
    assert ids_of(queue) == ["d", "a", "b", "c"]
    assert (len(queue), queue.num_ready, queue.num_blocked) == (4, 2, 2)
    first, second = queue.at(0), queue.at(1)
    assert first is not None and second is not None
    assert ids_of([first, second]) == ["a", "c"]
    assert queue.at(2) is None
    blocked = queue.blocked("b")
    assert blocked is not None and blocked.request_id == "b"
    assert queue.blocked("a") is None


def test_anyone_can_leave_from_anywhere():
    first, second, third = (_waiting(name, place) for place, name in enumerate("abc"))
    blocked = _waiting("d", 9, blocked=True)
    queue = _queue(first, second, third, blocked)
    queue.remove(second)
    assert ids_of(queue) == ["a", "c", "d"]
    queue.remove(blocked)
    assert (queue.num_ready, queue.num_blocked, queue.blocked("d")) == (2, 0, None)
    queue.remove(third)
    queue.remove(first)
    assert len(queue) == 0


def test_tokens_still_to_compute_are_summed_over_waiting_and_blocked():
    waiting, blocked = _waiting("a", 1, 5), _waiting("b", 2, 7, blocked=True)
    queue = _queue(waiting, blocked)
    assert queue.num_uncached_tokens == 12
    queue.remove(waiting)
    assert queue.num_uncached_tokens == 7
    queue.remove(blocked)
    assert queue.num_uncached_tokens == 0
