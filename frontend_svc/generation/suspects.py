"""Quarantine of requests that may have crashed an engine, and the order in which they go to other engines.

A request that crashes engines must crash at most two, and no other request may be mistaken for it. Knows no
event loop, and engines only by address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from itertools import islice

from frontend_svc.generation.poison import Content, PoisonRecord, ProbationLocks
from triptych_kit.clock import Clock

# For how long others of its owner may join a suspect on an engine, before the next owner has its turn.
_OPEN_S = 1.0
# Prompts of a dead engine that are recorded; each costs a file.
_MAX_RECORDED = 64


class Turn(IntEnum):
    """How a request is sent to its next engine; lower values go first."""

    AT_ONCE = 0  # not a suspect
    IN_GROUP = 1  # an unlikely cause: it had output there, or was answered before. In groups that grow
    ALONE = 2  # a likely cause: on an engine where no request of another owner is without output


class Suspect:
    """Suspicion record of one request. Exists from the request's start, to record where it was."""

    __slots__ = ("_owner", "content", "engine", "incident_id", "num_deaths", "turn", "yields_at")

    def __init__(self, content: Content) -> None:
        self.content = content
        self.turn = Turn.AT_ONCE
        self.num_deaths = 0  # since its last output
        self.incident_id = ""  # once it is found to be the cause of deaths
        self.engine: Probation | None = None  # that has not produced output for it yet
        self.yields_at = math.inf  # when suspects need no longer wait for it
        self._owner = ""

    @property
    def owner(self) -> str:
        """Whose it is: see `Content.owner`."""
        self._owner = self._owner or self.content.owner
        return self._owner


class Probation:
    """The requests that an engine has not produced output for yet.

    owner: the one whose suspects others avoid; empty: none.  open_until: until when more of them may be sent
    there.  num_cleared: those of groups that have had output there.
    """

    __slots__ = ("address", "members", "num_cleared", "open_until", "owner")

    def __init__(self, address: str) -> None:
        self.address = address
        self.members: set[Suspect] = set()
        self.owner = ""
        self.open_until = 0.0
        self.num_cleared = 0

    def num_waited_for(self, now: float, turn: Turn | None = None) -> int:
        """Members, of a turn or all, that suspects wait for before they are sent there."""
        return sum(one.yields_at > now and turn in (None, one.turn) for one in self.members)

    def has_group_room(self, now: float) -> bool:
        """Whether another of a group may be sent there: two for each that was cleared."""
        return self.num_waited_for(now, Turn.IN_GROUP) <= self.num_cleared


