"""What steps tell of tokens besides their ids, by handle, on its way to one session. Knows no wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from engine_svc.step import PromptPlaces, StepPlan, StepResult, TokenLogprobs

_Session = TypeVar("_Session")


@dataclass(slots=True)
class Told:
    """Of the tokens that a step brings to a handle, one entry a token; of places of its prompt, in order."""

    sampled: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompts: dict[int, list[PromptPlaces]] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """About what it weighs on the wire."""
        parts = [*self.sampled.values(), *(one.told for many in self.prompts.values() for one in many)]
        return sum(8 * (len(part.ranks) + len(part.top_token_ids)) for part in parts)

    def add(self, later: Told) -> None:
        """Take in what a later step tells. `later` stays as it is, and shares no list that grows."""
        for handle, told in later.sampled.items():
            if handle in self.sampled:
                self.sampled[handle].extend(told)
            else:
                self.sampled[handle] = told.part(0, len(told.ranks))
        for handle, places in later.prompts.items():
            self.prompts.setdefault(handle, []).extend(places)


class Teller:
    """Finds who is to be told what a result has, and tells each place of a prompt once.

    A preempted request computes its prompt again: what has been told of it by then is left out.
    """

    def __init__(self) -> None:
        self._next_place: dict[str, int] = {}  # of a prompt that is told of, by request id

    def tell(
        self, plan: StepPlan, result: StepResult, routes: Mapping[str, tuple[_Session, int]]
    ) -> dict[_Session, Told]:
        """By session, what the result of `plan` tells those who are still there."""
        if not result.logprobs and not result.prompt_logprobs:
            return {}
        found: dict[_Session, Told] = {}
        for row, told in result.logprobs.items():
            if (route := routes.get(plan.request_ids[row])) is not None:
                found.setdefault(route[0], Told()).sampled[route[1]] = told
        for row, places in result.prompt_logprobs.items():
            request_id = plan.request_ids[row]
            route = routes.get(request_id)
            # Nothing is noted of a request that has ended: nobody would forget it.
            if route is not None and (news := self._news(request_id, places)) is not None:
                found.setdefault(route[0], Told()).prompts[route[1]] = [news]
        return found

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._next_place.pop(request_id, None)

    def _news(self, request_id: str, places: PromptPlaces) -> PromptPlaces | None:
        first, num_places = places.first_position, len(places.told.ranks)
        start = self._next_place.get(request_id)
        self._next_place[request_id] = max(start or 0, first + num_places)
        if start is None:
            return places
        if start >= first + num_places:
            return None
        if start <= first:
            return places
        return PromptPlaces(start, places.told.part(start - first, num_places))
