"""Calls of accounts that begin in turns, counted in iterations of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from triptych_kit.call_turns import CallTurns
from triptych_kit.clock import FakeClock


class Crowd:
    """Accounts whose calls wait to begin, and the order in which they do."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.turns = CallTurns(self.clock)
        self.begun: list[str] = []
        self.calls: list[asyncio.Task[None]] = []

    def add(self, account: str, number: int, weight: int = 1) -> None:
        self.calls += [asyncio.ensure_future(self._call(account, weight)) for _ in range(number)]

    async def _call(self, account: str, weight: int) -> None:
        await self.turns.begin(account, weight)
        self.begun.append(account)

    async def iterations_until(self, account: str) -> int:
        """Iterations of the event loop until the next call of `account` has begun."""
        before, number = self.begun.count(account), 0
        while self.begun.count(account) == before:
            await asyncio.sleep(0)
            number += 1
        return number


async def test_calls_of_one_account_alone_do_not_wait():
    crowd = Crowd()
    crowd.add("a", 100)
    await asyncio.sleep(0)
    assert len(crowd.begun) == 100


async def test_a_call_does_not_wait_for_a_thousand_of_another_account():
    crowd = Crowd()
    crowd.add("b", 1)
    crowd.add("crowd", 1000)
    await crowd.iterations_until("crowd")
    crowd.add("b", 1)
    # The iterations for further arrivals, and one each in which it comes, has its turn, and begins.
    assert await crowd.iterations_until("b") <= 12
    assert len(crowd.begun) < 40
    await asyncio.gather(*crowd.calls)


async def test_one_call_begins_in_an_iteration_while_accounts_compete():
    crowd = Crowd()
    crowd.add("other", 1)
    await asyncio.sleep(0)
    crowd.add("a", 50)
    crowd.add("b", 50)
    while (num_before := len(crowd.begun)) < 101:
        await asyncio.sleep(0)
        assert len(crowd.begun) <= num_before + 1


@pytest.mark.parametrize("weight", [1, 3])
async def test_turns_are_by_weight(weight: int):
    crowd = Crowd()
    crowd.add("other", 1)
    await asyncio.sleep(0)
    crowd.add("a", 100)
    crowd.add("b", 100, weight=weight)
    for _ in range(100):
        await asyncio.sleep(0)
        if len(crowd.begun) > 80:
            break
    assert Counter(crowd.begun[1:])["b"] == pytest.approx(80 * weight / (1 + weight), abs=2)
    await asyncio.gather(*crowd.calls)


async def test_calls_that_arrive_come_before_calls_that_begin():
    crowd = Crowd()
    crowd.add("b", 1)
    await asyncio.sleep(0)
    for _ in range(80):
        crowd.add("a", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    # As gRPC does: one in two iterations.
    assert len(crowd.begun) < 25
    await asyncio.gather(*crowd.calls)


@pytest.mark.parametrize(("per_iteration", "step_s"), [(0.5, 0.005), (1, 0.0), (3, 0.0)])
async def test_calls_that_arrive_at_any_rate_wait_for_a_limited_time(per_iteration: float, step_s: float):
    crowd = Crowd()
    crowd.add("b", 1)
    most = arrived = 0
    for iteration in range(4000):
        while arrived < iteration * per_iteration:
            arrived += 1
            crowd.add("ab"[arrived % 2], 1)
        crowd.clock.advance(step_s)
        await asyncio.sleep(0)
        most = max(most, len(crowd.turns))
    assert most <= (10 if per_iteration < 1 else 256 * per_iteration)
    await asyncio.gather(*crowd.calls)


async def test_a_cancelled_call_is_passed_over():
    crowd = Crowd()
    crowd.add("b", 1)
    crowd.add("a", 40)
    await asyncio.sleep(0)
    for call in crowd.calls[10:]:
        call.cancel()
    await asyncio.gather(*crowd.calls, return_exceptions=True)
    assert len(crowd.begun) == 10
    await asyncio.sleep(0)
    assert not len(crowd.turns)


async def test_an_account_that_is_gone_for_long_does_not_compete():
    crowd = Crowd()
    crowd.add("b", 1)
    await asyncio.sleep(0)
    crowd.clock.advance(11.0)
    crowd.add("a", 100)
    await asyncio.sleep(0)
    assert len(crowd.begun) == 101
