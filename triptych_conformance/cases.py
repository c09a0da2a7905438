"""Cases: functions that check one rule of the specification each, with the section that has the rule."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NoReturn, TypeVar

PeerT = TypeVar("PeerT")


class Section(Enum):
    """The sections of `protos/engine-session.md`: the only place with their numbers and titles."""

    TRANSPORT = "2. Transport"
    OPENING = "3. Opening a session"
    NUMBERS = "4. Numbers, acknowledgements, back-pressure"
    RESUMING = "5. Resuming"
    REQUESTS = "6. Requests"
    STEPS = "7. Steps"
    ADOPTION = "8. Orphans and adoption"
    HEALTH = "9. Health"
    ENDS = "10. Ends"
    TENSORS = "11. Tensors"


class Finding(Exception):
    """A rule that is not kept: what was expected, and what was seen instead."""

    def __init__(self, expected: str, seen: object) -> None:
        self.expected = expected
        self.seen = str(seen)
        super().__init__(f"expected {expected}; seen: {seen}")


class NotApplicable(Exception):
    """The rule is about something that the peer does not serve, and need not."""


class Turn(Enum):
    """When a case is run. A case that mostly waits is run beside the others, to save time."""

    BESIDE_OTHERS = 0
    IN_ORDER = 1
    LAST = 2


@dataclass(frozen=True, slots=True)
class Case(Generic[PeerT]):
    """One rule and its check, which raises Finding or NotApplicable.

    is_must: False for a SHOULD, whose finding is a warning.
    """

    name: str
    section: Section
    rule: str
    is_must: bool
    turn: Turn
    check: Callable[[PeerT], Awaitable[None]]


class Cases(Generic[PeerT]):
    """The cases of one section, in the order of their definition."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._cases: list[Case[PeerT]] = []

    def __iter__(self) -> Iterator[Case[PeerT]]:
        return iter(self._cases)

    def must(self, rule: str, *, turn: Turn = Turn.IN_ORDER) -> Callable[[Check[PeerT]], Check[PeerT]]:
        """Add the decorated function as the check of a MUST."""
        return self._add(rule, is_must=True, turn=turn)

    def should(self, rule: str, *, turn: Turn = Turn.IN_ORDER) -> Callable[[Check[PeerT]], Check[PeerT]]:
        """Add the decorated function as the check of a SHOULD."""
        return self._add(rule, is_must=False, turn=turn)

    def _add(self, rule: str, *, is_must: bool, turn: Turn) -> Callable[[Check[PeerT]], Check[PeerT]]:
        def add(check: Check[PeerT]) -> Check[PeerT]:
            self._cases.append(Case(check.__name__, self._section, rule, is_must, turn, check))
            return check

        return add


Check = Callable[[PeerT], Awaitable[None]]


def expect(condition: object, expected: str, seen: object) -> None:
    """Raise a Finding unless `condition` holds."""
    if not condition:
        fail(expected, seen)


def fail(expected: str, seen: object) -> NoReturn:
    """Raise a Finding."""
    raise Finding(expected, seen)
