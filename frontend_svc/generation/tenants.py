"""Limits of each tenant in this process: requests open at once, requests and tokens a minute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from triptych_kit.clock import Clock
from triptych_kit.errors import ResourceExhausted
from triptych_kit.security.identity import Identity

_MINUTE_S = 60.0
_REASON = "TENANT_LIMIT"
# When an open request may have ended, which is not known.
_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit of a minute, what is left of it now, and the seconds until all of it is."""

    limit: int
    left: int
    reset_s: float


class Allowance:
    """An amount that may be used in a minute, refilled steadily."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def limit_to(self, per_minute: int, now: float) -> None:
        """Have another limit from now on, of which as much is used as of the one before."""
        self._refill(now)
        self._left += per_minute - self._per_minute
        self._per_minute = per_minute

    def wait_s(self, amount: int, now: float) -> float:
        """How long until `amount` is left; 0 if it is now, infinite if it never is."""
        self._refill(now)
        if amount > self._per_minute:
            return math.inf
        return max(0.0, amount - self._left) * _MINUTE_S / self._per_minute

    def take(self, amount: int, now: float) -> None:
        """Use some; a negative amount is given back."""
        self._refill(now)
        self._left = min(float(self._per_minute), self._left - amount)

    def rate(self, now: float) -> Rate:
        self._refill(now)
        used = self._per_minute - self._left
        return Rate(self._per_minute, max(0, math.floor(self._left)), used * _MINUTE_S / self._per_minute)

    def _refill(self, now: float) -> None:
        gained = (now - self._at) * self._per_minute / _MINUTE_S
        self._left, self._at = min(float(self._per_minute), self._left + gained), now


@dataclass(slots=True)
class _Usage:
    """Present usage of a tenant."""

    num_open: int = 0
    requests: Allowance | None = None
    tokens: Allowance | None = None


@dataclass(slots=True)
class Reservation:
    """The tokens of one open request that count against its tenant."""

    tenant: str
    limit: int | None
    _tokens: Allowance | None
    _clock: Clock
    _reserved: int = field(default=0)

    def reserve(self, num_tokens: int) -> None:
        """Count the prompt and the longest output. Raises ResourceExhausted if that exceeds the limit."""
        if self._tokens is None:
            return
        now = self._clock.now()
        wait_s = self._tokens.wait_s(num_tokens, now)
        if wait_s:
            raise _refusal(
                f"tenant {self.tenant or '(none)'} may use {self.limit} tokens a minute, and this request "
                f"up to {num_tokens}",
                wait_s,
            )
        self._tokens.take(num_tokens, now)
        self._reserved = num_tokens

    def settle(self, num_tokens: int) -> None:
        """Give back what was reserved and not used. Later calls have no effect."""
        if self._tokens is not None:
            self._tokens.take(min(num_tokens, self._reserved) - self._reserved, self._clock.now())
            self._reserved = 0


class Tenants:
    """Counts the requests of tenants that have limits. Knows a tenant from its first request on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._usages: dict[str, _Usage] = {}

    def rates(self, identity: Identity) -> dict[str, Rate]:
        """The rates that the tenant of a caller has a limit of: of requests, of tokens."""
        usage, limits, now = self._usages.get(identity.tenant, _Usage()), identity.limits, self._clock.now()
        rates = {}
        for name, limit, allowance in (
            ("requests", limits.requests_per_minute, usage.requests),
            ("tokens", limits.tokens_per_minute, usage.tokens),
        ):
            if limit is not None:
                rates[name] = Rate(limit, limit, 0.0) if allowance is None else allowance.rate(now)
        return rates

    @contextmanager
    def admitted(self, identity: Identity) -> Iterator[Reservation]:
        """Count a request of `identity` inside of the block. Raises ResourceExhausted over a limit."""
        limits, now = identity.limits, self._clock.now()
        usage = self._usages.setdefault(identity.tenant, _Usage())
        whose = f"tenant {identity.tenant or '(none)'}"
        if limits.max_requests is not None and usage.num_open >= limits.max_requests:
            text = f"{whose} has {usage.num_open} open requests, the limit is {limits.max_requests}"
            raise ResourceExhausted(text, reason=_REASON, retry_after_ms=_RETRY_MS)
        if limits.requests_per_minute is not None:
            usage.requests = usage.requests or Allowance(limits.requests_per_minute, now)
            usage.requests.limit_to(limits.requests_per_minute, now)
            wait_s = usage.requests.wait_s(1, now)
            if wait_s:
                raise _refusal(f"{whose} may send {limits.requests_per_minute} requests a minute", wait_s)
            usage.requests.take(1, now)
        tokens = None
        if limits.tokens_per_minute is not None:
            tokens = usage.tokens = usage.tokens or Allowance(limits.tokens_per_minute, now)
            tokens.limit_to(limits.tokens_per_minute, now)
        usage.num_open += 1
        reservation = Reservation(identity.tenant, limits.tokens_per_minute, tokens, self._clock)
        try:
            yield reservation
        finally:
            usage.num_open -= 1
            # Of a request that ended before anything of it was sent.
            reservation.settle(0)


def _refusal(text: str, wait_s: float) -> ResourceExhausted:
    retry_after_ms = None if math.isinf(wait_s) else math.ceil(wait_s * 1000)
    return ResourceExhausted(text, reason=_REASON, retry_after_ms=retry_after_ms)
