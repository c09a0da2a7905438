"""Limits the requests that wait for a first token, and keeps request ids unique. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service_kit.errors import AlreadyExists, ResourceExhausted


@dataclass(slots=True)
class Ticket:
    """One request's share of the queue, released at its first output or its end, whichever is first."""

    num_prompt_tokens: int = 0
    is_queued: bool = True


class Admission:
    """Counts queued requests and their prompt tokens, refuses those over the limits, tracks ids in use."""

    def __init__(self, max_queued_requests: int, max_queued_prompt_tokens: int) -> None:
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_prompt_tokens
        self._num_queued = 0
        self._num_queued_tokens = 0
        self._request_ids: set[str] = set()

    @property
    def num_queued(self) -> int:
        """Requests without output yet."""
        return self._num_queued

    @contextmanager
    def claim(self, request_id: str) -> Iterator[None]:
        """Reserve an id that a client chose, inside of the block. An empty id reserves nothing."""
        if request_id in self._request_ids:
            raise AlreadyExists(
                f"a request with the id {request_id!r} is in flight", reason="DUPLICATE_REQUEST_ID"
            )
        if request_id:
            self._request_ids.add(request_id)
        try:
            yield
        finally:
            self._request_ids.discard(request_id)

    @contextmanager
    def share(self, request_id: str) -> Iterator[None]:
        """As `claim`, but for an adopted request: an id that is in use already is no error."""
        if request_id in self._request_ids:
            yield
            return
        with self.claim(request_id):
            yield

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
