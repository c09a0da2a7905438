"""Deadlines of requests: which are over, and that nothing is kept of what has ended."""

from __future__ import annotations

from engine_svc.loop.requests import Deadlines


def test_each_expired_request_is_returned_once_and_in_order():
    running = dict.fromkeys("abcd")
    deadlines = Deadlines(running)
    for at, name in ((3.0, "a"), (1.0, "b"), (2.0, "c"), (9.0, "d")):
        deadlines.note(at, name)
    assert deadlines.left_s(0.5) == 0.5
    del running["c"]
    assert list(deadlines.expired(3.0)) == ["b", "a"]
    assert list(deadlines.expired(3.0)) == []
    assert deadlines.left_s(10.0) == 0.0


def test_an_id_that_is_used_again_has_the_deadline_of_its_present_life_alone():
    deadlines = Deadlines(dict.fromkeys("ab"))
    deadlines.note(1.0, "a")
    deadlines.note(None, "a")
    deadlines.note(1.0, "b")
    deadlines.note(5.0, "b")
    assert list(deadlines.expired(2.0)) == []
    deadlines.note(5.0, "b")
    assert list(deadlines.expired(6.0)) == ["b"]


def test_nothing_is_kept_of_requests_that_have_ended():
    running: dict[str, None] = {}
    deadlines = Deadlines(running)
    for number in range(1000):
        running[str(number)] = None
        deadlines.note(float(number), str(number))
        del running[str(number)]
    assert len(vars(deadlines)["_entries"]) <= 2
    for number in range(100):
        running[str(number)] = None
        deadlines.note(5.0, str(number))
    running.clear()
    assert list(deadlines.expired(1000.0)) == []
    assert not vars(deadlines)["_deadline_of"]
