"""The pins of an engine: blocks that the cache retains until an instant, and how pins have ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine_svc.cache.kv_cache import KVCache
from engine_svc.features.pins.extras import PinInfo
from triptych_kit.telemetry.metrics import Metrics

_OUTCOMES = ("used", "expired", "given_up", "replaced", "released")


@dataclass(slots=True)
class Pin:
    """Blocks that are retained under a key until an instant on the engine's clock, for a job or an operator.

    num_tokens: of a job's context, which need not be computed again.
    """

    pin_id: str
    key: str
    until: float
    num_tokens: int
    num_blocks: int
    job_id: str
    tenant: str
    is_lease: bool = False

    def info(self, now: float) -> PinInfo:
        return PinInfo(self.pin_id, self.num_blocks, max(0.0, self.until - now), self.job_id, self.tenant)


class PinTable:
    """Pins by key. Those of jobs have theirs, so one each.

    is_awaited: whether a turn waits for the pin with a key, which then does not expire.
    """

    def __init__(self, metrics: Metrics, is_awaited: Callable[[str], bool]) -> None:
        self.kv_cache: KVCache | None = None  # known only after the scheduler was built
        self._is_awaited = is_awaited
        self._pins: dict[str, Pin] = {}
        self._num_added = 0
        self._due_at = math.inf  # when the next may expire
        self._outcomes = metrics.counts(
            "triptych_engine_pins_total",
            "Pins that ended, by outcome: used, expired, given_up, replaced or released.",
            labels=("outcome",),
            zeros=[(outcome,) for outcome in _OUTCOMES],
        )

    def __contains__(self, key: str) -> bool:
        return key in self._pins

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def get(self, key: str) -> Pin | None:
        return self._pins.get(key)

    @property
    def cache(self) -> KVCache:
        assert self.kv_cache is not None, "the engine is built"
        return self.kv_cache

    def new_id(self) -> str:
        self._num_added += 1
        return f"pin-{self._num_added}"

    def add(self, pin: Pin) -> None:
        """Its blocks are retained under its key already."""
        self._pins[pin.key] = pin
        self._due_at = min(self._due_at, pin.until)

    def move(self, pin: Pin, until: float) -> None:
        """Have a pin expire at another instant."""
        pin.until = until
        self._due_at = min(self._due_at, until)

    def release(self, key: str, outcome: str) -> int:
        """Returns how many blocks are in no pin any more."""
        del self._pins[key]
        self._outcomes.add(outcome)
        return self.cache.retained.release(key)

    def expire(self, now: float) -> float | None:
        """Release the pins whose time is over; returns when the next one's is, at the earliest."""
        if now >= self._due_at:
            self._due_at = math.inf
            for pin in self:
                if self._is_awaited(pin.key):
                    continue
                if pin.until <= now:
                    self.release(pin.key, "expired")
                else:
                    self._due_at = min(self._due_at, pin.until)
        return None if self._due_at == math.inf else self._due_at

    def note_unawaited(self) -> None:
        """A turn does not wait any more: the pin that was kept for it may be over."""
        self._due_at = -math.inf

    def give_up(self) -> bool:
        """Release the pin that expires first, those that are awaited last. False if there is none."""
        pin = min(self, key=lambda pin: (self._is_awaited(pin.key), pin.until), default=None)
        if pin is not None:
            self.release(pin.key, "given_up")
        return pin is not None

    def clear(self) -> None:
        """The cache has released them all."""
        self._outcomes.add("released", by=len(self._pins))
        self._pins.clear()
        self._due_at = math.inf
