"""How often engines are to report, so that all of them together do not flood the coordinator. Pure."""

from __future__ import annotations

MAX_REPORTS_PER_S = 2000
MIN_INTERVAL_S = 0.1  # what engines do by themselves
# So much room is left at each change, so that the next engine that comes or goes does not change it again.
_ROOM = 1.25


class ReportInterval:
    """The interval for as many engines as there are. max_s: what it is never longer than, for the leases."""

    def __init__(self, *, max_s: float) -> None:
        self.seconds = MIN_INTERVAL_S
        self._max_s = max(max_s, MIN_INTERVAL_S)

    @property
    def is_default(self) -> bool:
        """Whether it is what engines do without being told."""
        return self.seconds == MIN_INTERVAL_S

    def follow(self, num_engines: int) -> bool:
        """Note how many engines there are; returns whether they have to be told another interval."""
        least_s = num_engines / MAX_REPORTS_PER_S
        if least_s <= self.seconds < _ROOM * _ROOM * least_s:
            return False
        before, self.seconds = self.seconds, min(max(_ROOM * least_s, MIN_INTERVAL_S), self._max_s)
        return self.seconds != before
