"""What a step spends. Knows requests, no blocks: those are the cache's."""

from __future__ import annotations

from typing import Protocol

from engine_svc.request import Request


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
