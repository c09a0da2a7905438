"""The explorer by command: `python -m tests.explorer`.

Without options it visits every world of two ranks in several setups, walks at random through worlds of two to
four, and shows how it finds each of the known races.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.explorer.explore import Exploration, Outcome, Violation
from tests.explorer.moves import describe
from tests.explorer.system import Setup, System
from tests.explorer.variants import RACES
from tests.explorer.walk import walk

# What is visited in full. All but the first hear an engine's word at once, though it may say it late.
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


def main() -> int:
    """Visit, walk, show; 1 where a promise is not kept, or a known race is not found."""
    parser = argparse.ArgumentParser(prog="tests.explorer", description=__doc__)
    parser.add_argument("--only", default="", help="of the setups, those whose name contains this")
    parser.add_argument(
        "--one", action="store_true", help="visit one setup, of the options below, and no more"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1, help="of each rank")
    parser.add_argument("--senders", type=int, default=8, help="how many ranks get requests")
    parser.add_argument("--pauses", type=int, default=1, help="of each rank")
    parser.add_argument("--pausers", type=int, default=8, help="how many ranks are paused")
    parser.add_argument("--hints", type=int, default=0, help="of frontends")
    parser.add_argument("--crashes", type=int, default=1, help="of engines, of the coordinator, of sessions")
    parser.add_argument("--interval", type=int, default=1, help="steps from one vote to the next")
    parser.add_argument("--slow-reports", action="store_true", help="what engines say takes a while")
    parser.add_argument("--slow-ends", action="store_true", help="steps that all have launched take a while")
    parser.add_argument("--unformed", action="store_true", help="begin with engines that know nobody")
    parser.add_argument("--max-worlds", type=int, help="stop there")
    parser.add_argument("--walks", type=int, default=1000, help="seeds of the random walks")
    options = parser.parse_args()
    if not options.one:
        is_kept = [
            _visit(name, setup, options.max_worlds) for name, setup in FULL.items() if options.only in name
        ]
        if not options.only:
            is_kept += [_walk(num_ranks, options.walks) for num_ranks in (2, 3, 4)]
            is_kept.append(_show_races())
        return 0 if all(is_kept) else 1
    setup = Setup(
        num_ranks=options.ranks,
        num_requests=options.requests,
        num_senders=options.senders,
        num_pauses=options.pauses,
        num_pausers=options.pausers,
        num_hints=options.hints,
        num_crashes=options.crashes,
        interval=options.interval,
        has_slow_reports=options.slow_reports,
        has_slow_ends=options.slow_ends,
        is_formed=not options.unformed,
    )
    return 0 if _visit("one setup", setup, options.max_worlds) else 1


def _visit(name: str, setup: Setup, max_worlds: int | None) -> bool:
    began = time.monotonic()
    outcome = Exploration(System(setup)).run(max_worlds)
    _report(name, outcome, time.monotonic() - began)
    return outcome.violation is None


def _walk(num_ranks: int, num_walks: int) -> bool:
    setup = Setup(
        num_ranks=num_ranks,
        num_requests=3,
        num_pauses=2,
        num_hints=3,
        num_crashes=3,
        interval=2,
        has_slow_reports=True,
        has_slow_ends=True,
    )
    walks = walk(setup, range(num_walks), num_moves=200)
    print(f"{num_ranks} ranks: {walks.num_walks} random walks, {walks.num_moves} moves", flush=True)
    if walks.violation is not None:
        _print_violation(walks.violation)
    return walks.violation is None


def _show_races() -> bool:
    are_found = True
    for name, (setup, promise) in RACES.items():
        print(f"planted: {name}")
        violation = Exploration(System(setup)).run().violation
        are_found = are_found and violation is not None and violation.promise is promise
        if violation is None:
            print("  NOT found")
        else:
            _print_violation(violation)
    return are_found


def _report(name: str, outcome: Outcome, elapsed_s: float) -> None:
    print(
        f"{name}: {outcome.num_worlds} states, {outcome.num_moves} transitions, {outcome.depth} moves deep, "
        f"{outcome.num_done} with all work done, {'all' if outcome.is_complete else 'NOT all'} visited, "
        f"{elapsed_s:.1f} s",
        flush=True,
    )
    if outcome.violation is not None:
        _print_violation(outcome.violation)


def _print_violation(violation: Violation) -> None:
    print(f"  BROKEN: {violation.promise.value}")
    for number, move in enumerate(violation.trace, 1):
        print(f"  {number:3} {describe(move)}")
    print(f"  then {violation.detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
