"""Refused credentials and closed connections by the address of the caller: wrong keys wait, one log line a
minute, and counts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass

from triptych_kit.clock import Clock, MonotonicClock

logger = logging.getLogger(__name__)

TOO_MANY_BYTES, TOO_MANY_CONNECTIONS = "TOO_MANY_BYTES", "TOO_MANY_CONNECTIONS"
NO_REQUEST = "NO_REQUEST"  # in time
_WINDOW_S = 60.0  # without a refusal, an address is a new one again
RESET = "RESET"  # the reason of a call that ended before it was answered
_NO_GUESS = ("NO_CREDENTIALS", RESET)  # reasons where there is no key that could be wrong
_NUM_AT_ONCE = 10  # wrong ones of an address in the window, which are answered at once
_FIRST_DELAY_S = 0.05  # doubled with each further one
_LONGEST_DELAY_S = 0.5
_MAX_WAITING = 256  # answers; later ones do not wait
_MAX_ADDRESSES = 10_000  # of which the oldest is forgotten


@dataclass(slots=True)
class _Refused:
    """The refusals of an address in its window."""

    num_wrong: int = 0
    newest_at: float = 0.0
    logged_at: float = float("-inf")
    num_unlogged: int = 0


class Refusals:
    """The refused credentials of a process, and the connections without any that it closed."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.by_reason: Counter[str] = Counter()
        self.closed_by_reason: Counter[str] = Counter()
        self.num_refused = 0  # calls and requests
        self.num_closed = 0  # connections
        self._clock = clock or MonotonicClock()
        self._refused: OrderedDict[str, _Refused] = OrderedDict()  # by address, the newest last
        self._num_waiting = 0

    def note(self, address: str, reason: str) -> int | None:
        """Count a refusal. Returns how many before it were not logged; None if it is not logged either."""
        self.by_reason[reason] += 1
        self.num_refused += 1
        refused = self._at(address)
        refused.num_wrong += reason not in _NO_GUESS
        return self._num_to_log(refused)

    def note_closed(self, address: str, reason: str) -> None:
        """Count a connection without a key that was closed. One of an address is logged each minute."""
        self.closed_by_reason[reason] += 1
        self.num_closed += 1
        if (num_unlogged := self._num_to_log(self._at(address))) is not None:
            fields = {"reason": reason, "client": address, "num_unlogged": num_unlogged}
            logger.info("connection closed", extra=fields)

    def _at(self, address: str) -> _Refused:
        now = self._clock.now()
        refused = self._refused.pop(address, None)
        if refused is None or now - refused.newest_at > _WINDOW_S:
            refused = _Refused()
        self._refused[address] = refused
        if len(self._refused) > _MAX_ADDRESSES:
            self._refused.popitem(last=False)
        refused.newest_at = now
        return refused

    def _num_to_log(self, refused: _Refused) -> int | None:
        if refused.newest_at - refused.logged_at < _WINDOW_S:
            refused.num_unlogged += 1
            return None
        num_unlogged, refused.num_unlogged, refused.logged_at = refused.num_unlogged, 0, refused.newest_at
        return num_unlogged

    def delay_s(self, address: str, reason: str) -> float:
        """How long the newest refusal of an address waits for its answer."""
        refused = self._refused.get(address)
        num_more = 0 if refused is None or reason in _NO_GUESS else refused.num_wrong - _NUM_AT_ONCE
        return 0.0 if num_more <= 0 else min(_FIRST_DELAY_S * 2.0 ** min(num_more - 1, 10), _LONGEST_DELAY_S)

    async def wait(self, address: str, reason: str) -> None:
        """Wait before the newest refusal of an address is answered, unless very many do."""
        delay_s = self.delay_s(address, reason)
        if not delay_s or self._num_waiting >= _MAX_WAITING:
            return
        self._num_waiting += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._num_waiting -= 1
