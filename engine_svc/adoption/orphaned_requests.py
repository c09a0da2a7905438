"""Requests that another session may adopt after theirs is lost, and the grace period of each.

Runs on the event loop. Knows no stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from triptych.engine.v1 import add_pb2, engine_pb2
from triptych_kit.errors import FailedPrecondition, NotFound
from triptych_kit.rules import rules_of

_MAX_GRACE_S = rules_of(add_pb2.AddEntry, "orphan_grace_ms").lowered_to / 1000
_MAX_REQUESTS = 16_384


class Timer(Protocol):
    def cancel(self) -> None: ...


@dataclass(slots=True, eq=False)
class OrphanedRequest:
    """A request with all that its next frontend needs. `wire_id` is from its ADD, `request_id` is ours."""

    wire_id: str
    request_id: str
    attempt: int
    group_id: str  # the sampling group it belongs to; its own wire_id if it has none
    prompt_token_ids: bytes
    resume_state: bytes
    stop_token_ids: frozenset[int]
    grace_s: float
    owner: int  # number of the session that has it
    fleet: str = ""  # the tenant of the frontend that sent it: only frontends of the same may adopt it
    is_lost: bool = False  # its session has no stream
    has_ended: bool = False
    timer: Timer | None = field(default=None, repr=False)

    def adopted(self, handle: int) -> engine_pb2.Adopted:
        """The answer to the session that has adopted it."""
        return engine_pb2.Adopted(
            handle=handle,
            attempt=self.attempt,
            prompt_token_ids=self.prompt_token_ids,
            resume_state=self.resume_state,
        )


def _call_later(delay_s: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, call)


class OrphanedRequests:
    """Orphaned requests by `wire_id`. One that no session has for its grace period is given up.

    give_up: ends a request in the engine and drops its outputs.  call_later: that of the event loop.
    """

    def __init__(
        self,
        *,
        give_up: Callable[[str], object],
        call_later: Callable[[float, Callable[[], None]], Timer] = _call_later,
        max_requests: int = _MAX_REQUESTS,
    ) -> None:
        self._give_up = give_up
        self._call_later = call_later
        self._max_requests = max_requests
        self._by_id: dict[str, OrphanedRequest] = {}
        self._groups: dict[str, list[OrphanedRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, orphan: OrphanedRequest | None) -> bool:
        """Whether it is still kept; another one may have its `wire_id` by now."""
        return orphan is not None and self._by_id.get(orphan.wire_id) is orphan

    def can_keep(self, entry: add_pb2.AddEntry) -> bool:
        """Whether an ADD asks for this with a `resume_state`, its id is free and there is room."""
        has_room = len(self._by_id) < self._max_requests
        return bool(entry.resume_state) and has_room and entry.request_id not in self._by_id

    def keep(
        self,
        entry: add_pb2.AddEntry,
        request_id: str,
        *,
        owner: int,
        default_grace_s: float,
        fleet: str = "",
    ) -> OrphanedRequest:
        """Keep the request of an ADD, which session `owner` has. Not without `can_keep`."""
        grace_s = entry.orphan_grace_ms / 1000 if entry.HasField("orphan_grace_ms") else default_grace_s
        orphan = OrphanedRequest(
            wire_id=entry.request_id,
            request_id=request_id,
            attempt=entry.attempt,
            group_id=entry.group_id or entry.request_id,
            prompt_token_ids=entry.prompt_token_ids,
            resume_state=entry.resume_state,
            stop_token_ids=frozenset(entry.sampling.stop_token_ids),
            grace_s=min(grace_s, _MAX_GRACE_S),
            owner=owner,
            fleet=fleet,
        )
        self._by_id[orphan.wire_id] = orphan
        self._groups.setdefault(orphan.group_id, []).append(orphan)
        return orphan

    def adopt(self, wire_id: str, owner: int, *, fleet: str = "") -> OrphanedRequest:
        """Give a lost request to session `owner`. Raises NotFound; FailedPrecondition if it is not lost."""
        orphan = self._by_id.get(wire_id)
        # One of another fleet is not found, so that nothing can be learned about it.
        if orphan is None or orphan.fleet != fleet:
            raise NotFound(
                "no request of this id is kept: it never was, or its grace is over",
                resource_type="request",
                resource_name=wire_id,
            )
        if not orphan.is_lost:
            raise FailedPrecondition("the session that has the request lives", reason="SESSION_LIVES")
        orphan.owner = owner
        self._mark_found(orphan)
        return orphan

    def mark_lost(self, owner: int, *, at_least_s: float = 0.0) -> None:
        """The stream of session `owner` broke: its requests can be adopted during their grace period.

        at_least_s: how long the session may be resumed; no request of it is given up before that.
        """
        for orphan in self._owned_by(owner):
            orphan.is_lost = True
            self._start_grace(orphan, at_least_s)

    def mark_found(self, owner: int) -> None:
        """Session `owner` was resumed."""
        for orphan in self._owned_by(owner):
            self._mark_found(orphan)

    def end(self, orphan: OrphanedRequest) -> None:
        """Record that a request has finished. The grace of a group starts with the last one that finishes:
        until then a frontend may still have to fetch the results."""
        orphan.has_ended = True
        self._end_group(orphan.group_id)

    def drop(self, owner: int) -> None:
        """Give up all requests of a session that ended on purpose, without a grace period."""
        for orphan in self._owned_by(owner):
            self.discard(orphan)

    def discard(self, orphan: OrphanedRequest) -> None:
        """Give up a request, if it is still kept, so that nothing adopts it."""
        if orphan not in self:
            return
        _stop(orphan)
        del self._by_id[orphan.wire_id]
        group = self._groups[orphan.group_id]
        group.remove(orphan)
        if not group:
            del self._groups[orphan.group_id]
        self._give_up(orphan.request_id)
        self._end_group(orphan.group_id)

    def _owned_by(self, owner: int) -> Iterable[OrphanedRequest]:
        return [orphan for orphan in self._by_id.values() if orphan.owner == owner]

    def _mark_found(self, orphan: OrphanedRequest) -> None:
        orphan.is_lost = False
        if not self._is_group_over(orphan.group_id):
            _stop(orphan)

    def _is_group_over(self, group_id: str) -> bool:
        return all(one.has_ended for one in self._groups.get(group_id, ()))

    def _end_group(self, group_id: str) -> None:
        """Start the grace period of the remaining requests of a group if all have finished."""
        if self._is_group_over(group_id):
            for one in self._groups.get(group_id, ()):
                self._start_grace(one)

    def _start_grace(self, orphan: OrphanedRequest, at_least_s: float = 0.0) -> None:
        if orphan.timer is None:
            grace_s = max(orphan.grace_s, at_least_s)
            orphan.timer = self._call_later(grace_s, lambda: self.discard(orphan))


def _stop(orphan: OrphanedRequest) -> None:
    if orphan.timer is not None:
        orphan.timer.cancel()
        orphan.timer = None
