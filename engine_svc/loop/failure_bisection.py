"""Whose fault a failed step is: suspects run apart until it is known. Knows no scheduler and no device.

A failed step is taken back, with those in flight, and its requests run again in groups, alone: first the
newer half, then the older. A group that fails is halved; who fails alone is heard alone again when all others
have been, and is the offender if it fails then as well. Whoever samples a token in a step that comes back is
free. An error that does not come back is nobody's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from engine_svc.core.step import StepPlan, StepResult

# What people are told of a request that ended so.
CULPRIT_MESSAGE = "every step that computes this request fails"
UNREADY = "the request could not be prepared"

# So often may steps of the same requests fail for no request's fault, or so many suspects fail alone with
# nothing in between that works. Whoever fails alone again says nothing new of the device.
MAX_FAILURES = 3
# After so many steps that worked, another failure has nothing to do with the one before.
_MEMORY_STEPS = 100
# Logits of a few requests say nothing of the device: they may be the cause themselves.
_MIN_BROKEN_REQUESTS = 4
_MIN_BROKEN_STEPS = 2
# Nor do those of many that never had a finite one: whoever knows a prompt that has none may send it again and
# again, and one engine after the other would end by it. So many in a row, with nothing else between, do.
_MIN_STILLBORN_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class BisectionDecision:
    """What the loop is to do now."""

    only: frozenset[str] | None = None  # who may run; None: everybody
    max_num_tokens: int | None = None  # in a step; None: as ever
    culprits: tuple[str, ...] = ()  # to be ended with an error
    is_fatal: bool = False  # nobody can be blamed, or everybody: the engine has to end


GO_ON = BisectionDecision()
END = BisectionDecision(is_fatal=True)


class FailureBisector:
    """The suspects of failed steps. Open from a failure until the last of them has been heard.

    Requests are known by their ids; who is gone meanwhile is a suspect no more. Suspects are given with the
    newest first.
    """

    def __init__(self) -> None:
        self._groups: list[list[str]] = []  # still to be heard, the newest first
        self._group: list[str] = []  # that runs now
        self._unsampled: set[str] = set()  # of the group: has not sampled since
        self._max_num_tokens: int | None = None  # that the group runs on, because the device was full
        self._lone_suspects: list[str] = []  # failed alone and are heard again when the groups have been
        self._failed_alone: set[str] = set()  # in this inquiry
        self._num_culprits = 0  # in this inquiry
        self._num_lone_failures = 0  # of different suspects, since a step came back
        self._suspects: frozenset[str] = frozenset()  # of this inquiry, or of the last
        self._num_unsolved = 0  # inquiries into these suspects that ended with nobody blamed
        self._num_steps = 0  # that came back since the last failure
        self._sound: tuple[StepPlan, StepResult] | None = None  # the last step, or nearly, with a finite row
        self._num_broken_steps = 0  # in a row, in which no row had a finite logit
        self._broken: set[str] = set()  # whose rows these were, that had finite ones right before
        self._stillborn: set[str] = set()  # whose else

    @property
    def is_open(self) -> bool:
        """Whether somebody is still to be heard."""
        return bool(self._group)

    def failed(self, suspects: Sequence[str], num_tokens: int, *, is_full: bool = False) -> BisectionDecision:
        """A step of these requests failed, with so many tokens; `is_full`: because the device was full."""
        if not suspects:
            # Whoever was in it has gone meanwhile, or it was a step of nobody's.
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
            # Together they are too much: with one less the others get on.
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
        """A step worked; rows without finite logits may be the device's fault. None: go on as before."""
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
            # So few tokens are not for all at once; whoever has had some makes room.
            self._begin([request_id for request_id in self._group if request_id in self._unsampled])
            return self._present()
        return None

    def review(self, known: Collection[str]) -> BisectionDecision | None:
        """Some may have gone meanwhile: `known` are there. None: nothing changes."""
        if self._unsampled and not self._unsampled.isdisjoint(known):
            return None
        self._groups = [[name for name in group if name in known] for group in self._groups]
        self._groups = [group for group in self._groups if group]
        self._lone_suspects = [name for name in self._lone_suspects if name in known]
        return self._next()

    def _is_all_broken(self, plan: StepPlan, result: StepResult) -> bool:
        # Rows that their requests' rules bar from every token say nothing either way.
        num_informative = sum(plan.samples) - len(result.barred)
        if len(result.non_finite) < num_informative:
            self._sound = plan, result
            self._num_broken_steps = 0
            self._broken.clear()
            self._stillborn.clear()
        elif result.non_finite:
            self._num_broken_steps += 1
            # A request is in later steps already when its first broken row is seen.
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
        """Whose rows were finite in the last step that had such."""
        if self._sound is None:
            return set()
        plan, result = self._sound
        columns = enumerate(zip(plan.request_ids, plan.samples, strict=True))
        broken = {*result.non_finite, *result.barred}
        return {request_id for row, (request_id, samples) in columns if samples and row not in broken}

    def _present(self) -> BisectionDecision:
        return BisectionDecision(frozenset(self._group), self._max_num_tokens) if self._group else GO_ON

    def _narrow(self) -> BisectionDecision:
        """The group that runs alone has failed."""
        self._num_steps = 0
        if self._max_num_tokens is not None:
            # Fewer tokens were no help.
            self._groups = _halves(self._group)
        elif len(self._group) > 1:
            self._groups[:0] = _halves(self._group)
        elif not self._failed_alone.isdisjoint(self._group):
            self._num_culprits += 1
            culprits = tuple(self._group)
            return replace(self._next(), culprits=culprits)
        else:
            # Once may be an error that does not come back.
            self._lone_suspects += self._group
            self._failed_alone.update(self._group)
            if self._is_one_too_many():
                return END
        return self._next()

    def _is_one_too_many(self) -> bool:
        """Somebody has failed alone, for the first time: whether it cannot be their fault any more."""
        self._num_lone_failures += 1
        return self._num_lone_failures >= MAX_FAILURES

    def _next(self) -> BisectionDecision:
        """Hear the next group, then the accused one by one; where there is none, the inquiry is over."""
        self._max_num_tokens = None
        # The oldest are the most and the least suspect: if they fail as well, it may be the device.
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
