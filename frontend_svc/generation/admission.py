"""Limits the requests that wait for a first token, which accounts share. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from triptych_kit.errors import ResourceExhausted
from triptych_kit.security.identity import Identity
from triptych_kit.shares import SharedLimit

_RETRY_AFTER_MS = 1000


@dataclass(slots=True)
class Ticket:
    """One request's part of the queue, released at its first output or its end, whichever is first."""

    account: str
    weight: int
    num_prompt_tokens: int = 0
    is_queued: bool = True


class Admission:
    """Counts queued requests and their prompt tokens, and refuses those over the limits.

    Over a limit those are admitted whose accounts have less than their share of it, see `SharedLimit`.
    """

    def __init__(self, max_queued_requests: int, max_queued_prompt_tokens: int) -> None:
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_prompt_tokens
        self._requests = SharedLimit(max_queued_requests)
        self._tokens = SharedLimit(max_queued_prompt_tokens)

    @property
    def num_queued(self) -> int:
        """Requests without output yet."""
        return self._requests.total

    @contextmanager
    def queue(self, identity: Identity) -> Iterator[Ticket]:
        """Queue a request of `identity` inside of the block. Raises ResourceExhausted if it has no room."""
        account, weight = identity.account, identity.weight
        if not self._requests.has_room(account, weight):
            raise _full(
                f"{self.num_queued} requests wait already, the limit is {self._max_requests}"
                f"{self._requests.words(account, weight)}"
            )
        ticket = Ticket(account, weight)
        self._requests.take(account, weight)
        try:
            yield ticket
        finally:
            self.leave_queue(ticket)

    def add_prompt(self, ticket: Ticket, num_prompt_tokens: int) -> None:
        """Count the prompt, when its length is known. Raises ResourceExhausted if too many tokens wait."""
        account, weight = ticket.account, ticket.weight
        # A single prompt always fits: the limit protects memory that many of them share.
        if self._tokens.total and not self._tokens.has_room(account, weight, num_prompt_tokens):
            raise _full(
                f"{self._tokens.total} prompt tokens wait already, {num_prompt_tokens} more exceed "
                f"the limit of {self._max_tokens}{self._tokens.words(account, weight)}"
            )
        ticket.num_prompt_tokens = num_prompt_tokens
        self._tokens.take(account, weight, num_prompt_tokens)

    def leave_queue(self, ticket: Ticket) -> None:
        """Release the ticket. Idempotent."""
        if ticket.is_queued:
            ticket.is_queued = False
            self._requests.give_back(ticket.account)
            self._tokens.give_back(ticket.account, ticket.num_prompt_tokens)


def _full(text: str) -> ResourceExhausted:
    return ResourceExhausted(text, reason="QUEUE_FULL", retry_after_ms=_RETRY_AFTER_MS)
