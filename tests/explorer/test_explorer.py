"""The machines of waves keep their promises in every world that can be reached; known races are found."""

from __future__ import annotations

import pytest

from tests.explorer.explore import Exploration
from tests.explorer.moves import describe
from tests.explorer.system import Setup, System
from tests.explorer.variants import RACES
from tests.explorer.walk import walk, wild

CALM = Setup(num_pauses=0, has_slow_reports=True)
ONE_PAUSES = Setup(num_pauses=1, num_pausers=1)
ONE_SENDS = Setup(num_pauses=1, num_senders=1)
CRASH_AT_REST = Setup(num_requests=0, num_pauses=0, num_crashes=1)
CRASH_AT_WORK = Setup(num_pauses=0, num_crashes=1, num_senders=1)


@pytest.mark.parametrize(
    "setup",
    [CALM, ONE_PAUSES, ONE_SENDS, CRASH_AT_REST, CRASH_AT_WORK],
    ids=["messages in any order", "one rank pauses", "both pause", "a crash at rest", "a crash at work"],
)
def test_every_world_of_two_ranks_keeps_all_promises(setup: Setup) -> None:
    outcome = Exploration(System(setup)).run()
    assert outcome.violation is None
    assert outcome.is_complete
    assert outcome.num_done > 0


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_walks_keep_all_promises(num_ranks: int) -> None:
    walks = walk(wild(num_ranks), range(20), num_moves=200)
    assert walks.violation is None


# The setups in which the races show are among those above: there the real machines keep all promises.
@pytest.mark.parametrize("race", RACES)
def test_a_known_race_is_found(race: str) -> None:
    setup, promise = RACES[race]
    violation = Exploration(System(setup)).run().violation
    assert violation is not None
    assert violation.promise is promise
    assert all(describe(move) for move in violation.trace)
