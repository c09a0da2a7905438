"""Requests whose extras every rank prepares before they may be admitted. Belongs to the engine thread.

They are blocked meanwhile, keep their position in the order and delay no other request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_svc.core.errors import RequestFailed
from engine_svc.core.request import Request
from engine_svc.loop.protocols import PreparingRanks
from engine_svc.scheduler.feature import SchedulerFeature, overriding
from triptych_kit.clock import Clock
from triptych_kit.shares import SharedLimit

MAX_PREPARATIONS = 1024
# Counted from when a preparation becomes the oldest pending one: one that hangs must not expire those queued
# after it. For each account that has some pending, whose turns come in between.
PREPARATION_LIMIT_S = 10.0
# Until one has succeeded of those that are slow at first: what prepares them is made before.
_FIRST_LIMIT_S = 120.0


@dataclass(slots=True)
class Preparation:
    """The preparation of one request. failure: why the request ends instead of being admitted."""

    request_id: str
    blockers: frozenset[str]
    num_missing: int  # answers of ranks
    account: str
    is_first: bool = False  # of those that are slow at first
    failure: RequestFailed | None = None


class Preparations(SchedulerFeature):
    """Blocks requests with extras to prepare, and counts the answers of the ranks.

    The first failure of a rank decides, without waiting for the others. Has to be the last feature: what it
    has begun for a request is ended by `on_finish`, which never comes if the request is not added. One that
    another feature holds back is begun later, and counts for no limit until then.
    """

    def __init__(
        self,
        ranks: PreparingRanks | None,
        clock: Clock,
        features: Sequence[SchedulerFeature] = (),
        *,
        max_preparations: int = MAX_PREPARATIONS,
        limit_s: float = PREPARATION_LIMIT_S,
    ) -> None:
        """ranks: None for an engine whose requests have nothing to prepare.  features: those before this."""
        self._ranks = ranks
        self._holds = overriding(features, "holds_preparation")
        self._on_prepared = overriding(features, "on_prepared")
        self._held: dict[str, Request] = {}  # the oldest first
        self._clock = clock
        self._max_preparations = max_preparations
        self._places = SharedLimit(max_preparations)
        self._limit_s = limit_s
        self._number = 0
        self._pending: dict[int, Preparation] = {}  # by number, the oldest first
        self._settled: list[Preparation] = []
        self._number_of: dict[str, int] = {}  # of all requests that have not ended, prepared ones included
        self._oldest_since = 0.0  # when the oldest pending one became that
        self._known_blockers: set[str] = set()  # of preparations that have succeeded

    def on_add(self, request: Request) -> None:
        if not request.extras:
            return
        blockers = _blockers_of(request)
        if not blockers:
            return
        if self._ranks is None:
            raise ValueError(f"no rank prepares {', '.join(sorted(blockers))}")
        request.blockers |= blockers
        if self._is_held(request):
            self._held[request.request_id] = request
        else:
            self._begin(request, blockers)

    def _is_held(self, request: Request) -> bool:
        return any(holds(request) for holds in self._holds)

    def _begin(self, request: Request, blockers: frozenset[str]) -> None:
        assert self._ranks is not None, "an engine without ranks has begun no preparation"
        account, weight = request.account, request.weight
        preparation = Preparation(
            request.request_id,
            blockers,
            self._ranks.num_preparing,
            account,
            is_first=any(
                extra.is_slow_at_first and extra.blocker not in self._known_blockers
                for extra in request.extras.values()
            ),
        )
        if not self._places.has_room(account, weight):
            preparation.failure = RequestFailed(
                "RESOURCE_EXHAUSTED",
                f"{len(self._pending)} requests wait for {', '.join(sorted(blockers))}, "
                f"the limit is {self._max_preparations}{self._places.words(account, weight)}",
            )
            self._settled.append(preparation)
            return
        self._number += 1
        extras = {kind: extra for kind, extra in request.extras.items() if extra.blocker}
        self._ranks.prepare(self._number, request.request_id, extras, account, weight)
        if not self._pending:
            self._oldest_since = self._clock.now()
        self._pending[self._number] = preparation
        self._places.take(account, weight)
        self._number_of[request.request_id] = self._number

    def on_finish(self, request: Request) -> None:
        self._held.pop(request.request_id, None)
        number = self._number_of.pop(request.request_id, None)
        if number is not None and self._ranks is not None:
            self._take(number)
            self._ranks.drop_prepared(request.request_id)
        self._begin_held()

    def _begin_held(self) -> None:
        while self._held:
            held = next(iter(self._held.values()))
            if self._is_held(held):
                # Those behind it wait, too.
                return
            del self._held[held.request_id]
            self._begin(held, _blockers_of(held))

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.stop_preparing()

    def note(self, number: int, failure: RequestFailed | None) -> None:
        """A rank has answered. Answers for requests that have ended meanwhile are ignored."""
        preparation = self._pending.get(number)
        if preparation is None:
            return
        preparation.num_missing -= 1
        preparation.failure = failure
        if failure is None and not preparation.num_missing:
            self._known_blockers |= preparation.blockers
        if failure is not None or not preparation.num_missing:
            self._settled.append(preparation)
            self._take(number)

    def take_settled(self) -> list[Preparation]:
        """Preparations that all ranks have done, that failed or that took too long, each once."""
        if self.left_s() == 0.0:
            number, oldest = next(iter(self._pending.items()))
            names = ", ".join(sorted(oldest.blockers))
            oldest.failure = RequestFailed(
                "DEADLINE_EXCEEDED", f"preparing {names} took longer than {self._limit_now_s:g} s"
            )
            self._settled.append(oldest)
            self._take(number)
        settled, self._settled = self._settled, []
        for preparation in settled:
            for on_prepared in self._on_prepared:
                on_prepared(preparation.request_id, preparation.failure)
        if settled:
            self._begin_held()
        return settled

    def left_s(self) -> float | None:
        """How long the oldest may still take; None: nothing is being prepared."""
        if not self._pending:
            return None
        return max(0.0, self._oldest_since + self._limit_now_s - self._clock.now())

    @property
    def _limit_now_s(self) -> float:
        """Of the oldest pending one."""
        is_first = next(iter(self._pending.values())).is_first
        limit_s = max(self._limit_s, _FIRST_LIMIT_S) if is_first else self._limit_s
        return limit_s * max(1, self._places.num_accounts)

    def _take(self, number: int) -> None:
        is_oldest = number == next(iter(self._pending), None)
        preparation = self._pending.pop(number, None)
        if preparation is not None:
            self._places.give_back(preparation.account)
        if is_oldest:
            self._oldest_since = self._clock.now()


def _blockers_of(request: Request) -> frozenset[str]:
    return frozenset(extra.blocker for extra in request.extras.values() if extra.blocker)
