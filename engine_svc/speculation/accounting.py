"""Arithmetic of tokens that are planned but not known: drafts, and placeholders of steps in flight.

Knows requests and plans, no proposer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_svc.core.request import Request, RequestStatus
from engine_svc.core.step import StepPlan
from engine_svc.speculation.limit import DraftLimit

UNKNOWN_DRAFT = -1  # a draft whose value the scheduler does not know


def pad_with_drafts(
    request: Request, num_drafts: int, num_cached: int, *, max_model_len: int, max_tokens: int
) -> int:
    """Give a new request with one token to compute placeholder drafts; returns how many.

    They are never accepted. They make its row as long as the others: steps of equal rows are fast.
    max_tokens: of a step.
    """
    # The token that the row samples has to fit as well, and a row that fits no step would wait forever.
    if num_cached + 1 + num_drafts + 1 > max_model_len or num_drafts >= max_tokens:
        return 0
    request.draft_token_ids = [UNKNOWN_DRAFT] * num_drafts
    return num_drafts


def is_last_token_in_flight(request: Request) -> bool:
    """Whether the steps in flight sample every token that the request may still have."""
    num_expected = request.num_computed_tokens + 2 - request.num_placeholders
    return num_expected >= request.num_prompt_tokens + request.sampling.max_tokens


def roll_back_rejected(request: Request, num_rejected: int) -> None:
    """Undo the count of drafts that were not accepted. A preempted request counts from 0 anyway."""
    if request.status is RequestStatus.RUNNING:
        request.num_computed_tokens -= num_rejected
        if request.num_placeholders:
            request.num_placeholders -= num_rejected


class DraftGrants:
    """Gives running requests as many drafts of values unknown here as they may have in the next step.

    Those in the middle of their prompts have none. Where nothing changes, a step costs no work for each row.
    """

    def __init__(self, limit: DraftLimit) -> None:
        self._limit = limit
        # Of the last step, if all its requests were asked about and none has drafts.
        self._newest: Request | None = None
        self._num_rows = 0
        self._num_quiet = 0  # steps with the same rows that have no drafts either
        self._num_skipped = 0  # steps that the limit does not know of

    def grant(self, running: Sequence[Request]) -> None:
        """Give the drafts of the next step. running: in order of admission."""
        if self._num_quiet and len(running) == self._num_rows and running[-1] is self._newest:
            self._num_quiet -= 1
            self._num_skipped += 1
            return
        self._limit.skip(self._num_skipped)
        self._num_quiet = self._num_skipped = 0
        rows = [
            request
            for request in running
            if len(request.token_ids) + request.num_placeholders - request.num_computed_tokens == 1
            and request.samples
        ]
        granted = self._limit.grant(rows)
        if granted:
            for request, num_drafts in zip(rows, granted, strict=True):
                request.draft_token_ids = [UNKNOWN_DRAFT] * num_drafts
            return
        for request in rows:
            if request.draft_token_ids:
                request.draft_token_ids = []
        if rows and len(rows) == len(running):
            self._num_rows, self._newest = len(rows), rows[-1]
            self._num_quiet = self._limit.num_quiet_steps()

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See DraftLimit.note."""
        self._num_quiet = 0
        self._limit.note(request, num_drafts, num_accepted)

    def forget(self, request: Request) -> None:
        """See DraftLimit.forget."""
        self._limit.forget(request)


def note_drafts(plan: StepPlan, rows: Sequence[Request], drafts: Mapping[str, list[int]]) -> None:
    """Keep proposals for the next step, except for requests in the middle of their prompts."""
    for request, samples in zip(rows, plan.samples, strict=True):
        if samples and request.status is RequestStatus.RUNNING:
            request.draft_token_ids = drafts.get(request.request_id, [])


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Drafts and acceptances since the start."""

    num_drafts: int = 0  # rows of steps that had any
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # index 0 is the first draft of a row


class DraftCounter:
    """Counts drafts, and accepted drafts by their position in a row."""

    def __init__(self) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted: list[int] = []

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one row; the accepted ones are its first."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        self._accepted += [0] * (num_drafts - len(self._accepted))
        for position in range(num_accepted):
            self._accepted[position] += 1

    def stats(self) -> DraftStats:
        return DraftStats(
            self._num_drafts, self._num_draft_tokens, sum(self._accepted), tuple(self._accepted)
        )
