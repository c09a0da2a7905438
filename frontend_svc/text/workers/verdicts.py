"""What text workers found of constraints, kept for the requests that have the same one. Knows no workers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from frontend_svc.text.constraint import (
    INVALID,
    NOT_ENFORCED,
    TOO_COMPLEX,
    AskedConstraint,
    CheckedConstraint,
)
from triptych_kit.errors import InvalidArgument, ServiceError
from triptych_kit.telemetry.metrics import Counts, Distribution

_MAX_TENANT_BYTES = 4 * 1024 * 1024
_MAX_BYTES = 32 * 1024 * 1024
_VERDICT_BYTES = 512  # beside its text
CHECK_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OUTCOMES = {
    INVALID: "invalid",
    NOT_ENFORCED: "not_enforced",
    TOO_COMPLEX: "too_complex",
    "TEXT_TIME_LIMIT": "too_complex",
}

Check: TypeAlias = Callable[[AskedConstraint, str], Coroutine[Any, Any, CheckedConstraint]]
# A refusal is its message and reason.
Verdict: TypeAlias = "CheckedConstraint | tuple[str, str]"


class Verdicts:
    """Remembers checks by digest, of each tenant the latest ones, and makes equal ones at a time once.

    tenant: whose constraints can drop one another, and no others. A check that took too long or too much
    says nothing about its constraint and is not kept.
    """

    def __init__(
        self, check: Check, *, max_tenant_bytes: int = _MAX_TENANT_BYTES, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._check = check
        self._max_tenant_bytes = max_tenant_bytes
        self._max_bytes = max_bytes
        # Least recently used first, tenants and the verdicts of each.
        self._tenants: OrderedDict[str, OrderedDict[bytes, Verdict]] = OrderedDict()
        self._tenant_bytes: dict[str, int] = {}
        self._num_bytes = 0
        self._running: dict[tuple[str, bytes], asyncio.Task[CheckedConstraint]] = {}
        outcomes = ("accepted", *dict.fromkeys(_OUTCOMES.values()), "failed")
        self.outcomes = Counts({(outcome,): 0 for outcome in outcomes})
        self.num_known = 0  # requests whose verdict was known or being made
        self.check_s = Distribution(CHECK_BUCKETS)  # with the time in the queue

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    async def find(self, tenant: str, asked: AskedConstraint, field: str) -> CheckedConstraint:
        """The verdict, checked if it is not known. Raises InvalidArgument that names `field`."""
        key = tenant, hashlib.sha256(asked.to_json()).digest()
        found = self._known(*key)
        running = self._running.get(key)
        self.num_known += found is not None or running is not None
        if isinstance(found, CheckedConstraint):
            return found
        if found is not None:
            message, reason = found
            raise InvalidArgument(message, field=field, reason=reason)
        if running is None:
            running = self._running[key] = asyncio.create_task(self._checked(key, asked, field))
            running.add_done_callback(lambda task: self._ended(key, task))
        # The check goes on for others where one of the requests that wait is cancelled.
        try:
            return await asyncio.shield(running)
        except InvalidArgument as error:
            # Of this request alone: callers name what they refuse in it.
            raise InvalidArgument(error.message, field=field, reason=error.reason) from error

    async def _checked(self, key: tuple[str, bytes], asked: AskedConstraint, field: str) -> CheckedConstraint:
        began_at, outcome = time.monotonic(), "failed"
        try:
            checked = await self._check(asked, field)
            outcome = "accepted"
        except ServiceError as error:
            outcome = _OUTCOMES.get("" if error.reason is None else error.reason, outcome)
            if isinstance(error, InvalidArgument) and error.reason in (INVALID, NOT_ENFORCED):
                self._keep(*key, (error.message, error.reason))
            raise
        finally:
            self.outcomes.add(outcome)
            self.check_s.observe(time.monotonic() - began_at)
        self._keep(*key, checked)
        return checked

    def _ended(self, key: tuple[str, bytes], task: asyncio.Task[CheckedConstraint]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # without a log line if no request waits any more

    def _known(self, tenant: str, digest: bytes) -> Verdict | None:
        verdicts = self._tenants.get(tenant)
        if verdicts is None or digest not in verdicts:
            return None
        self._tenants.move_to_end(tenant)
        verdicts.move_to_end(digest)
        return verdicts[digest]

    def _keep(self, tenant: str, digest: bytes, verdict: Verdict) -> None:
        self._tenants.setdefault(tenant, OrderedDict())[digest] = verdict
        self._tenants.move_to_end(tenant)
        self._add_bytes(tenant, _size(verdict))
        while self._tenant_bytes.get(tenant, 0) > self._max_tenant_bytes:
            self._forget_one(tenant)
        while self._num_bytes > self._max_bytes:
            self._forget_one(next(iter(self._tenants)))

    def _forget_one(self, tenant: str) -> None:
        verdicts = self._tenants[tenant]
        self._add_bytes(tenant, -_size(verdicts.popitem(last=False)[1]))
        if not verdicts:
            del self._tenants[tenant]

    def _add_bytes(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + num_bytes
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]


def _size(verdict: Verdict) -> int:
    text = verdict.text if isinstance(verdict, CheckedConstraint) else verdict[0]
    return _VERDICT_BYTES + len(text)
