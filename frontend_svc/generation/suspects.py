"""Who may have brought an engine down, and in which order such requests may go to other engines.

A request that kills engines must kill at most two, and no other request may be taken for it. Knows no clock,
no loop and no engine but by its address.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from frontend_svc.output.loss import LossKind


class Turn(IntEnum):
    """How a request goes to its next engine; lower ones first."""

    AT_ONCE = 0  # nothing is known against it
    IN_GROUP = 1  # the dead engine had run it for a while: together with others like it, in growing groups
    ALONE = 2  # it may well have been the cause: as the only one that is not proven on that engine


class Suspect:
    """What is held against one request. Made with it, for it is judged by where it was when engines died."""

    __slots__ = ("num_deaths", "probation", "turn")

    def __init__(self) -> None:
        self.turn = Turn.AT_ONCE
        self.num_deaths = 0  # since it was proven last
        self.probation: Probation | None = None  # where it is and has not yielded anything yet


class Probation:
    """The suspects on one engine that have yielded nothing there yet."""

    __slots__ = ("_blocking", "_group_limit", "_group_room", "unproven")

    def __init__(self) -> None:
        self.unproven: set[Suspect] = set()
        self._blocking: set[Suspect] = set()
        self._group_limit = 0
        self._group_room = 0

    def has_room(self, turn: Turn) -> bool:
        """Whether one more may come now."""
        if not self._blocking:
            return True
        return turn is Turn.IN_GROUP and self._group_room > 0

    def add(self, suspect: Suspect) -> None:
        """Take one for whom there is room."""
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
        """Let others come although this one has yielded nothing."""
        self._blocking.discard(suspect)

    def remove(self, suspect: Suspect) -> None:
        """Forget one that is proven or gone."""
        self.unproven.discard(suspect)
        self._blocking.discard(suspect)


class PoisonQuarantine:
    """Judges the requests of engines that die, and keeps the survivors from too many suspects at once.

    Requests without output from the engine that died are the prime suspects, and go on one at a time for each
    engine. So when the next engine dies, there is one whom both had, and it is that one. Those with output go
    before them, as they are quickly proven, in groups that double.
    """

    def __init__(self) -> None:
        self._probations: dict[str, Probation] = {}

    @property
    def num_on_probation(self) -> int:
        """Suspects that are in engines and have yielded nothing there yet."""
        return sum(len(probation.unproven) for probation in self._probations.values())

    def lose(self, suspect: Suspect, address: str, kind: LossKind, *, had_output: bool) -> bool:
        """Judge a request that the engine at `address` lost; True for one that is to go nowhere any more.

        The requests of an engine that died are all judged before anything else is done with any of them.
        """
        probation, suspect.probation = suspect.probation, None
        if kind is not LossKind.DEATH:
            if probation is not None:
                probation.remove(suspect)
            return False
        suspect.num_deaths += 1
        # Not changed from here on, so that each of its suspects sees the same.
        self._probations.pop(address, None)
        if probation is not None:
            suspect.turn = Turn.ALONE
            return len(probation.unproven) == 1
        suspect.turn = Turn.IN_GROUP if had_output else Turn.ALONE
        return False

    def may_go(self, suspect: Suspect, address: str) -> bool:
        """Whether the engine at `address` may get it now."""
        probation = self._probations.get(address)
        return suspect.turn is Turn.AT_ONCE or probation is None or probation.has_room(suspect.turn)

    def send(self, suspect: Suspect, address: str) -> bool:
        """Note that it goes to `address`; True when it has to prove itself there."""
        if suspect.turn is Turn.AT_ONCE:
            return False
        suspect.probation = self._probations.setdefault(address, Probation())
        suspect.probation.add(suspect)
        return True

    def pass_over(self, suspect: Suspect) -> None:
        """Let others go to its engine: it has had its time. It stays a suspect."""
        if suspect.probation is not None:
            suspect.probation.pass_over(suspect)

    def clear(self, suspect: Suspect) -> None:
        """Forget all that is held against a request that has yielded output, or has ended."""
        if suspect.probation is not None:
            suspect.probation.remove(suspect)
            suspect.probation = None
        suspect.turn, suspect.num_deaths = Turn.AT_ONCE, 0

    def settle(self) -> None:
        """Forget engines without suspects. Called when all that may go have gone: the next group is small."""
        self._probations = {address: one for address, one in self._probations.items() if one.unproven}


def in_order(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Those who go first first; equals in the order given."""
    return sorted(suspects, key=lambda suspect: suspect.turn)
