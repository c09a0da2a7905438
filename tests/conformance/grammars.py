"""The grammars of recorded cases, finite automata over token ids, in the place of a feature of the engine."""

from __future__ import annotations

from typing import Any

from engine_svc.core.extras import Extras
from engine_svc.core.request import FinishReason, Request, RequestOutput, Verdict
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.feature import SchedulerFeature

BLOCKER = "grammar"


class Automaton:
    """A language: transitions (low, high, next) of each state, of which the first that fits is taken."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._states = spec["states"]
        self._end = set(spec["end"])
        self._state = 0

    def accept(self, token_ids: list[int]) -> bool:
        """Follow the tokens; False at the first that is not allowed. Behind the end all are."""
        for token in token_ids:
            if self._state in self._end:
                return True
            following = self._following(self._state, token)
            if following is None:
                return False
            self._state = following
        return True

    def allowed(self, drafts: list[int], sampled: list[int] = []) -> list[int]:  # noqa: B006  Not changed.
        """The first of the drafts that may follow, behind tokens that were sampled; does not move."""
        state, kept = self._state, []
        for index, token in enumerate([*sampled, *drafts]):
            following = None if state in self._end else self._following(state, token)
            if following is None:
                break
            state = following
            if index >= len(sampled):
                kept.append(token)
        return kept

    def _following(self, state: int, token: int) -> int | None:
        return next((to for low, high, to in self._states[state] if low <= token <= high), None)


class Grammars(SchedulerFeature):
    """Blocks requests until their grammar is ready, ends those that leave it, and cuts drafts."""

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async
        self._pending_of: dict[str, int] = {}  # steps in flight in which a request samples
        self.by_id: dict[str, Automaton] = {}  # of requests that have not ended
        self.is_used = False

    def note(self, request: Request, spec: dict[str, Any] | None) -> None:
        """Call it before the request is added."""
        if spec is not None:
            self.by_id[request.request_id] = Automaton(spec)
            self.is_used = True
            request.blockers.add(BLOCKER)

    def on_add(self, request: Request) -> None:
        request.needs_verdict = request.request_id in self.by_id

    def on_finish(self, request: Request) -> None:
        self.by_id.pop(request.request_id, None)

    def verdict(self, request: Request, output: RequestOutput, extras: Extras) -> Verdict | None:
        is_kept = self.by_id[request.request_id].accept(output.new_token_ids)
        return None if is_kept else Verdict(FinishReason.ERROR)

    def masked(self, plan: StepPlan) -> list[list[Any]] | None:
        """The rows that get a mask, each with the number of its drafts that may be accepted."""
        rows = [row for row in _sampling(plan) if row[0] in self.by_id]
        waits = self._is_async and any(self._pending_of.get(name) for name, _ in rows)
        for name, _ in rows:
            self._pending_of[name] = self._pending_of.get(name, 0) + 1
        return None if waits else [[name, len(_known(drafts))] for name, drafts in rows]

    def end_step(self, plan: StepPlan) -> None:
        """The output of a step has come."""
        for name, _ in _sampling(plan):
            if name in self._pending_of:
                self._pending_of[name] -= 1

    def cut(self, drafts: dict[str, list[int]], sampled: dict[str, list[int]]) -> dict[str, list[int]]:
        """Proposals for the next step that come with `sampled`, as far as the languages allow them."""
        return {
            name: self.by_id[name].allowed(tokens, sampled.get(name, [])) if name in self.by_id else tokens
            for name, tokens in drafts.items()
        }

    def late(self, plan: StepPlan, drafts: dict[str, list[int]]) -> dict[str, Any]:
        """The drafts of a step in flight, of which only the number was known, and its masks."""
        spec, invalid, masked = {}, {}, []
        for name, scheduled in _sampling(plan):
            kept = drafts.get(name, [])[: len(scheduled)]
            if name in self.by_id:
                kept = self.by_id[name].allowed(kept)
                masked.append([name, len(kept)])
                if len(kept) < len(scheduled):
                    invalid[name] = len(scheduled) - len(kept)
            if scheduled:
                spec[name] = kept + [-1] * (len(scheduled) - len(kept))
        return {"spec": spec, "invalid": invalid, "masked": masked}


def _sampling(plan: StepPlan) -> list[tuple[str, list[int]]]:
    """The rows of a step that sample, with their drafts."""
    columns = zip(plan.request_ids, plan.samples, plan.draft_token_ids, strict=True)
    return [(name, drafts) for name, samples, drafts in columns if samples]


def _known(drafts: list[int]) -> list[int]:
    return drafts[: drafts.index(-1)] if -1 in drafts else drafts
