"""How the explorer says that a promise is not kept. Not `assert`: checks also count under `python -O`."""

from __future__ import annotations

from enum import Enum


class Promise(Enum):
    """What holds in every world."""

    QUIET = "no rank steps between an agreed pause and its operator's resume"
    MONOTONE = "no wave goes back"
    PAIRED = "collectives meet: what ranks wait for together is the same thing"
    POSSIBLE = "no machine is asked for a change of state that it does not know"
    NO_DEADLOCK = "ranks do not wait for each other in a circle"
    NO_LOST_START = "work that is not held gets its steps"
    NO_LONELY_STEP = "who begins a wave is joined by the others"


class BrokenPromise(Exception):
    """A promise that is not kept, and how."""

    def __init__(self, promise: Promise, detail: str) -> None:
        super().__init__(f"{promise.value}: {detail}")
        self.promise = promise
        self.detail = detail


def expect(holds: bool, promise: Promise, detail: str) -> None:
    if not holds:
        raise BrokenPromise(promise, detail)
