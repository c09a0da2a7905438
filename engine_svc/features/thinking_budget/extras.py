"""What the feature attaches to requests and results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
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

    def encode(self) -> bytes:
        return json.dumps([self.num_tokens, self.start_token_ids, self.end_token_ids]).encode()

    @classmethod
    def decode(cls, data: bytes) -> ThinkingBudget:
        num_tokens, start_token_ids, end_token_ids = json.loads(data)
        return cls(num_tokens, tuple(start_token_ids), tuple(end_token_ids))


EXTRAS = (ThinkingBudget,)
