"""Requests that another frontend may adopt, as the I/O side knows them, and for how long each is kept.

Belongs to the event loop. Knows no stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

MAX_GRACE_S = 60.0
_MAX_ADOPTABLE = 16_384


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None:
        """It does not come."""
        ...


@dataclass(slots=True)
class Adoptable:
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


class Adoptables:
    """By the ids of their ADDs. One is given up when nobody has had it for its grace.

    give_up: ends a request, and forgets it, in the engine.  call_later: as the event loop's.
    """

    def __init__(
        self,
        *,
        give_up: Callable[[str], None],
        call_later: Callable[[float, Callable[[], None]], Timer],
        max_requests: int = _MAX_ADOPTABLE,
    ) -> None:
        self._give_up = give_up
        self._call_later = call_later
        self._max_requests = max_requests
        self._by_id: dict[str, Adoptable] = {}
        self._groups: dict[str, list[Adoptable]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, wire_id: str) -> bool:
        return wire_id in self._by_id

    def get(self, wire_id: str) -> Adoptable | None:
        """The request whose ADD had this id, while it is kept."""
        return self._by_id.get(wire_id)

    def has_room_for(self, wire_id: str) -> bool:
        """False where there are too many, or one of this id."""
        return len(self._by_id) < self._max_requests and wire_id not in self._by_id

    def add(self, adoptable: Adoptable) -> bool:
        """Keep a request from now on. False, and it is not kept, where there is no room for it."""
        if not self.has_room_for(adoptable.wire_id):
            return False
        self._by_id[adoptable.wire_id] = adoptable
        self._groups.setdefault(adoptable.group_id, []).append(adoptable)
        return True

    def lose(self, owner: int, *, at_least_s: float = 0.0) -> None:
        """The stream of a session broke: what it has can be adopted for as long as its grace.

        at_least_s: how long the session itself may come back, for nothing of it ends before that.
        """
        for adoptable in self._owned_by(owner):
            adoptable.is_lost = True
            self._start_grace(adoptable, at_least_s)

    def find_again(self, owner: int) -> None:
        """The session is back."""
        for adoptable in self._owned_by(owner):
            adoptable.is_lost = False
            if not self._is_group_over(adoptable):
                _stop(adoptable)

    def adopt(self, wire_id: str, owner: int) -> Adoptable | None:
        """A session takes over a request that is lost; None where there is none such."""
        adoptable = self._by_id.get(wire_id)
        if adoptable is None or not adoptable.is_lost:
            return None
        adoptable.owner, adoptable.is_lost = owner, False
        if not self._is_group_over(adoptable):
            _stop(adoptable)
        return adoptable

    def end(self, wire_id: str) -> None:
        """A request has ended. With the last of its group their grace begins: somebody may not know yet."""
        adoptable = self._by_id.get(wire_id)
        if adoptable is None:
            return
        adoptable.has_ended = True
        self._end_group(adoptable.group_id)

    def discard(self, wire_id: str) -> None:
        """A request has moved, and keeps its id: whoever asks for it is not to get what it was here."""
        adoptable = self._by_id.get(wire_id)
        if adoptable is not None:
            self._forget(adoptable)
            self._end_group(adoptable.group_id)

    def drop(self, owner: int) -> None:
        """A session is over for good and by its own wish: what it has is given up at once."""
        for adoptable in list(self._owned_by(owner)):
            self._forget(adoptable)

    def _owned_by(self, owner: int) -> Iterable[Adoptable]:
        return [adoptable for adoptable in self._by_id.values() if adoptable.owner == owner]

    def _is_group_over(self, adoptable: Adoptable) -> bool:
        return all(one.has_ended for one in self._groups[adoptable.group_id])

    def _end_group(self, group_id: str) -> None:
        """Let the grace of what is left of a group begin, if all of it has ended."""
        group = self._groups.get(group_id, [])
        if all(one.has_ended for one in group):
            for one in group:
                self._start_grace(one)

    def _start_grace(self, adoptable: Adoptable, at_least_s: float = 0.0) -> None:
        if adoptable.timer is None:
            grace_s = max(adoptable.grace_s, at_least_s)
            adoptable.timer = self._call_later(grace_s, lambda: self._forget(adoptable))

    def _forget(self, adoptable: Adoptable) -> None:
        _stop(adoptable)
        del self._by_id[adoptable.wire_id]
        group = self._groups[adoptable.group_id]
        group.remove(adoptable)
        if not group:
            del self._groups[adoptable.group_id]
        self._give_up(adoptable.request_id)


def _stop(adoptable: Adoptable) -> None:
    if adoptable.timer is not None:
        adoptable.timer.cancel()
        adoptable.timer = None
