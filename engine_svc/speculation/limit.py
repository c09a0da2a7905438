"""How many drafts each row may have in a step: by what accepting them gains and what verifying them costs.

Knows no proposer and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Protocol

from engine_svc.core.request import Request
from engine_svc.core.step import StepCosts

# Drafts are verified only if that makes tokens faster by this factor, as costs are estimates.
_LEAST_GAIN = 1.05
_LEAST_SURVIVAL = 0.05
# What is known at a depth before anything was verified: a chance, and how many observations it is worth.
_FIRST_CHANCE = 0.5
_FIRST_WEIGHT = 8.0
# How many observations of all requests count as much as one of the request itself.
_SHARED_WEIGHT = 2.0
# What older observations are worth with each new one, of a request and of all.
_FADING = 0.9
_SHARED_FADING = 0.99
# Steps without drafts until a row tries one again, doubled each time that it is in vain.
_FIRST_WAIT = 16
_LONGEST_WAIT = 256
# Of the time of steps, what such tries may cost, in vain or not.
_PROBING_SHARE = 0.002
# Costs change with the contexts' lengths, so decisions are made anew at least this often.
_MAX_SETTLED_STEPS = 64
# Where rows come and go all the time, so many of them are decided about in a step on the average.
_ROWS_PER_STEP = 8


class DraftLimit(Protocol):
    """Decides how many drafts rows may have."""

    def num_quiet_steps(self) -> int:
        """How many steps with the same rows have no drafts either, unless any are noted before."""

    def skip(self, num_steps: int) -> None:
        """Count quiet steps for which `grant` was not asked."""

    def grant(self, rows: Sequence[Request]) -> Sequence[int]:
        """How many drafts each of a step's rows with one known token to compute may have; () if none may."""

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a row that was granted any. num_drafts: verified ones; 0: none was proposed."""

    def forget(self, request: Request) -> None:
        """Release what is kept of a request that ended."""


class FixedLimit:
    """The same number in every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def num_quiet_steps(self) -> int:
        return 0

    def skip(self, num_steps: int) -> None: ...

    def grant(self, rows: Sequence[Request]) -> Sequence[int]:
        return [_capped(request, self._num_drafts) for request in rows]

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None: ...

    def forget(self, request: Request) -> None: ...


class _Chances:
    """How often drafts at each depth were accepted if all before them were; older observations fade."""

    __slots__ = ("_fading", "hits", "trials")

    def __init__(self, num_depths: int, fading: float, chance: float = 0.0, weight: float = 0.0) -> None:
        self.hits = [chance * weight] * num_depths
        self.trials = [weight] * num_depths
        self._fading = fading

    def add(self, num_drafts: int, num_accepted: int) -> None:
        for depth in range(min(num_drafts, num_accepted + 1, len(self.hits))):
            self.hits[depth] = self.hits[depth] * self._fading + (depth < num_accepted)
            self.trials[depth] = self.trials[depth] * self._fading + 1.0


class _DraftHistory:
    """The drafts of a request so far.

    proposals: whether any was proposed, of one depth.  chance: that one will be.  survivals: by depth, the
    chance that all drafts up to it are right, if they are proposed.  gain_at_best: tokens by all depths.
    """

    __slots__ = ("allowed", "chance", "gain_at_best", "own", "probe_at", "proposals", "survivals", "wait")

    def __init__(self, num_depths: int) -> None:
        self.own = _Chances(num_depths, _FADING)
        self.proposals = _Chances(1, _FADING)
        self.survivals: list[float] = []
        self.chance = 1.0
        self.gain_at_best = 0.0
        self.allowed = 0
        self.wait = _FIRST_WAIT
        self.probe_at = 0  # the step at which a row without drafts tries one; 0: it has drafts


