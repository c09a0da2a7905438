"""How long each rank has given no sign of life, and when that is too long. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Silence:
    """Adds up silence, look by look. That of busy ranks is forgotten when they are no longer busy."""

    def __init__(self, num_ranks: int, *, busy_limit_s: float, limit_s: float) -> None:
        self._busy_limit_s = busy_limit_s
        self._limit_s = limit_s
        self._beats = [0] * num_ranks
        self._silent_s = [0.0] * num_ranks
        self._were_busy = True

    def look(self, beats: Sequence[int], elapsed_s: float, *, may_be_busy: bool) -> tuple[int, float] | None:
        """The first rank that has been silent for too long, and the limit; `beats` are the signs so far."""
        if self._were_busy and not may_be_busy:
            self._silent_s = [0.0] * len(self._silent_s)
        self._were_busy = may_be_busy
        limit_s = self._busy_limit_s if may_be_busy else self._limit_s
        for rank, count in enumerate(beats):
            is_alive = count != self._beats[rank]
            self._silent_s[rank] = 0.0 if is_alive else self._silent_s[rank] + elapsed_s
            self._beats[rank] = count
        for rank, silent_s in enumerate(self._silent_s):
            if silent_s >= limit_s:
                return rank, limit_s
        return None
