"""The thinking budget of a request, with the markers around its reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine_svc.core.extras import Extra


@dataclass(frozen=True, slots=True)
class ThinkingBudget(Extra):
    """How many tokens reasoning may have, and the markers around it."""

    num_tokens: int
    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    rules: ClassVar[tuple[str, ...]] = ("thinking_token_budget",)

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ValueError(f"num_tokens is {self.num_tokens}, must be at least 0")
        if not self.start_token_ids or not self.end_token_ids:
            raise ValueError("start_token_ids and end_token_ids must not be empty")


EXTRAS = (ThinkingBudget,)
