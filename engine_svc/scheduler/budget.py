"""What a step spends. Knows requests, no blocks: those are the cache's."""

from __future__ import annotations

from typing import Protocol

from engine_svc.request import Request


class Budget(Protocol):
    """Something finite that a step spends on requests, in tokens granted."""

    def begin_step(self) -> None:
        """Fill up for a new step."""

    def clip(self, request: Request, num_tokens: int) -> int:
        """How many of `num_tokens` the request can have. Changes nothing; 0 means not in this step."""
        ...

    def take(self, request: Request, num_tokens: int) -> None:
        """Spend what was granted."""

    def give_back(self, request: Request, num_tokens: int) -> None:
        """Undo `take` for a request that was planned in this step and then preempted."""


class TokenBudget:
    """The tokens of one step, shared by all requests. The scheduler spends `remaining` directly."""

    __slots__ = ("max_num_tokens", "remaining")

    def __init__(self, max_num_tokens: int) -> None:
        self.max_num_tokens = max_num_tokens
        self.remaining = max_num_tokens

    def begin_step(self) -> None:
        """Fill up for a new step."""
        self.remaining = self.max_num_tokens

    def clip(self, request: Request, num_tokens: int) -> int:
        """The part of `num_tokens` that is left."""
        return min(num_tokens, self.remaining)

    def take(self, request: Request, num_tokens: int) -> None:
        """Spend tokens."""
        self.remaining -= num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        """Return tokens of a row that left the plan."""
        self.remaining += num_tokens
