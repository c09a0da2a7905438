"""Random walks through worlds that are too many to visit, each ended by letting all of it come to its end."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.explorer.broken import BrokenPromise, Promise
from tests.explorer.explore import Violation
from tests.explorer.moves import Kind, Move
from tests.explorer.system import Setup, System, describe, is_done, must_come, why_stuck
from tests.explorer.world import Frozen

_MAX_MOVES_TO_END = 3000
# Of ten moves at which something may come from outside, so many are that.
_OUTSIDE_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Walks:
    """What was walked."""

    num_walks: int
    num_moves: int
    violation: Violation | None


def wild(num_ranks: int) -> Setup:
    """Everything may happen, several times."""
    return Setup(
        num_ranks=num_ranks,
        num_requests=3,
        num_pauses=2,
        num_hints=3,
        num_crashes=3,
        interval=2,
        has_slow_reports=True,
        has_slow_ends=True,
    )


def walk(setup: Setup, seeds: range, num_moves: int) -> Walks:
    """Walk once for each seed; what is not kept ends it."""
    system = System(setup)
    total = 0
    for number, seed in enumerate(seeds, 1):
        trace: list[Move] = []
        violation = _walk_once(system, random.Random(seed), num_moves, trace)
        total += len(trace)
        if violation is not None:
            return Walks(number, total, violation)
    return Walks(len(seeds), total, None)


def _walk_once(system: System, rng: random.Random, num_moves: int, trace: list[Move]) -> Violation | None:
    frozen = system.start()
    try:
        for _ in range(num_moves):
            frozen = _step(system, frozen, rng, trace, from_outside=True)
        # Moves are chosen at random among all that have to come, so each does come, sooner or later.
        for _ in range(_MAX_MOVES_TO_END):
            if is_done(system.thaw(frozen)):
                return None
            frozen = _step(system, frozen, rng, trace, from_outside=False)
    except BrokenPromise as broken:
        return Violation(broken.promise, broken.detail, tuple(trace))
    world = system.thaw(frozen)
    promise: Promise = why_stuck(world)
    return Violation(promise, describe(world), tuple(trace))


def _step(
    system: System, frozen: Frozen, rng: random.Random, trace: list[Move], *, from_outside: bool
) -> Frozen:
    world = system.thaw(frozen)
    moves = list(system.moves(world))
    own = [move for move in moves if must_come(world, move)]
    outside = [move for move in moves if move.kind is not Kind.OWN] if from_outside else []
    choice = outside if outside and (not own or rng.random() < _OUTSIDE_SHARE) else own
    if not choice:
        return frozen
    move = rng.choice(choice)
    trace.append(move)
    return system.after(frozen, move)
