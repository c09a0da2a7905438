"""The explorer by command: `python -m tests.explorer [NAME]`.

It visits every world of two ranks in the setups whose name contains NAME; without NAME in all of them, and
then it walks at random through worlds of two to four.
"""

from __future__ import annotations

import sys
import time

from tests.explorer.explore import Exploration, Violation
from tests.explorer.moves import describe
from tests.explorer.system import Setup, System
from tests.explorer.walk import walk, wild

# What is visited in full. In all but the first an engine's report arrives at once, but may be sent late.
FULL = {
    "messages in any order": Setup(num_pauses=0, has_slow_reports=True, has_slow_ends=True),
    "hints": Setup(num_pauses=0, num_hints=1),
    "pauses": Setup(),
    "votes every two steps": Setup(num_pausers=1, interval=2),
    "a crash": Setup(num_pauses=0, num_crashes=1),
    "a crash and a pause": Setup(num_pausers=1, num_crashes=1),
    "a crash while the group is formed": Setup(num_pauses=0, num_senders=1, num_crashes=1, is_formed=False),
    # Five and a half million worlds: nearly half an hour.
    "a crash and both pause": Setup(num_crashes=1),
}
NUM_WALKS = 1000


def main() -> int:
    """Visit and walk; 1 where a promise is not kept."""
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    is_kept = [_visit(name, setup) for name, setup in FULL.items() if only in name]
    if not only:
        for num_ranks in (2, 3, 4):
            walks = walk(wild(num_ranks), range(NUM_WALKS), num_moves=200)
            print(f"{num_ranks} ranks: {walks.num_walks} random walks, {walks.num_moves} moves", flush=True)
            is_kept.append(_is_kept(walks.violation))
    return 0 if all(is_kept) else 1


def _visit(name: str, setup: Setup) -> bool:
    began = time.monotonic()
    outcome = Exploration(System(setup)).run()
    print(
        f"{name}: {outcome.num_worlds} states, {outcome.num_moves} transitions, {outcome.depth} moves deep, "
        f"{outcome.num_done} with all work done, {time.monotonic() - began:.1f} s",
        flush=True,
    )
    return _is_kept(outcome.violation)


def _is_kept(violation: Violation | None) -> bool:
    if violation is None:
        return True
    print(f"  BROKEN: {violation.promise.value}")
    for number, move in enumerate(violation.trace, 1):
        print(f"  {number:3} {describe(move)}")
    print(f"  then {violation.detail}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
