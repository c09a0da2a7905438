"""How much slower this processor is than the one that limits of CPU time were set on."""

from __future__ import annotations

import time

_NUM_TURNS = 300_000
# Of the turns below, there.
_NOMINAL_S = 0.0126
_NUM_TRIES = 10


def slowness() -> float:
    """At least 1; of several tries the one that was disturbed least."""
    return max(1.0, min(_turns_s() for _ in range(_NUM_TRIES)) / _NOMINAL_S)


def _turns_s() -> float:
    began_at_s, total = time.process_time(), 0
    for turn in range(_NUM_TURNS):
        total += turn * turn % 7
    return time.process_time() - began_at_s
