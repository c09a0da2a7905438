"""When the next report of a session with the coordinator is due. Pure; time is an argument."""

from __future__ import annotations

_LEAST_INTERVAL_S = 0.1
# An engine without work has little to tell, and idle processes should stay idle.
_IDLE_INTERVAL_S = 0.5
_RENEW_AFTER_S = 1.0  # until the coordinator names its own


class ReportPace:
    """How often one session reports. Another session begins with another one: what it may do it is told."""

    def __init__(self) -> None:
        self._interval_s = _LEAST_INTERVAL_S
        self._renew_after_s = _RENEW_AFTER_S
        self._renew_at = float("-inf")

    def set_interval(self, interval_s: float) -> None:
        """Leave so much time between two reports of changes, but never so much that the lease ends."""
        self._interval_s = max(_LEAST_INTERVAL_S, interval_s)

    def set_renewal(self, renew_after_s: float) -> None:
        """Renew the lease so long after the last report at the latest."""
        self._renew_after_s = renew_after_s

    def must_renew(self, now: float) -> bool:
        """Whether a report is due even if it says nothing new."""
        return now >= self._renew_at

    def note_report(self, now: float) -> None:
        """A report is about to be sent."""
        self._renew_at = now + self._renew_after_s

    def wait_s(self, now: float, *, has_work: bool) -> float:
        """How long to wait before it is looked again whether there is something to report."""
        interval_s = self._interval_s if has_work else max(self._interval_s, _IDLE_INTERVAL_S)
        return max(0.0, min(interval_s, self._renew_at - now))
