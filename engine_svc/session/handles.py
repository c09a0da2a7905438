"""The handles of one session: what runs under them, and which had their answer. Knows no message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MAX_SETTLED = 8192


@dataclass(slots=True)
class InFlight:
    """One request whose end has not been written yet. `entry_id` is the id and the attempt of its ADD."""

    request_id: str
    entry_id: tuple[str, int]
    stop_token_ids: frozenset[int]
    is_aborted: bool = False

    @property
    def attempt(self) -> int:
        """Which attempt of the request this is."""
        return self.entry_id[1]


class Handles:
    """Requests in flight by handle, and a bounded memory of those that were answered last."""

    def __init__(self) -> None:
        self._in_flight: dict[int, InFlight] = {}
        self._settled: dict[int, tuple[str, int]] = {}  # in order

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[int]:
        return iter(self._in_flight)

    def __contains__(self, handle: int) -> bool:
        return handle in self._in_flight

    def __getitem__(self, handle: int) -> InFlight:
        return self._in_flight[handle]

    def get(self, handle: int) -> InFlight | None:
        """What runs under `handle`, if anything does."""
        return self._in_flight.get(handle)

    def begin(self, handle: int, request: InFlight) -> None:
        """`request` runs under `handle` from now on."""
        self._in_flight[handle] = request

    def end(self, handles: Iterable[int]) -> None:
        """What ran under `handles` has had its end."""
        for handle in handles:
            self.settle(handle, self._in_flight.pop(handle).entry_id)

    def settle(self, handle: int, entry_id: tuple[str, int]) -> None:
        """Remember that this ADD was answered for good."""
        # The newest is the last in order, also where a handle is used again.
        self._settled.pop(handle, None)
        self._settled[handle] = entry_id
        if len(self._settled) > _MAX_SETTLED:
            del self._settled[next(iter(self._settled))]

    def is_settled(self, handle: int) -> bool:
        """Whether an ADD of `handle` was answered, as far as that is remembered."""
        return handle in self._settled

    def has_seen(self, handle: int, entry_id: tuple[str, int]) -> bool:
        """Whether just this ADD came before."""
        running = self._in_flight.get(handle)
        return entry_id == (self._settled.get(handle) if running is None else running.entry_id)

    def has_seen_request(self, handle: int, wire_id: str) -> bool:
        """Whether a request of this id was named by this handle before, whatever the attempt."""
        running = self._in_flight.get(handle)
        seen = self._settled.get(handle) if running is None else running.entry_id
        return seen is not None and seen[0] == wire_id

    def clear(self) -> list[InFlight]:
        """Forget what is in flight, and return it."""
        requests = list(self._in_flight.values())
        self._in_flight.clear()
        return requests
