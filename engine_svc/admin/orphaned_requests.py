"""Requests that another frontend may adopt after theirs is lost, and the grace period of each.

Runs on the event loop. Knows no stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

MAX_GRACE_S = 60.0
_MAX_ORPHANED_REQUESTS = 16_384


class Timer(Protocol):
    def cancel(self) -> None: ...


@dataclass(slots=True)
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
    is_lost: bool = False  # its session has no stream
    has_ended: bool = False
    timer: Timer | None = field(default=None, repr=False)


class OrphanedRequests:
    """Orphaned requests by `wire_id`. One that no session has for its grace period is given up.

    give_up: aborts a request in the engine and forgets its outputs.  call_later: that of the event loop.
    """

    def __init__(
        self,
        *,
        give_up: Callable[[str], None],
        call_later: Callable[[float, Callable[[], None]], Timer],
        max_requests: int = _MAX_ORPHANED_REQUESTS,
    ) -> None:
        self._give_up = give_up
        self._call_later = call_later
        self._max_requests = max_requests
        self._by_id: dict[str, OrphanedRequest] = {}
        self._groups: dict[str, list[OrphanedRequest]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, wire_id: str) -> bool:
        return wire_id in self._by_id

    def get(self, wire_id: str) -> OrphanedRequest | None:
        return self._by_id.get(wire_id)

    def has_room_for(self, wire_id: str) -> bool:
        """False if the limit is reached or this id is taken."""
        return len(self._by_id) < self._max_requests and wire_id not in self._by_id

    def add(self, orphan: OrphanedRequest) -> bool:
        """Keep a request. Returns False, and does not keep it, if there is no room."""
        if not self.has_room_for(orphan.wire_id):
            return False
        self._by_id[orphan.wire_id] = orphan
        self._groups.setdefault(orphan.group_id, []).append(orphan)
        return True

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
            orphan.is_lost = False
            if not self._is_group_over(orphan):
                _stop(orphan)

    def adopt(self, wire_id: str, owner: int) -> OrphanedRequest | None:
        """Give a lost request to session `owner`; None if no lost request has this id."""
        orphan = self._by_id.get(wire_id)
        if orphan is None or not orphan.is_lost:
            return None
        orphan.owner, orphan.is_lost = owner, False
        if not self._is_group_over(orphan):
            _stop(orphan)
        return orphan

    def end(self, wire_id: str) -> None:
        """Record that a request has finished. The grace of a group starts with the last one that finishes:
        until then a frontend may still have to fetch the results."""
        orphan = self._by_id.get(wire_id)
        if orphan is None:
            return
        orphan.has_ended = True
        self._end_group(orphan.group_id)

    def discard(self, wire_id: str) -> None:
        """Forget a request that has migrated under the same id, so that nothing adopts its old state here."""
        orphan = self._by_id.get(wire_id)
        if orphan is not None:
            self._forget(orphan)
            self._end_group(orphan.group_id)

    def drop(self, owner: int) -> None:
        """Give up all requests of a session that ended on purpose, without a grace period."""
        for orphan in list(self._owned_by(owner)):
            self._forget(orphan)

    def _owned_by(self, owner: int) -> Iterable[OrphanedRequest]:
        return [orphan for orphan in self._by_id.values() if orphan.owner == owner]

    def _is_group_over(self, orphan: OrphanedRequest) -> bool:
        return all(one.has_ended for one in self._groups[orphan.group_id])

    def _end_group(self, group_id: str) -> None:
        """Start the grace period of the remaining requests of a group if all have finished."""
        group = self._groups.get(group_id, [])
        if all(one.has_ended for one in group):
            for one in group:
                self._start_grace(one)

    def _start_grace(self, orphan: OrphanedRequest, at_least_s: float = 0.0) -> None:
        if orphan.timer is None:
            grace_s = max(orphan.grace_s, at_least_s)
            orphan.timer = self._call_later(grace_s, lambda: self._forget(orphan))

    def _forget(self, orphan: OrphanedRequest) -> None:
        _stop(orphan)
        del self._by_id[orphan.wire_id]
        group = self._groups[orphan.group_id]
        group.remove(orphan)
        if not group:
            del self._groups[orphan.group_id]
        self._give_up(orphan.request_id)


def _stop(orphan: OrphanedRequest) -> None:
    if orphan.timer is not None:
        orphan.timer.cancel()
        orphan.timer = None
