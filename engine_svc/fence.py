"""Which coordinator an engine obeys, where two believe to be the one. Knows no stream and no command."""

from __future__ import annotations

from service_kit.clock import Clock


class Fence:
    """The highest epoch of a coordinator that was heard of; one that is lower has to wait for a lease."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._epoch = 0
        self._lease_s = 0.0
        self._heard_at = 0.0

    def hear(self, epoch: int, lease_s: float) -> bool:
        """A coordinator of that epoch speaks, and grants such a lease. Whether it is to be obeyed."""
        now = self._clock.now()
        if epoch < self.least:
            return False
        self._epoch, self._lease_s, self._heard_at = epoch, lease_s, now
        return True

    @property
    def epoch(self) -> int:
        """The epoch that was obeyed last; 0: none was heard yet."""
        return self._epoch

    @property
    def least(self) -> int:
        """The least epoch that is obeyed now; 0: any."""
        return self._epoch if self._clock.now() < self._heard_at + self._lease_s else 0
