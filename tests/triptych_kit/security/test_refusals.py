"""Refused credentials: repeated ones are one line of the log, and wrong keys wait longer and longer."""

from __future__ import annotations

import asyncio
import logging

import pytest

from triptych_kit.clock import FakeClock
from triptych_kit.security.refusals import Refusals


def test_one_refusal_of_an_address_a_minute_is_logged():
    clock = FakeClock()
    refusals = Refusals(clock)
    assert [refusals.note("a", "UNKNOWN_KEY") for _ in range(4)] == [0, None, None, None]
    assert refusals.note("b", "NO_CREDENTIALS") == 0
    clock.advance(61)
    assert refusals.note("b", "NO_CREDENTIALS") == 0
    for _ in range(3):
        clock.advance(30)
        found = refusals.note("b", "NO_CREDENTIALS")
    assert found is None
    clock.advance(30)
    assert refusals.note("b", "NO_CREDENTIALS") == 1
    assert refusals.by_reason == {"UNKNOWN_KEY": 4, "NO_CREDENTIALS": 6}


def test_closed_connections_are_counted_and_logged_with_the_refusals_of_their_address(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    refusals = Refusals(clock)
    for _ in range(3):
        refusals.note_closed("a", "TOO_MANY_BYTES")
    assert refusals.note("a", "UNKNOWN_KEY") is None
    clock.advance(60)
    refusals.note_closed("a", "TOO_MANY_CONNECTIONS")
    assert refusals.closed_by_reason == {"TOO_MANY_BYTES": 3, "TOO_MANY_CONNECTIONS": 1}
    assert (refusals.num_refused, refusals.num_closed) == (1, 4)
    logged = [(record.client, record.reason, record.num_unlogged) for record in caplog.records]  # type: ignore[attr-defined]
    assert logged == [("a", "TOO_MANY_BYTES", 0), ("a", "TOO_MANY_CONNECTIONS", 3)]


def test_wrong_keys_of_an_address_wait_and_a_lack_of_one_does_not():
    clock = FakeClock()
    refusals = Refusals(clock)
    delays = []
    for _ in range(30):
        refusals.note("a", "UNKNOWN_KEY")
        delays.append(refusals.delay_s("a", "UNKNOWN_KEY"))
    assert delays[:12] == [0.0] * 10 + [0.05, 0.1] and delays[-1] == 0.5
    assert refusals.delay_s("a", "NO_CREDENTIALS") == refusals.delay_s("b", "UNKNOWN_KEY") == 0.0
    clock.advance(61)
    refusals.note("a", "UNKNOWN_KEY")
    assert refusals.delay_s("a", "UNKNOWN_KEY") == 0.0


async def test_answers_that_wait_are_limited():
    refusals = Refusals(FakeClock())
    for _ in range(30):
        refusals.note("a", "UNKNOWN_KEY")
    waiting = [asyncio.ensure_future(refusals.wait("a", "UNKNOWN_KEY")) for _ in range(256)]
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await refusals.wait("a", "UNKNOWN_KEY")
    assert not any(one.done() for one in waiting)
    for one in waiting:
        one.cancel()
