"""How many requests may be on their way to a first token at once. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service_kit.errors import AlreadyExists, ResourceExhausted


@dataclass(slots=True)
class Ticket:
    """One request's share of the queue, given back at its first output or its end, whichever is first."""

    num_prompt_tokens: int = 0
    is_queued: bool = True


class Admission:
    """Counts queued requests and their prompt tokens, refuses what is too much, and knows the ids in use."""

    def __init__(self, max_queued_requests: int, max_queued_prompt_tokens: int) -> None:
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_prompt_tokens
        self._num_queued = 0
        self._num_queued_tokens = 0
        self._request_ids: set[str] = set()

    @property
    def num_queued(self) -> int:
        """Requests that have no output yet."""
        return self._num_queued

    @contextmanager
    def claim(self, request_id: str) -> Iterator[None]:
        """Reserve the id a client chose, while its request is in flight. An empty id reserves nothing."""
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
        """As `claim`, of a request that was admitted elsewhere: one that has the id already keeps it."""
        if request_id in self._request_ids:
            yield
            return
        with self.claim(request_id):
            yield

    @contextmanager
    def queue(self) -> Iterator[Ticket]:
        """A place in the queue. Raises ResourceExhausted when there is none."""
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
        """Count the prompt, once its length is known. Raises ResourceExhausted when too many tokens wait."""
        # One prompt alone always fits: the limit protects memory that many of them share.
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
        """Give a place back; harmless when it has been."""
        if ticket.is_queued:
            ticket.is_queued = False
            self._num_queued -= 1
            self._num_queued_tokens -= ticket.num_prompt_tokens
