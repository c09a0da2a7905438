"""Begins calls of several accounts in fair turns, on one event loop. Knows no listener."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from triptych_kit.clock import Clock
from triptych_kit.shares import FairQueue

# An account is present until it has sent nothing for this long.
_PRESENT_S = 10.0
_MAX_ACCOUNTS = 1024
# Calls that have not arrived yet come first, as it is not known whose they are. gRPC passes on one in two
# iterations of the loop.
_NUM_WITHOUT_ARRIVALS = 3
_MAX_SKIPPED = 8
_MAX_SKIPPED_S = 0.002
# For each so many calls that wait one more begins in an iteration, so that no rate of arrivals outruns them.
_CALLS_PER_BEGIN = 256


@dataclass(slots=True, eq=False)
class _Call:
    """A call that waits; cancelled, it is passed over."""

    account: str
    begins: asyncio.Future[None]


class CallTurns:
    """Turns of calls between the check of their key and the work for them: read, parse, tokenize, send.

    While several accounts are present, one call begins in an iteration of the event loop, and more where many
    wait, in the order of a `FairQueue`: a thousand calls of one account do not keep another's waiting. An
    account alone never waits.
    Calls that wait count towards the limits of open connections and calls.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: FairQueue[_Call] = FairQueue()
        self._seen_at: dict[str, float] = {}  # the account that was seen last is the last
        self._is_running = False  # `_turn`, in each iteration
        self._num_without_arrivals = 0  # iterations since a call arrived
        self._num_skipped = 0  # iterations since a call began, in which one could have
        self._begun_at = 0.0  # when one began

    async def begin(self, account: str, weight: int) -> None:
        """Wait for the turn of a call of `account`."""
        self._see(account, self._clock.now())
        if len(self._seen_at) == 1 and not self._queue:
            return
        loop = asyncio.get_running_loop()
        self._num_without_arrivals = 0
        if not self._is_running:
            self._is_running, self._num_skipped, self._begun_at = True, 0, self._clock.now()
            loop.call_soon(self._turn)
            return
        call = _Call(account, loop.create_future())
        self._queue.add(call, account, weight)
        await call.begins

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._queue)

    def _turn(self) -> None:
        self._num_without_arrivals += 1
        may_arrive = self._num_without_arrivals < _NUM_WITHOUT_ARRIVALS
        if not (self._queue or may_arrive):
            self._is_running = False
            return
        asyncio.get_running_loop().call_soon(self._turn)
        if may_arrive and self._may_skip():
            self._num_skipped += 1
            return
        self._num_skipped, self._begun_at = 0, self._clock.now()
        num_left = 1 + len(self._queue) // _CALLS_PER_BEGIN
        while num_left and (call := self._queue.take()) is not None:
            if not call.begins.done():
                self._queue.charge(call.account, 1.0)
                call.begins.set_result(None)
                num_left -= 1

    def _may_skip(self) -> bool:
        is_early = self._clock.now() - self._begun_at < _MAX_SKIPPED_S
        return is_early and self._num_skipped < _MAX_SKIPPED and len(self._queue) < _CALLS_PER_BEGIN

    def _see(self, account: str, now: float) -> None:
        self._seen_at.pop(account, None)
        self._seen_at[account] = now
        oldest = next(iter(self._seen_at))
        while len(self._seen_at) > _MAX_ACCOUNTS or self._seen_at[oldest] < now - _PRESENT_S:
            del self._seen_at[oldest]
            oldest = next(iter(self._seen_at))
