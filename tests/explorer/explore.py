"""Visits every world that can be reached, and looks from which of them all work can still be done."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from tests.explorer.broken import BrokenPromise, Promise
from tests.explorer.moves import Move
from tests.explorer.system import System, describe, is_done, must_come, why_stuck
from tests.explorer.world import Frozen


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that is not kept, and the shortest way there."""

    promise: Promise
    detail: str
    trace: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was visited."""

    num_worlds: int
    num_moves: int
    num_done: int  # worlds in which nothing is left to be done
    depth: int  # moves to the world that is farthest from the first
    is_complete: bool  # False: it ended at a limit, or at a violation
    violation: Violation | None


class Exploration:
    """One visit, breadth first, so that what it finds it finds by the shortest way."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._numbers: dict[Frozen, int] = {}
        self._worlds: list[Frozen] = []
        self._parents = array("q")
        self._ways: list[Move | None] = []  # the move that led to each world first
        self._sources = array("q")  # of the moves that will be made sooner or later
        self._targets = array("q")
        self._done: list[int] = []
        self._depths = array("l")
        self._num_moves = 0
        self._known_moves: dict[Move, Move] = {}

    def run(self, max_worlds: int | None = None) -> Outcome:
        """Visit all worlds, or as many as that; what is not kept ends it."""
        self._number(self._system.start(), -1, None)
        at = 0
        while at < len(self._worlds) and (max_worlds is None or at < max_worlds):
            violation = self._visit(at)
            if violation is not None:
                return self._outcome(violation, is_complete=False)
            at += 1
        if at < len(self._worlds):
            return self._outcome(None, is_complete=False)
        return self._outcome(self._find_stuck(), is_complete=True)

    def _visit(self, at: int) -> Violation | None:
        frozen = self._worlds[at]
        world = self._system.thaw(frozen)
        if is_done(world):
            self._done.append(at)
        for move in self._system.moves(world):
            move = self._known_moves.setdefault(move, move)
            try:
                after = self._system.after(frozen, move)
            except BrokenPromise as broken:
                return Violation(broken.promise, broken.detail, (*self._trace(at), move))
            self._num_moves += 1
            if after == frozen:
                continue
            number = self._number(after, at, move)
            if must_come(world, move):
                self._sources.append(at)
                self._targets.append(number)
        return None

    def _number(self, frozen: Frozen, parent: int, way: Move | None) -> int:
        number = self._numbers.setdefault(frozen, len(self._worlds))
        if number == len(self._worlds):
            self._worlds.append(frozen)
            self._parents.append(parent)
            self._ways.append(way)
            self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
        return number

    def _find_stuck(self) -> Violation | None:
        """The nearest world from which no way leads to one in which all is done."""
        first, sources = _by_target(self._targets, self._sources, len(self._worlds))
        can_end = bytearray(len(self._worlds))
        queue = deque(self._done)
        for number in self._done:
            can_end[number] = 1
        while queue:
            number = queue.popleft()
            for place in range(first[number], first[number + 1]):
                source = sources[place]
                if not can_end[source]:
                    can_end[source] = 1
                    queue.append(source)
        stuck = can_end.find(0)
        return None if stuck < 0 else self._stuck_violation(stuck)

    def _stuck_violation(self, number: int) -> Violation:
        trace = list(self._trace(number))
        frozen = self._worlds[number]
        # From here on it gets as far as it can, which is printed too: it shows which rank waits for which.
        seen = {frozen}
        while True:
            world = self._system.thaw(frozen)
            onward = next(
                (
                    (move, after)
                    for move in self._system.moves(world)
                    if must_come(world, move) and (after := self._system.after(frozen, move)) not in seen
                ),
                None,
            )
            if onward is None:
                break
            trace.append(onward[0])
            frozen = onward[1]
            seen.add(frozen)
        return Violation(why_stuck(world), describe(world), tuple(trace))

    def _trace(self, number: int) -> tuple[Move, ...]:
        moves: list[Move] = []
        while (way := self._ways[number]) is not None:
            moves.append(way)
            number = self._parents[number]
        return tuple(reversed(moves))

    def _outcome(self, violation: Violation | None, *, is_complete: bool) -> Outcome:
        return Outcome(
            num_worlds=len(self._worlds),
            num_moves=self._num_moves,
            num_done=len(self._done),
            depth=max(self._depths),
            is_complete=is_complete,
            violation=violation,
        )


def _by_target(targets: array[int], sources: array[int], count: int) -> tuple[array[int], array[int]]:
    """The sources of each target, one after the other, and where those of each begin."""
    first = array("q", bytes(8 * (count + 1)))
    for target in targets:
        first[target + 1] += 1
    for number in range(count):
        first[number + 1] += first[number]
    place = array("q", first)
    ordered = array("q", bytes(8 * len(sources)))
    for source, target in zip(sources, targets, strict=True):
        ordered[place[target]] = source
        place[target] += 1
    return first, ordered
