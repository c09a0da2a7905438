"""Loading as people see it."""

from __future__ import annotations

import io
import logging

from engine_svc.core.facts import LoadProgress
from engine_svc.process.load_display import LoadDisplay
from triptych_kit.clock import FakeClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_every_tenth_is_logged(caplog):
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    display = LoadDisplay(io.StringIO(), clock)
    for percent in range(101):
        clock.advance(1.0)
        display.show(LoadProgress("weights", percent, 100))
    assert [record.percent for record in caplog.records] == list(range(10, 101, 10))


def test_a_model_that_is_there_at_once_is_not_talked_about(caplog):
    caplog.set_level(logging.INFO)
    display = LoadDisplay(io.StringIO(), FakeClock())
    for percent in range(101):
        display.show(LoadProgress("weights", percent, 100))
    assert caplog.records == []


def test_a_terminal_gets_a_bar_for_each_phase():
    terminal = Terminal()
    display = LoadDisplay(terminal, FakeClock())
    for phase in ("weights", "warm-up"):
        display.show(LoadProgress(phase, 1, 2))
    display.close()
    assert "weights" in terminal.getvalue()
    assert "warm-up" in terminal.getvalue()
    assert "50" in terminal.getvalue()


def test_one_bar_shows_the_phases_one_after_another():
    terminal = Terminal()
    display = LoadDisplay(terminal, FakeClock())
    display.show(LoadProgress("weights", 1, 2))
    shown = len(terminal.getvalue())
    display.show(LoadProgress("warm-up", 1, 2))
    display.close()
    assert "weights" not in terminal.getvalue()[shown:]