class SurvivalLimit:
    """One budget for the batch: the drafts that are most likely to be accepted, as many as pay."""

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self._costs = costs
        self._max_drafts = max_drafts
        self._seconds = [0.0]  # of a step, by its positions; as far as it was needed
        self._proposing: list[float] = []  # to propose for one row more, by the rows; as far as needed
        self._shared = _Chances(max_drafts, _SHARED_FADING, _FIRST_CHANCE, _FIRST_WEIGHT)
        self._shared_proposals = _Chances(1, _SHARED_FADING, _FIRST_CHANCE, _FIRST_WEIGHT)
        self._histories: dict[str, _DraftHistory] = {}  # by request id
        self._untried: _DraftHistory | None = None  # a new one, with what is estimated now
        self._step = 0
        # Of the newest decision.
        self._names: list[str] = []
        self._granted: list[int] = []
        self._settled_until = 0  # before this step, nothing changes unless something becomes known
        self._decided_at = 0
        self._probing_seconds = 0.0  # that tries may cost now

    def num_quiet_steps(self) -> int:
        return 0 if self._granted else max(0, self._settled_until - 1 - self._step)

    def skip(self, num_steps: int) -> None:
        self._step += num_steps

    def grant(self, rows: Sequence[Request]) -> Sequence[int]:
        self._step += 1
        if not rows:
            return ()
        names = [request.request_id for request in rows]
        are_others = names != self._names
        is_due = self._step >= self._settled_until
        if is_due or (are_others and self._step >= self._decided_at + len(rows) // _ROWS_PER_STEP):
            self._settled_until = self._step + _MAX_SETTLED_STEPS
            self._decide(rows)
        elif not are_others:
            return self._granted
        self._names = names
        granted = [history.allowed if (history := self._histories.get(name)) else 0 for name in names]
        self._granted = granted if any(granted) else []
        return self._granted

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        history = self._histories.get(request.request_id)
        if history is None:
            return
        for proposals in (history.proposals, self._shared_proposals):
            proposals.add(1, num_drafts > 0)
        history.own.add(num_drafts, num_accepted)
        self._shared.add(num_drafts, num_accepted)
        self._untried = None
        self._estimate(history)
        self._settled_until = 0
        if num_accepted:
            history.wait = _FIRST_WAIT

    def forget(self, request: Request) -> None:
        self._histories.pop(request.request_id, None)

    def _decide(self, rows: Sequence[Request]) -> None:
        num_rows, known = len(rows), self._histories
        histories = [known.get(request.request_id) or self._begin(request) for request in rows]
        extras = [self._extra_seconds(request) for request in rows]
        plain = self._seconds_of(num_rows) + sum(extras)
        for history in histories:
            history.allowed = 0
        # Mostly none pays even if positions cost nothing, and this is asked between short steps.
        expected = num_rows + sum([history.gain_at_best for history in histories])
        seconds = plain + self._costs.seconds_per_drafted_step + self._costs.seconds_per_drafted_row
        if expected * plain > _LEAST_GAIN * num_rows * seconds:
            self._allow(rows, histories, extras, plain)
        self._probe(rows, histories, extras, plain)

    def _allow(
        self,
        rows: Sequence[Request],
        histories: Sequence[_DraftHistory],
        extras: Sequence[float],
        plain: float,
    ) -> None:
        """Allow as many of the likeliest drafts as make tokens fastest.

        extras: seconds of each row for a position.  plain: seconds of a step without drafts.
        """
        # Of each draft: the tokens that it gains, its depth, the row's seconds for a position, the row.
        candidates: list[tuple[float, int, float, _DraftHistory]] = []
        for request, history, extra in zip(rows, histories, extras, strict=True):
            for depth, survival in enumerate(history.survivals[: _capped(request, self._max_drafts)]):
                gain = history.chance * survival
                if gain < _LEAST_SURVIVAL:
                    break
                candidates.append((gain, depth, extra, history))
        candidates.sort(key=itemgetter(0), reverse=True)
        costs, num_rows = self._costs, len(rows)
        expected, num_positions, num_granted = float(num_rows), float(num_rows), 0
        fastest = _LEAST_GAIN * expected / plain
        more = sum(extras) + costs.seconds_per_drafted_step  # beside those of the positions
        num_proposed = [0] * self._max_drafts  # by depth: a forward of what proposes for each
        for num, (gain, depth, extra, history) in enumerate(candidates, 1):
            expected += gain
            num_positions += history.chance
            more += history.chance * extra + self._proposal_seconds(num_proposed[depth])
            if depth == 0:
                more += costs.seconds_per_drafted_row
            num_proposed[depth] += 1
            speed = expected / (self._seconds_of(num_positions) + more)
            if speed > fastest:
                fastest, num_granted = speed, num
        for _, _, _, history in candidates[:num_granted]:
            history.allowed += 1

    def _begin(self, request: Request) -> _DraftHistory:
        history = self._histories[request.request_id] = _DraftHistory(self._max_drafts)
        if self._untried is None:
            self._untried = history
            self._estimate(history)
        else:
            untried = self._untried
            history.chance, history.survivals = untried.chance, untried.survivals
            history.gain_at_best = untried.gain_at_best
        return history

    def _probe(
        self,
        rows: Sequence[Request],
        histories: Sequence[_DraftHistory],
        extras: Sequence[float],
        plain: float,
    ) -> None:
        """Have rows without drafts try one after a while, where drafts that are right would pay.

        plain: seconds of a step without drafts.
        """
        per_step = _PROBING_SHARE * plain
        self._probing_seconds += per_step * (self._step - self._decided_at)
        self._decided_at = self._step
        due: list[_DraftHistory] = []
        extra_seconds = 0.0
        for request, history, extra in zip(rows, histories, extras, strict=True):
            if history.allowed:
                history.probe_at = 0
            elif not history.probe_at:
                history.probe_at = self._step + history.wait
            elif self._step >= history.probe_at:
                if self._could_pay(request, extra, len(rows)):
                    due.append(history)
                    extra_seconds += extra
                    continue
                self._wait_longer(history)
            if history.probe_at:
                self._settled_until = min(self._settled_until, history.probe_at)
        if not due:
            return
        num_rows, costs = len(rows), self._costs
        of_row = self._seconds_of(num_rows + 1) - self._seconds_of(num_rows) + self._proposal_seconds(0)
        of_row += costs.seconds_per_drafted_row
        # A long time without tries must not be followed by several of all rows.
        most = costs.seconds_per_drafted_step + num_rows * of_row + sum(extras)
        left = min(self._probing_seconds, most)
        # In one step, as a step with drafts costs more than its parts: those around it wait for it.
        seconds = costs.seconds_per_drafted_step + len(due) * of_row + extra_seconds
        if seconds > left:
            # Contexts grow meanwhile, and so does what a try costs.
            num_steps = max(int((seconds - left) / per_step), _FIRST_WAIT)
            self._settled_until = min(self._settled_until, self._step + 1 + num_steps)
        else:
            left -= seconds
            for history in due:
                history.allowed = 1
                self._wait_longer(history)
            self._settled_until = self._step + 1  # only in this step
        self._probing_seconds = left

    def _wait_longer(self, history: _DraftHistory) -> None:
        history.wait = min(2 * history.wait, _LONGEST_WAIT)
        history.probe_at = self._step + history.wait

    def _could_pay(self, request: Request, extra: float, num_rows: int) -> bool:
        limit, costs = _capped(request, self._max_drafts), self._costs
        seconds = self._seconds_of(num_rows + limit) + (num_rows + limit) * extra
        seconds += costs.seconds_per_drafted_step + costs.seconds_per_drafted_row
        seconds += limit * self._proposal_seconds(0)
        least = _LEAST_GAIN * num_rows / (self._seconds_of(num_rows) + num_rows * extra)
        return (num_rows + limit) / seconds > least

    def _proposal_seconds(self, num_rows: int) -> float:
        """Marginal seconds to propose for one more row, where `num_rows` rows have drafts of that depth."""
        seconds = self._proposing
        while len(seconds) <= num_rows:
            count = len(seconds)
            seconds.append(self._costs.of_proposals(count + 1) - self._costs.of_proposals(count))
        return seconds[num_rows]

    def _extra_seconds(self, request: Request) -> float:
        """Seconds per position of this row on top of the shared step cost.

        Attention over its context, and a draw if it samples.
        """
        costs = self._costs
        seconds = len(request.token_ids) * costs.seconds_per_read
        return seconds + costs.seconds_per_draw if request.sampling.temperature > 0.0 else seconds

    def _estimate(self, history: _DraftHistory) -> None:
        history.chance = _blended(history.proposals, self._shared_proposals, 0)
        survival, survivals = 1.0, []
        for depth in range(self._max_drafts):
            survival *= _blended(history.own, self._shared, depth)
            survivals.append(survival)
        history.survivals = survivals
        history.gain_at_best = history.chance * sum(survivals)

    def _seconds_of(self, num_positions: float) -> float:
        seconds, whole = self._seconds, int(num_positions)
        while len(seconds) <= whole + 1:
            # Measurements are noisy, but more positions never take less.
            seconds.append(max(seconds[-1], self._costs.of(len(seconds))))
        return seconds[whole] + (num_positions - whole) * (seconds[whole + 1] - seconds[whole])


def _blended(own: _Chances, shared: _Chances, depth: int) -> float:
    """The chance at a depth by a request's own observations and those of all."""
    prior = shared.hits[depth] / shared.trials[depth]
    return (own.hits[depth] + _SHARED_WEIGHT * prior) / (own.trials[depth] + _SHARED_WEIGHT)


def make_limit(costs: StepCosts | None, max_drafts: int) -> DraftLimit:
    """costs: None for the same limit in every step."""
    return FixedLimit(max_drafts) if costs is None else SurvivalLimit(costs, max_drafts)


def _capped(request: Request, num_drafts: int) -> int:
    """`num_drafts`, capped by the request's `max_draft_tokens`."""
    limit = request.sampling.max_draft_tokens
    return num_drafts if limit is None else min(limit, num_drafts)
