"""Requests that another frontend may adopt, as the I/O side knows them, and for how long each is kept.

Belongs to the event loop. Knows no stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

MAX_GRACE_S = 60.0
_MAX_ORPHANED_REQUESTS = 16_384


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None:
        """It does not come."""
        ...


@dataclass(slots=True)
class OrphanedRequest:
    """One request with all that its next frontend needs. `wire_id` is its ADD's, `request_id` our own."""

    wire_id: str
    request_id: str
    attempt: int
    group_id: str  # outputs of one prompt go together; its own id where it is alone
    prompt_token_ids: bytes
    resume_state: bytes
    stop_token_ids: frozenset[int]
    grace_s: float
    owner: int  # the number of the session that has it
    is_lost: bool = False  # its session has no stream
    has_ended: bool = False
    timer: Timer | None = field(default=None, repr=False)


class OrphanedRequests:
    """By the ids of their ADDs. One is given up when nobody has had it for its grace.

    give_up: ends a request, and forgets it, in the engine.  call_later: as the event loop's.
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
        """The request whose ADD had this id, while it is kept."""
        return self._by_id.get(wire_id)

    def has_room_for(self, wire_id: str) -> bool:
        """False where there are too many, or one of this id."""
        return len(self._by_id) < self._max_requests and wire_id not in self._by_id

    def add(self, orphan: OrphanedRequest) -> bool:
        """Keep a request from now on. False, and it is not kept, where there is no room for it."""
        if not self.has_room_for(orphan.wire_id):
            return False
        self._by_id[orphan.wire_id] = orphan
        self._groups.setdefault(orphan.group_id, []).append(orphan)
        return True

    def mark_lost(self, owner: int, *, at_least_s: float = 0.0) -> None:
        """The stream of a session broke: what it has can be adopted for as long as its grace.

        at_least_s: how long the session itself may come back, for nothing of it ends before that.
        """
        for orphan in self._owned_by(owner):
            orphan.is_lost = True
            self._start_grace(orphan, at_least_s)

    def mark_found(self, owner: int) -> None:
        """The session is back."""
        for orphan in self._owned_by(owner):
            orphan.is_lost = False
            if not self._is_group_over(orphan):
                _stop(orphan)

    def adopt(self, wire_id: str, owner: int) -> OrphanedRequest | None:
        """A session takes over a request that is lost; None where there is none such."""
        orphan = self._by_id.get(wire_id)
        if orphan is None or not orphan.is_lost:
            return None
        orphan.owner, orphan.is_lost = owner, False
        if not self._is_group_over(orphan):
            _stop(orphan)
        return orphan

    def end(self, wire_id: str) -> None:
        """A request has ended. With the last of its group their grace begins: somebody may not know yet."""
        orphan = self._by_id.get(wire_id)
        if orphan is None:
            return
        orphan.has_ended = True
        self._end_group(orphan.group_id)

    def discard(self, wire_id: str) -> None:
        """A request has moved, and keeps its id: whoever asks for it is not to get what it was here."""
        orphan = self._by_id.get(wire_id)
        if orphan is not None:
            self._forget(orphan)
            self._end_group(orphan.group_id)

    def drop(self, owner: int) -> None:
        """A session is over for good and by its own wish: what it has is given up at once."""
        for orphan in list(self._owned_by(owner)):
            self._forget(orphan)

    def _owned_by(self, owner: int) -> Iterable[OrphanedRequest]:
        return [orphan for orphan in self._by_id.values() if orphan.owner == owner]

    def _is_group_over(self, orphan: OrphanedRequest) -> bool:
        return all(one.has_ended for one in self._groups[orphan.group_id])

    def _end_group(self, group_id: str) -> None:
        """Let the grace of what is left of a group begin, if all of it has ended."""
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
