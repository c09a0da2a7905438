"""Budgets of a step. Knows requests, no blocks: those belong to the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Protocol

from engine_svc.core.request import Request


class Budget(Protocol):
    """A limited resource of a step that requests spend with the tokens granted to them."""

    def begin_step(self) -> None: ...

    def admits(self, request: Request) -> bool:
        """Whether a waiting request may enter in this step. If not, admission continues with the next one.

        A budget that should end the admission of the step instead returns True and grants no tokens.
        """
        ...

    def clip(self, request: Request, num_tokens: int) -> int:
        """How many of `num_tokens` the request can have. Changes nothing; 0 means none in this step."""
        ...

    def take(self, request: Request, num_tokens: int) -> None:
        """Spend granted tokens."""

    def give_back(self, request: Request, num_tokens: int) -> None:
        """Undo `take` for a request that was planned in this step and then preempted."""


class Restriction:
    """A budget that lets only some requests run, together on at most `max_num_tokens` per step."""

    def __init__(self, request_ids: Collection[str], max_num_tokens: int) -> None:
        self._request_ids = request_ids
        self._max_num_tokens = max_num_tokens
        self._remaining = 0

    def begin_step(self) -> None:
        self._remaining = self._max_num_tokens

    def admits(self, request: Request) -> bool:
        return request.request_id in self._request_ids

    def clip(self, request: Request, num_tokens: int) -> int:
        return min(num_tokens, self._remaining) if request.request_id in self._request_ids else 0

    def take(self, request: Request, num_tokens: int) -> None:
        self._remaining -= num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        self._remaining += num_tokens


class PipelineTurns:
    """A budget by which a request that samples takes part again once its step has passed every stage.

    Before that its token cannot be known, and a step that needs it would keep the first stage waiting.
    """

    def __init__(self, num_stages: int) -> None:
        self._sampling: deque[set[Request]] = deque(maxlen=num_stages)  # in the last steps, this one included

    def begin_step(self) -> None:
        self._sampling.append(set())

    def admits(self, request: Request) -> bool:
        return not any(request in rows for rows in self._sampling)

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens if self.admits(request) else 0

    def take(self, request: Request, num_tokens: int) -> None:
        if request.last_row_sampled:
            self._sampling[-1].add(request)

    def give_back(self, request: Request, num_tokens: int) -> None:
        self._sampling[-1].discard(request)


class ChunkEnds:
    """A budget by which chunks of a prompt end with blocks, where a state is written.

    The last tokens, after the last state that an equal prompt can hit, are computed in a step of their own.
    """

    def __init__(self, block_size: int, max_num_tokens: int) -> None:
        """max_num_tokens: of a chunk."""
        self._block_size = block_size
        self._is_reachable = block_size <= max_num_tokens

    def begin_step(self) -> None: ...

    def admits(self, request: Request) -> bool:
        """All: one whose chunk would not reach the end of a block ends the admission."""
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        start, block_size = request.num_computed_tokens, self._block_size
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return num_tokens
        end = start + num_tokens
        if start < request.parts_at < end:
            return request.parts_at - start
        last = (request.num_tokens - 1) // block_size * block_size
        if start < last < end:
            return last - start
        if end < request.num_tokens and self._is_reachable:
            return end // block_size * block_size - start
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None: ...

    def give_back(self, request: Request, num_tokens: int) -> None: ...
