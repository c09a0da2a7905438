"""Quarantine of requests that may have crashed an engine, and the order in which they go to other engines.

A request that crashes engines must crash at most two, and no other request may be mistaken for it. Knows no
clock, no event loop, and engines only by address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum

from frontend_svc.generation.poison import ProbationLocks
from frontend_svc.output.loss import LossKind


class Turn(IntEnum):
    """How a request is sent to its next engine; lower values go first."""

    AT_ONCE = 0  # not a suspect
    IN_GROUP = 1  # the dead engine had produced output for it: with others like it, in groups that double
    ALONE = 2  # a likely cause: as the only request on that engine that has no output there


class Suspect:
    """Suspicion record of one request. Exists from the request's start, to record where it was."""

    __slots__ = ("num_deaths", "probation", "turn")

    def __init__(self) -> None:
        self.turn = Turn.AT_ONCE
        self.num_deaths = 0  # since its last output
        self.probation: Probation | None = None  # on the engine that has not produced output for it yet


class Probation:
    """The requests on one engine that have no output there yet.

    fresh: those that are no suspects.  is_exclusive: no other process of the host has suspects there.
    """

    __slots__ = ("_blocking", "_group_limit", "_group_room", "address", "fresh", "is_exclusive", "suspects")

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_exclusive = False
        self.fresh: set[Suspect] = set()
        self.suspects: set[Suspect] = set()
        self._blocking: set[Suspect] = set()
        self._group_limit = 0
        self._group_room = 0

    @property
    def is_for_one(self) -> bool:
        """Whether one request is to run there without any other that has no output."""
        return any(suspect.turn is Turn.ALONE for suspect in self._blocking)

    def has_room(self, turn: Turn) -> bool:
        """Whether another suspect may be added now."""
        if not self._blocking:
            return turn is Turn.IN_GROUP or not self.fresh
        return turn is Turn.IN_GROUP and self._group_room > 0

    def is_sole(self, suspect: Suspect) -> bool:
        """Whether nothing but this suspect can be the cause if the engine dies now."""
        return self.is_exclusive and not self.fresh and self.suspects == {suspect}

    def add(self, suspect: Suspect) -> None:
        """Add a request; `has_room` was true of a suspect."""
        if suspect.turn is Turn.AT_ONCE:
            self.fresh.add(suspect)
            return
        if self._blocking:
            self._group_room -= 1
        elif suspect.turn is Turn.IN_GROUP:
            self._group_limit = 2 * self._group_limit or 1
            self._group_room = self._group_limit - 1
        else:
            self._group_room = 0
        self.suspects.add(suspect)
        self._blocking.add(suspect)

    def pass_over(self, suspect: Suspect) -> None:
        """Let this one no longer block others, although it has no output."""
        self._blocking.discard(suspect)

    def remove(self, suspect: Suspect) -> None:
        """Remove one that has output or has ended."""
        for members in (self.fresh, self.suspects, self._blocking):
            members.discard(suspect)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on it, and no group has been."""
        return not self.suspects and not self.fresh and not self._group_limit

    def forget_groups(self) -> None:
        """Have the next group begin small again."""
        self._group_limit = 0


class PoisonQuarantine:
    """Finds the request that crashes engines, and limits the number of suspects on each surviving engine.

    Requests without output from the engine that died are the most likely causes. They are sent one at a time,
    each to an engine where all others have output, and which others avoid meanwhile: so if it dies, exactly
    one request can be the cause. One engine is left to the others. Requests with output are sent before them,
    in groups that double, as they are cleared quickly. `locks` keep other processes' suspects away meanwhile.

    is_locked_out: since it was reset, a suspect was kept from an engine by another process.
    """

    def __init__(self, locks: ProbationLocks | None = None) -> None:
        self.is_locked_out = False
        self._locks = locks or ProbationLocks()
        self._probations: dict[str, Probation] = {}
        # An engine that requests avoid until a suspect can have it for itself.
        self._reserved = ""

    @property
    def num_on_probation(self) -> int:
        """Suspects that are on engines without output yet."""
        return sum(len(probation.suspects) for probation in self._probations.values())

    def lose(self, suspect: Suspect, address: str, kind: LossKind, *, had_output: bool) -> bool:
        """Record that the engine at `address` lost a request; True if it is the cause: do not send it again.

        Call it for all requests of a dead engine before anything else is done with any of them.
        """
        if kind is not LossKind.DEATH:
            self._end_probation(suspect)
            return False
        probation, suspect.probation = suspect.probation, None
        suspect.num_deaths += 1
        # `probation` is not changed from here on, so that all that is on it is judged by the same state.
        if self._probations.pop(address, None) is not None:
            self._locks.release(address)
        if probation is not None and suspect.turn is not Turn.AT_ONCE:
            suspect.turn = Turn.ALONE
            return probation.is_sole(suspect)
        suspect.turn = Turn.IN_GROUP if had_output else Turn.ALONE
        return False

    def may_go(self, suspect: Suspect, address: str, num_engines: Callable[[], int]) -> bool:
        """Whether it may be sent to the engine at `address` now, one of `num_engines()` that are ready."""
        probation, turn = self._probations.get(address), suspect.turn
        if turn is Turn.AT_ONCE:
            return address != self._reserved and (probation is None or not probation.is_for_one)
        if turn is Turn.ALONE and not self._may_be_for_one(address, num_engines()):
            return False
        if probation is not None:
            if not probation.has_room(turn):
                if not probation.suspects:
                    self._reserved = self._reserved or address
                return False
            if probation.suspects:
                return True
        if not self._locks.take(address):
            self.is_locked_out = True
            return False
        self._locks.release(address)
        return True

    def send(self, suspect: Suspect, address: str) -> bool:
        """Record that it is sent to `address`; True if it is on probation there."""
        suspect.probation = probation = self._probations.setdefault(address, Probation(address))
        if suspect.turn is not Turn.AT_ONCE and not probation.suspects:
            probation.is_exclusive = self._locks.take(address)
        if suspect.turn is Turn.ALONE and address == self._reserved:
            self._reserved = ""
        probation.add(suspect)
        return suspect.turn is not Turn.AT_ONCE

    def pass_over(self, suspect: Suspect) -> None:
        """Its time is over: let others go to its engine. It stays a suspect."""
        if suspect.probation is not None:
            suspect.probation.pass_over(suspect)

    def clear(self, suspect: Suspect) -> None:
        """Clear a request that has output or has ended."""
        self._end_probation(suspect)
        suspect.turn, suspect.num_deaths = Turn.AT_ONCE, 0

    def release_reserved(self) -> None:
        """Let all requests go to the engine again that a suspect waited for."""
        self._reserved = ""

    def settle(self) -> None:
        """Have groups on engines without suspects be small again. Call it after a dispatch."""
        for probation in list(self._probations.values()):
            if not probation.suspects:
                probation.forget_groups()
                self._forget_if_idle(probation)

    def _may_be_for_one(self, address: str, num_engines: int) -> bool:
        for_one = {one.address for one in self._probations.values() if one.is_for_one}
        if self._reserved:
            for_one.add(self._reserved)
        return address in for_one or len(for_one) < max(1, num_engines - 1)

    def _end_probation(self, suspect: Suspect) -> None:
        probation, suspect.probation = suspect.probation, None
        if probation is None:
            return
        was_watched = bool(probation.suspects)
        probation.remove(suspect)
        if was_watched and not probation.suspects:
            self._locks.release(probation.address)
        self._forget_if_idle(probation)

    def _forget_if_idle(self, probation: Probation) -> None:
        if probation.is_idle and self._probations.get(probation.address) is probation:
            del self._probations[probation.address]


def in_order(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Stable sort by turn."""
    return sorted(suspects, key=lambda suspect: suspect.turn)