class PoisonQuarantine:
    """Finds the requests that crash engines, and limits the number of suspects on each surviving engine.

    Where an engine dies, all requests without its output are likely causes, also those that have just left
    it. They become suspects, and each of their owners then has one engine at a time, which others avoid: if
    it dies while nothing else is without output there, its suspects are the cause. One engine of several is
    left to others. Requests with output move before, in groups that double, as they are cleared quickly.
    `locks` keep other processes' requests away.

    is_locked_out: since it was reset, a request was kept from an engine by another process.
    """

    def __init__(
        self, clock: Clock, record: PoisonRecord | None = None, locks: ProbationLocks | None = None
    ) -> None:
        self.record = record or PoisonRecord()
        self.is_locked_out = False
        self._clock = clock
        self._locks = locks or ProbationLocks()
        self._engines: dict[str, Probation] = {}
        self._owned: dict[str, Probation] = {}  # by the owner of suspects on it
        # Engines that others avoid until an owner can have them, by owner, and who has asked since `settle`.
        self._reserved: dict[str, str] = {}
        self._waiting: set[str] = set()

    @property
    def num_on_probation(self) -> int:
        """Suspects that are on engines without output yet."""
        engines = self._engines.values()
        return sum(one.turn is not Turn.AT_ONCE for engine in engines for one in engine.members)

    def may_go(self, suspect: Suspect, address: str, ready: Callable[[], Collection[str]]) -> bool:
        """Whether it may be sent to the engine at `address` now, one of the `ready()` that can take it."""
        engine, now = self._engines.get(address), self._clock.now()
        if suspect.turn is not Turn.ALONE:
            if engine is not None and engine.owner:
                return False
            is_reserved = address in self._reserved.values()
            if suspect.turn is Turn.AT_ONCE and is_reserved:
                return False
            if suspect.turn is Turn.IN_GROUP and engine is not None and not engine.has_group_room(now):
                return False
            return is_reserved or self._unless_locked_out(is_free=not self._locks.is_kept(address))
        owned = self._owned.get(suspect.owner)
        if owned is not None:
            return owned is engine and owned.owner == suspect.owner and now < owned.open_until
        if engine is not None and engine.num_waited_for(now):
            return False
        if not self._may_have(suspect.owner, address, ready()):
            return False
        is_free = self._have_alone(address, suspect.owner)
        self.release(address)
        self._locks.release_owner(suspect.owner)
        return is_free

    def reserve(self, suspect: Suspect, ready: Collection[str]) -> None:
        """Have others avoid one engine of `ready` until a suspect, which may go to none now, can be sent."""
        owner, now = suspect.owner, self._clock.now()
        self._waiting.add(owner)
        if owner in self._owned or self._reserved.get(owner) in ready:
            return
        self._free_reserved(owner)
        free = [address for address in ready if self._may_have(owner, address, ready)]
        for address in sorted(free, key=lambda one: self._engine(one).num_waited_for(now)):
            if self._unless_locked_out(is_free=self._locks.keep(address)):
                self._reserved[owner] = address
                return

    def send(self, suspect: Suspect, address: str, *, yields_at: float) -> bool:
        """Record that it is sent to `address`, where it may go; False if another process was faster.

        yields_at: when suspects need no longer wait for it, unless it is one itself.
        """
        engine = self._engine(address)
        if suspect.turn is Turn.ALONE and not engine.owner:
            if not self._have_alone(address, suspect.owner):
                return False
            engine.owner, engine.open_until = suspect.owner, self._clock.now() + _OPEN_S
            self._owned[engine.owner] = engine
            self._free_reserved(engine.owner)
        elif not engine.members and not self._locks.share(address):
            # One with an owner has members.
            return self._unless_locked_out(is_free=False)
        self._add(suspect, engine, math.inf if suspect.turn else yields_at)
        return True

    def take_over(self, suspect: Suspect, address: str, *, yields_at: float) -> None:
        """Record that it is on the engine at `address`, where another process has sent it."""
        engine = self._engine(address)
        if not engine.members:
            self._locks.share(address)
        self._add(suspect, engine, yields_at)

    def pass_over(self, suspect: Suspect) -> None:
        """Its time is over: let others go to its engine. It stays a suspect."""
        suspect.yields_at = -math.inf
        if suspect.engine is not None:
            suspect.engine.num_cleared += suspect.turn is Turn.IN_GROUP
            self._settle_engine(suspect.engine)

    def leave(self, suspect: Suspect) -> None:
        """Its client has ended it: its engine may die of it until it is removed."""
        suspect.yields_at = math.inf

    def clear(self, suspect: Suspect) -> None:
        """Clear a request that has output or was answered."""
        if suspect.engine is not None:
            suspect.engine.num_cleared += suspect.turn is Turn.IN_GROUP
        if suspect.turn is Turn.ALONE:
            self.record.note_cleared(suspect.content)
        self.remove(suspect)
        suspect.turn, suspect.num_deaths = Turn.AT_ONCE, 0

    def remove(self, suspect: Suspect) -> None:
        """Its engine does not have it any more. It stays what it is."""
        engine, suspect.engine = suspect.engine, None
        if engine is None:
            return
        engine.members.discard(suspect)
        self._settle_engine(engine)
        if suspect.turn is Turn.ALONE and not any(one.owner == suspect.owner for one in engine.members):
            self._free_owner(suspect.owner)

    def lose_engine(self, address: str, *, is_dead: bool) -> None:
        """The engine has lost its requests: judge those without output, if it is dead.

        The one that must not be sent again has an `incident_id` then. Call it before they are lost.
        """
        engine = self._engines.pop(address, None)
        if engine is None:
            return
        members = engine.members
        is_proven = is_dead and self._are_alone(members) and self._locks.are_alone(address)
        for owner in [owner for owner, one in self._owned.items() if one is engine]:
            self._free_owner(owner)
        for suspect in members:
            suspect.engine = None
        if not is_dead:
            self.release(address)
            return
        # Other processes that lose it see until `release` that this one had requests there.
        self._locks.share(address)
        likely = {one for one in members if one.turn or one.content not in self.record.innocent}
        for suspect in members:
            suspect.num_deaths += 1
            suspect.turn = Turn.ALONE if suspect in likely else Turn.IN_GROUP
        if is_proven:
            incident_id = self.record.note_poison([suspect.content for suspect in members])
            for suspect in members:
                suspect.incident_id = incident_id
            return
        for suspect in islice(likely, _MAX_RECORDED):
            self.record.note_suspect(suspect.content)

    def release(self, address: str) -> None:
        """Release the locks of an engine as far as this process has nothing there.

        Call it some time after a death of the engine.
        """
        engine = self._engine(address)
        if not engine.members:
            self._locks.unshare(address)
        elif not engine.owner:
            self._locks.share(address)
        if not engine.owner and address not in self._reserved.values():
            self._locks.release(address)

    def settle(self) -> None:
        """Forget reservations that no suspect waits for any more, and begin groups anew. After a dispatch."""
        for owner in set(self._reserved) - self._waiting:
            self._free_reserved(owner)
        self._waiting.clear()
        for engine in self._engines.values():
            if not any(one.turn is Turn.IN_GROUP for one in engine.members):
                engine.num_cleared = 0

    def _engine(self, address: str) -> Probation:
        engine = self._engines.get(address)
        if engine is None:
            engine = self._engines[address] = Probation(address)
        return engine

    def _add(self, suspect: Suspect, engine: Probation, yields_at: float) -> None:
        suspect.engine, suspect.yields_at = engine, yields_at
        engine.members.add(suspect)

    def _may_have(self, owner: str, address: str, ready: Collection[str]) -> bool:
        """Whether no other owner has it or waits for it, and one engine of several is left to others."""
        others = {engine.address for engine in self._engines.values() if engine.owner}
        others.update(one for whose, one in self._reserved.items() if whose != owner)
        return address not in others and len(others.intersection(ready)) < max(1, len(ready) - 1)

    def _free_reserved(self, owner: str) -> None:
        address = self._reserved.pop(owner, None)
        if address is not None:
            self.release(address)

    def _free_owner(self, owner: str) -> None:
        if self._owned.pop(owner, None) is not None:
            self._locks.release_owner(owner)

    def _settle_engine(self, engine: Probation) -> None:
        """Let others go to an engine without suspects that they would have to avoid."""
        if engine.owner and not engine.num_waited_for(self._clock.now(), Turn.ALONE):
            engine.owner = ""
            self.release(engine.address)
        elif not engine.members:
            self._locks.unshare(engine.address)

    def _are_alone(self, members: Collection[Suspect]) -> bool:
        """Whether all requests without output are suspects of one owner."""
        return all(one.turn is Turn.ALONE for one in members) and len({one.owner for one in members}) == 1

    def _have_alone(self, address: str, owner: str) -> bool:
        """Keep requests of other processes away from an engine, unless any are there."""
        is_free = self._locks.have_alone(address, owner)
        if not is_free:
            self.release(address)
            self._locks.release_owner(owner)
        return self._unless_locked_out(is_free=is_free)

    def _unless_locked_out(self, *, is_free: bool) -> bool:
        self.is_locked_out |= not is_free
        return is_free


def in_order(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Stable sort by turn."""
    return sorted(suspects, key=lambda suspect: suspect.turn)
