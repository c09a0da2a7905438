"""What a step spends. Knows requests, no blocks: those are the cache's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from engine_svc.core.request import Request


class Budget(Protocol):
    """Something finite that a step spends on requests, in tokens granted."""

    def begin_step(self) -> None:
        """Fill up for a new step."""

    def admits(self, request: Request) -> bool:
        """Whether a waiting request could enter in this step. If not, it is passed over for the next.

        A budget that should rather end the admission of a step says yes, and grants nothing.
        """
        ...

    def clip(self, request: Request, num_tokens: int) -> int:
        """How many of `num_tokens` the request can have. Changes nothing; 0 means not in this step."""
        ...

    def take(self, request: Request, num_tokens: int) -> None:
        """Spend what was granted."""

    def give_back(self, request: Request, num_tokens: int) -> None:
        """Undo `take` for a request that was planned in this step and then preempted."""


class Restriction:
    """Lets only some requests run, all of them on no more than so many tokens a step."""

    def __init__(self, request_ids: Collection[str], max_num_tokens: int) -> None:
        self._request_ids = request_ids
        self._max_num_tokens = max_num_tokens
        self._remaining = 0

    def begin_step(self) -> None:
        """Nothing is spent."""
        self._remaining = self._max_num_tokens

    def admits(self, request: Request) -> bool:
        """Whether it is one of them."""
        return request.request_id in self._request_ids

    def clip(self, request: Request, num_tokens: int) -> int:
        """What is left, for one of them."""
        return min(num_tokens, self._remaining) if request.request_id in self._request_ids else 0

    def take(self, request: Request, num_tokens: int) -> None:
        """Spend tokens."""
        self._remaining -= num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        """Return the tokens of a row that left the plan."""
        self._remaining += num_tokens
