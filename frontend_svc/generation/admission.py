"""Limits the requests that wait for a first token. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych_kit.errors import ResourceExhausted


@dataclass(slots=True)
class Ticket:
    """One request's share of the queue, released at its first output or its end, whichever is first."""

    num_prompt_tokens: int = 0
    is_queued: bool = True


class Admission:
    """Counts queued requests and their prompt tokens, and refuses those over the limits."""

    def __init__(self, max_queued_requests: int, max_queued_prompt_tokens: int) -> None:
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_prompt_tokens
        self._num_queued = 0
        self._num_queued_tokens = 0

    @property
    def num_queued(self) -> int:
        """Requests without output yet."""
        return self._num_queued

    @contextmanager
    def queue(self) -> Iterator[Ticket]:
        """Queue a request inside of the block. Raises ResourceExhausted if the queue is full."""
        if self._num_queued >= self._max_requests:
            raise ResourceExhausted(
                f"{self._num_queued} requests wait already, the limit is {self._max_requests}",
                reason="QUEUE_FULL",
                retry_after_ms=1000,
            )
        ticket = Ticket()
        self._num_queued += 1
        try:
            yield ticket
        finally:
            self.leave_queue(ticket)

    def add_prompt(self, ticket: Ticket, num_prompt_tokens: int) -> None:
        """Count the prompt, when its length is known. Raises ResourceExhausted if too many tokens wait."""
        # A single prompt always fits: the limit protects memory that many of them share.
        if self._num_queued_tokens and self._num_queued_tokens + num_prompt_tokens > self._max_tokens:
            raise ResourceExhausted(
                f"{self._num_queued_tokens} prompt tokens wait already, {num_prompt_tokens} more exceed "
                f"the limit of {self._max_tokens}",
                reason="QUEUE_FULL",
                retry_after_ms=1000,
            )
        ticket.num_prompt_tokens = num_prompt_tokens
        self._num_queued_tokens += num_prompt_tokens

    def leave_queue(self, ticket: Ticket) -> None:
        """Release the ticket. Idempotent."""
        if ticket.is_queued:
            ticket.is_queued = False
            self._num_queued -= 1
            self._num_queued_tokens -= ticket.num_prompt_tokens
