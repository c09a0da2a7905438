"""How soon a connection is tried again."""

from __future__ import annotations

from triptych_kit.backoff import Backoff
from triptych_kit.clock import FakeClock


def assert_within(delays: list[float], longest: list[float]) -> None:
    assert all(0.5 * most <= one <= most for one, most in zip(delays, longest, strict=True)), delays


def test_the_delay_doubles_up_to_its_limit():
    backoff = Backoff(FakeClock(), max_s=1.0)
    assert_within([backoff.next_s() for _ in range(6)], [0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_a_connection_starts_it_anew():
    backoff = Backoff(FakeClock())
    for _ in range(6):
        backoff.next_s()
    backoff.note_connected()
    assert_within([backoff.next_s(), backoff.next_s()], [0.1, 0.2])


def test_a_connection_that_did_not_last_does_not_start_it_anew():
    clock = FakeClock()
    backoff = Backoff(clock, steady_s=1.0)
    delays = []
    for _ in range(6):
        backoff.note_connected()
        clock.advance(0.9)
        delays.append(backoff.next_s())
    assert_within(delays, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_a_connection_lasts_from_its_first_note_on():
    clock = FakeClock()
    backoff = Backoff(clock, steady_s=1.0)
    for _ in range(6):
        backoff.next_s()
    backoff.note_connected()
    clock.advance(1.0)
    backoff.note_connected()
    assert_within([backoff.next_s()], [0.1])


def test_time_without_a_connection_does_not_count():
    clock = FakeClock()
    backoff = Backoff(clock, steady_s=1.0)
    delays = []
    for _ in range(6):
        clock.advance(60.0)
        delays.append(backoff.next_s())
    assert_within(delays, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
