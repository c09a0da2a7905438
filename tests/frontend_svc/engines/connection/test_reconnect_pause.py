"""How soon an engine is dialled again."""

from __future__ import annotations

from frontend_svc.engines.connection.connection import ReconnectPause
from frontend_svc.engines.connection.stream import StreamEnd
from service_kit.clock import FakeClock


def test_an_engine_that_breaks_as_soon_as_it_is_ready_is_dialled_ever_more_slowly():
    clock = FakeClock()
    pause = ReconnectPause(clock)
    pauses = []
    for _ in range(6):
        pause.note_ready()
        clock.advance(0.2)
        pauses.append(pause.after(StreamEnd.BROKEN))
    assert pauses[0] <= 0.2
    assert all(0.5 <= one <= 1.0 for one in pauses[3:])


def test_an_engine_that_was_in_use_for_a_while_is_dialled_at_once():
    clock = FakeClock()
    pause = ReconnectPause(clock)
    for _ in range(6):
        pause.after(StreamEnd.REFUSED)
    pause.note_ready()
    clock.advance(1.1)
    pause.note_ready()
    assert pause.after(StreamEnd.BROKEN) <= 0.1


def test_time_without_a_connection_is_no_use():
    clock = FakeClock()
    pause = ReconnectPause(clock)
    for _ in range(6):
        clock.advance(60.0)
        pause.after(StreamEnd.REFUSED)
    assert pause.after(StreamEnd.REFUSED) >= 0.5


def test_an_engine_of_another_version_is_asked_rarely():
    assert ReconnectPause(FakeClock()).after(StreamEnd.INCOMPATIBLE) >= 2.5
