"""Bisects a failed step to the request that causes it. Knows no scheduler and no device.

A failed step is rolled back together with those in flight, and its requests run again in groups: first the
newer half, then the older half. A group that fails is halved. A request that fails alone is tried once more
after all groups, and is the culprit if it fails again. A request that samples a token in a step that works is
cleared. An error that does not occur again is blamed on no request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from engine_svc.core.step import StepPlan, StepResult

# Error messages of requests that were ended.
CULPRIT_MESSAGE = "every step that computes this request fails"
UNREADY = "the request could not be prepared"

# Bisections of the same requests without a culprit, or requests that fail alone with no working step in
# between, after which the engine ends. A second failure of the same request does not count.
MAX_FAILURES = 3
# Working steps after which a failure is unrelated to the one before.
_MEMORY_STEPS = 100
# Non-finite logits of fewer requests or steps may be the requests' own fault.
_MIN_BROKEN_REQUESTS = 4
_MIN_BROKEN_STEPS = 2
# A client that knows a prompt without finite logits can send it repeatedly, which would end one engine after
# the other. So requests that never had finite logits count only from this number of them in a row.
_MIN_STILLBORN_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class BisectionDecision:
    """The next action of the loop after a failed or a working step."""

    only: frozenset[str] | None = None  # requests that may run; None: all
    max_num_tokens: int | None = None  # per step; None: no further limit
    culprits: tuple[str, ...] = ()  # to be ended with an error
    is_fatal: bool = False  # no request is the cause, or too many: the engine has to end


GO_ON = BisectionDecision()
END = BisectionDecision(is_fatal=True)


class FailureBisector:
    """The suspects of failed steps. Open from a failure until all of them have been tried.

    Suspects are request ids, the newest first. A request that has ended is no longer a suspect.
    """

    def __init__(self) -> None:
        self._groups: list[list[str]] = []  # still to be tried, the newest first
        self._group: list[str] = []  # that runs now
        self._unsampled: set[str] = set()  # requests of the group without a token since
        self._max_num_tokens: int | None = None  # per step of the group, because the device was full
        self._lone_suspects: list[str] = []  # failed alone and are tried again after the groups
        self._failed_alone: set[str] = set()  # in this bisection
        self._num_culprits = 0  # in this bisection
        self._num_lone_failures = 0  # of different suspects, since a step worked
        self._suspects: frozenset[str] = frozenset()  # of this bisection, or of the last
        self._num_unsolved = 0  # bisections of these suspects that ended without a culprit
        self._num_steps = 0  # that worked since the last failure
        self._sound: tuple[StepPlan, StepResult] | None = None  # the last step, or nearly, with a finite row
        self._num_broken_steps = 0  # in a row, in which no row had finite logits
        self._broken: set[str] = set()  # requests of these steps that had finite logits right before
        self._stillborn: set[str] = set()  # all other requests of these steps

    @property
    def is_open(self) -> bool:
        return bool(self._group)

    def failed(self, suspects: Sequence[str], num_tokens: int, *, is_full: bool = False) -> BisectionDecision:
        """A step of `num_tokens` tokens of these requests failed; `is_full`: because the device was full."""
        if not suspects:
            # All its requests have ended meanwhile, or it was an idle step.
            return END if self._is_one_too_many() else self._present()
        if self.is_open:
            return self._narrow()
        is_repeated = self._num_steps < _MEMORY_STEPS and not self._suspects.isdisjoint(suspects)
        self._num_unsolved = self._num_unsolved if is_repeated else 0
        self._num_steps = 0
        self._suspects = frozenset(suspects)
        self._num_culprits = 0
        self._failed_alone = set()
        if self._num_unsolved + 1 >= MAX_FAILURES:
            if not is_full:
                return END
            # Together they need too much memory: without one of them the others can continue.
            self._num_unsolved = 0
            return BisectionDecision(culprits=(suspects[0],))
        if len(suspects) == 1:
            self._failed_alone.add(suspects[0])
            if self._is_one_too_many():
                return END
        if is_full and num_tokens > 1:
            self._max_num_tokens = num_tokens // 2
            self._begin([*suspects])
            return self._present()
        self._groups = _halves(suspects)
        return self._next()

    def on_step_done(self, plan: StepPlan, result: StepResult) -> BisectionDecision | None:
        """A step worked; rows without finite logits may be the device's fault. None: no change."""
        self._num_steps += 1
        self._num_lone_failures = 0
        if result.non_finite or self._num_broken_steps:
            if self._is_all_broken(plan, result):
                return END
        elif any(plan.samples) and not result.barred:
            self._sound = plan, result
        if not self._group:
            return None
        columns = zip(plan.request_ids, plan.samples, strict=True)
        self._unsampled.difference_update(request_id for request_id, samples in columns if samples)
        if not self._unsampled:
            return self._next()
        if self._max_num_tokens is not None and len(self._unsampled) < len(self._group):
            # The token limit is too small for all at once: those that have sampled make room.
            self._begin([request_id for request_id in self._group if request_id in self._unsampled])
            return self._present()
        return None

    def review(self, known: Collection[str]) -> BisectionDecision | None:
        """Drop suspects that have ended: those not in `known`. None: no change."""
        if self._unsampled and not self._unsampled.isdisjoint(known):
            return None
        self._groups = [[name for name in group if name in known] for group in self._groups]
        self._groups = [group for group in self._groups if group]
        self._lone_suspects = [name for name in self._lone_suspects if name in known]
        return self._next()

    def _is_all_broken(self, plan: StepPlan, result: StepResult) -> bool:
        # Rows whose requests' own rules leave no token are no evidence either way.
        num_informative = sum(plan.samples) - len(result.barred)
        if len(result.non_finite) < num_informative:
            self._sound = plan, result
            self._num_broken_steps = 0
            self._broken.clear()
            self._stillborn.clear()
        elif result.non_finite:
            self._num_broken_steps += 1
            # When the first broken row of a request is seen, later steps already have it.
            seen = {plan.request_ids[row] for row in result.non_finite} - self._broken
            was_sound = seen & self._sound_requests()
            self._broken |= was_sound
            self._stillborn |= seen - was_sound
        is_enough = (
            len(self._broken) >= _MIN_BROKEN_REQUESTS
            or len(self._broken) + len(self._stillborn) >= _MIN_STILLBORN_REQUESTS
        )
        return is_enough and self._num_broken_steps >= _MIN_BROKEN_STEPS

    def _sound_requests(self) -> set[str]:
        """Requests with finite rows in the last step that had any."""
        if self._sound is None:
            return set()
        plan, result = self._sound
        columns = enumerate(zip(plan.request_ids, plan.samples, strict=True))
        broken = {*result.non_finite, *result.barred}
        return {request_id for row, (request_id, samples) in columns if samples and row not in broken}

    def _present(self) -> BisectionDecision:
        return BisectionDecision(frozenset(self._group), self._max_num_tokens) if self._group else GO_ON

    def _narrow(self) -> BisectionDecision:
        """The group that runs has failed."""
        self._num_steps = 0
        if self._max_num_tokens is not None:
            # Fewer tokens did not help.
            self._groups = _halves(self._group)
        elif len(self._group) > 1:
            self._groups[:0] = _halves(self._group)
        elif not self._failed_alone.isdisjoint(self._group):
            self._num_culprits += 1
            culprits = tuple(self._group)
            return replace(self._next(), culprits=culprits)
        else:
            # A single failure may be an error that does not occur again.
            self._lone_suspects += self._group
            self._failed_alone.update(self._group)
            if self._is_one_too_many():
                return END
        return self._next()

    def _is_one_too_many(self) -> bool:
        """Count a request that failed alone for the first time; True once they are too many for culprits."""
        self._num_lone_failures += 1
        return self._num_lone_failures >= MAX_FAILURES

    def _next(self) -> BisectionDecision:
        """Try the next group, then the lone suspects one by one; without either, the bisection is over."""
        self._max_num_tokens = None
        # The oldest group is the largest and least suspect: if it fails too, the device may be the cause.
        index = -1 if self._lone_suspects and self._num_lone_failures else 0
        if not self._groups and self._lone_suspects:
            self._groups, self._lone_suspects = [[name] for name in self._lone_suspects], []
        if self._groups:
            self._begin(self._groups.pop(index))
            return self._present()
        self._group, self._unsampled = [], set()
        self._num_unsolved = 0 if self._num_culprits else self._num_unsolved + 1
        return GO_ON

    def _begin(self, group: list[str]) -> None:
        self._group, self._unsampled = group, set(group)


def _halves(suspects: Sequence[str]) -> list[list[str]]:
    middle = len(suspects) // 2
    return [group for group in ([*suspects[:middle]], [*suspects[middle:]]) if group]
