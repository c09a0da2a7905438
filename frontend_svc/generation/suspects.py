"""Quarantine of requests that may have crashed an engine, and the order in which they go to other engines.

A request that crashes engines must crash at most two, and no other request may be mistaken for it. Knows no
clock, no event loop, and engines only by address.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from frontend_svc.generation.poison import ProbationLocks
from frontend_svc.output.loss import LossKind


class Turn(IntEnum):
    """How a request is sent to its next engine; lower values go first."""

    AT_ONCE = 0  # not a suspect
    IN_GROUP = 1  # the dead engine had produced output for it: with others like it, in groups that double
    ALONE = 2  # a likely cause: as the only request on probation on that engine


class Suspect:
    """Suspicion record of one request. Exists from the request's start, to record where it was."""

    __slots__ = ("num_deaths", "probation", "turn")

    def __init__(self) -> None:
        self.turn = Turn.AT_ONCE
        self.num_deaths = 0  # since its last output
        self.probation: Probation | None = None  # on the engine that has not produced output for it yet


class Probation:
    """The suspects on one engine that have no output there yet.

    is_exclusive: no other frontend process of this host has any there.
    """

    __slots__ = ("_blocking", "_group_limit", "_group_room", "address", "is_exclusive", "unproven")

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_exclusive = False
        self.unproven: set[Suspect] = set()
        self._blocking: set[Suspect] = set()
        self._group_limit = 0
        self._group_room = 0

    def has_room(self, turn: Turn) -> bool:
        """Whether another suspect may be added now."""
        if not self._blocking:
            return True
        return turn is Turn.IN_GROUP and self._group_room > 0

    def add(self, suspect: Suspect) -> None:
        """Add a suspect; `has_room` was true."""
        if self._blocking:
            self._group_room -= 1
        elif suspect.turn is Turn.IN_GROUP:
            self._group_limit = 2 * self._group_limit or 1
            self._group_room = self._group_limit - 1
        else:
            self._group_room = 0
        self.unproven.add(suspect)
        self._blocking.add(suspect)

    def pass_over(self, suspect: Suspect) -> None:
        """Let this one no longer block others, although it has no output."""
        self._blocking.discard(suspect)

    def remove(self, suspect: Suspect) -> None:
        """Remove one that has output or has ended."""
        self.unproven.discard(suspect)
        self._blocking.discard(suspect)


class PoisonQuarantine:
    """Finds the request that crashes engines, and limits the number of suspects on each surviving engine.

    Requests without output from the engine that died are the most likely causes, and are sent one at a time
    to each engine. So if the next engine dies, exactly one request was on both, and it is the cause. Requests
    with output are sent before them, in groups that double, as they are cleared quickly. `locks` keep other
    processes' suspects away meanwhile.

    is_locked_out: since it was reset, a suspect was kept from an engine by another process.
    """

    def __init__(self, locks: ProbationLocks | None = None) -> None:
        self.is_locked_out = False
        self._locks = locks or ProbationLocks()
        self._probations: dict[str, Probation] = {}

    @property
    def num_on_probation(self) -> int:
        """Suspects that are on engines without output yet."""
        return sum(len(probation.unproven) for probation in self._probations.values())

    def lose(self, suspect: Suspect, address: str, kind: LossKind, *, had_output: bool) -> bool:
        """Record that the engine at `address` lost a request; True if it is the cause: do not send it again.

        Call it for all requests of a dead engine before anything else is done with any of them.
        """
        if kind is not LossKind.DEATH:
            self._end_probation(suspect)
            return False
        probation, suspect.probation = suspect.probation, None
        suspect.num_deaths += 1
        # `probation` is not changed from here on, so that all of its suspects are judged by the same state.
        if self._probations.pop(address, None) is not None:
            self._locks.release(address)
        if probation is not None:
            suspect.turn = Turn.ALONE
            return len(probation.unproven) == 1 and probation.is_exclusive
        suspect.turn = Turn.IN_GROUP if had_output else Turn.ALONE
        return False

    def may_go(self, suspect: Suspect, address: str) -> bool:
        """Whether the suspect may be sent to the engine at `address` now."""
        if suspect.turn is Turn.AT_ONCE:
            return True
        probation = self._probations.get(address)
        if probation is not None and probation.unproven:
            return probation.has_room(suspect.turn)
        if not self._locks.take(address):
            self.is_locked_out = True
            return False
        self._locks.release(address)
        return True

    def send(self, suspect: Suspect, address: str) -> bool:
        """Record that it is sent to `address`; True if it is on probation there."""
        if suspect.turn is Turn.AT_ONCE:
            return False
        suspect.probation = probation = self._probations.setdefault(address, Probation(address))
        if not probation.unproven:
            probation.is_exclusive = self._locks.take(address)
        probation.add(suspect)
        return True

    def pass_over(self, suspect: Suspect) -> None:
        """Its time is over: let others go to its engine. It stays a suspect."""
        if suspect.probation is not None:
            suspect.probation.pass_over(suspect)

    def clear(self, suspect: Suspect) -> None:
        """Clear a request that has output or has ended."""
        self._end_probation(suspect)
        suspect.turn, suspect.num_deaths = Turn.AT_ONCE, 0

    def settle(self) -> None:
        """Forget engines without suspects, whose next group is small again. Call it after a dispatch."""
        self._probations = {address: one for address, one in self._probations.items() if one.unproven}

    def _end_probation(self, suspect: Suspect) -> None:
        probation, suspect.probation = suspect.probation, None
        if probation is not None:
            probation.remove(suspect)
            if not probation.unproven:
                self._locks.release(probation.address)


def in_order(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Stable sort by turn."""
    return sorted(suspects, key=lambda suspect: suspect.turn)
