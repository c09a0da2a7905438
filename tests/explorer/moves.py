"""One thing that happens, and whose will it is."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """The process that makes it happen."""

    OWN = 0  # the system by itself: it will, sooner or later
    OUTSIDE = 1  # requests, pauses, crashes, losses: it may or may not
    OPERATOR = 2  # a resume, which only has to come where all stand still
    REPAIR = 3  # the coordinator is started again


class Move(NamedTuple):
    """A move by its name, and the rank that makes it; -1: the coordinator."""

    name: str
    rank: int
    kind: Kind = Kind.OWN


_WORDS = {
    "report": "rank {0} reports",
    "ring": "rank {0} sets the wake signal",
    "hear": "rank {0} receives the wake signal",
    "turn": "rank {0} takes a turn of its loop",
    "obey": "rank {0} obeys the oldest command",
    "take": "rank {0} takes the verdict",
    "finish": "rank {0} gets its oldest step back",
    "lose": "rank {0} finds its group broken",
    "form": "rank {0} and the others form the next generation",
    "pause": "rank {0} is asked to pause",
    "resume": "rank {0} is asked to resume",
    "all resumed": "rank {0} hears that all have resumed",
    "request": "rank {0} gets a request",
    "crash": "rank {0} crashes",
    "return": "rank {0} starts again",
    "register": "rank {0} registers",
    "hear up": "the coordinator takes in the oldest message of rank {0}",
    "hint": "a frontend hints that rank {0} has a request",
    "hear hint": "the coordinator takes in the hint about rank {0}",
    "tell again": "the coordinator tells again who has not answered",
    "cut": "the session of rank {0} breaks, and what was on its way is lost",
    "coordinator crash": "the coordinator crashes, and what was on its way is lost",
    "coordinator crash late": "the coordinator crashes, its commands have arrived",
    "coordinator return": "the coordinator starts again",
}


def describe(move: Move) -> str:
    return _WORDS[move.name].format(move.rank)
