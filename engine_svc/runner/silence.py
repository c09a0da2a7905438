"""How long each rank has given no sign of life, and when that is too long. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Silence:
    """Adds up silence, look by look. What was before all were ready is forgotten when they are."""

    def __init__(self, num_ranks: int, *, start_limit_s: float, limit_s: float) -> None:
        self._start_limit_s = start_limit_s
        self._limit_s = limit_s
        self._beats = [0] * num_ranks
        self._silent_s = [0.0] * num_ranks
        self._were_all_ready = False

    def look(
        self, beats: Sequence[int], elapsed_s: float, *, are_all_ready: bool
    ) -> tuple[int, float] | None:
        """The first rank that has been silent for too long, and the limit; `beats` are the signs so far."""
        if are_all_ready and not self._were_all_ready:
            # Imports may have kept a rank busy for longer than a ready one may be silent.
            self._were_all_ready = True
            self._silent_s = [0.0] * len(self._silent_s)
        limit_s = self._limit_s if are_all_ready else self._start_limit_s
        for rank, count in enumerate(beats):
            is_alive = count != self._beats[rank]
            self._silent_s[rank] = 0.0 if is_alive else self._silent_s[rank] + elapsed_s
            self._beats[rank] = count
        for rank, silent_s in enumerate(self._silent_s):
            if silent_s >= limit_s:
                return rank, limit_s
        return None
