"""Requests that another frontend may adopt: what they have yielded so far, and how they ended.

Belongs to the engine thread. Knows no wire and no session.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import nan

from engine_svc.request import Request, RequestOutput
from engine_svc.step import PromptPlaces, TokenLogprobs
from engine_svc.step_output import FinishedRow, StepOutput
from engine_svc.told import Told


@dataclass(slots=True)
class _Kept:
    request: Request
    counts: list[int]  # of its output tokens, as they came step by step
    num_cached_tokens: int | None = None
    finished: FinishedRow | None = None
    told: TokenLogprobs | None = None  # of its newest output tokens
    prompt: list[PromptPlaces] = field(default_factory=list)


class KeptRequests:
    """By request id, until they are forgotten. Costs nothing of a step in which none of them has a row."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def keep(self, request: Request) -> None:
        """Remember what comes of `request`, whose outputs before this engine are one step."""
        num_before = request.num_output_tokens
        self._kept[request.request_id] = _Kept(request, [num_before] if num_before else [])

    def forget(self, request_id: str) -> None:
        """Nobody adopts it any more. Unknown ids are ignored."""
        self._kept.pop(request_id, None)

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Take in what a step yielded."""
        if not self._kept:
            return
        for output in outputs:
            kept = self._kept.get(output.request_id)
            if kept is None:
                continue
            if output.new_token_ids:
                kept.counts.append(len(output.new_token_ids))
            if output.num_cached_tokens is not None:
                kept.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None and not output.continues:
                kept.finished = FinishedRow(0, output.finish_reason, output.stop_token_id, output.message)

    def note_told(self, request_id: str, told: Told, handle: int) -> None:
        """Take in what was told of its tokens, under the handle that it has now."""
        kept = self._kept.get(request_id)
        if kept is None:
            return
        news = told.sampled.get(handle)
        if news is not None and kept.told is not None:
            kept.told.extend(news)
        elif news is not None:
            kept.told = news.part(0, len(news.ranks))
        kept.prompt += told.prompts.get(handle, [])

    def row(self, request_id: str, handle: int, step_number: int) -> StepOutput:
        """All that it has yielded, as one step for `handle`; KeyError where it is not kept."""
        kept = self._kept[request_id]
        token_ids = kept.request.output_token_ids
        output = StepOutput(step_number, [handle], [len(token_ids)], token_ids)
        if len(kept.counts) > 1:
            output.parts.append((0, list(kept.counts)))
        if kept.num_cached_tokens is not None:
            output.first.append((0, kept.num_cached_tokens))
        if kept.finished is not None:
            output.finished.append(kept.finished)
        told = _told_of(kept) if token_ids else None
        if told is not None or kept.prompt:
            sampled = {} if told is None else {handle: _padded(told, len(token_ids))}
            output.told = Told(sampled, {handle: list(kept.prompt)} if kept.prompt else {})
        return output


def _told_of(kept: _Kept) -> TokenLogprobs | None:
    """What is told of its newest tokens, be it nothing yet; None where it did not ask."""
    sampling = kept.request.sampling
    if kept.told is not None or not sampling.wants_logprobs:
        return kept.told
    # All its tokens are of an engine before. They have places all the same, and in them entries where later
    # ones have some, or what comes next would take theirs.
    return TokenLogprobs([], [], k=1 if sampling.logprobs or sampling.logprob_token_ids else 0)


def _padded(told: TokenLogprobs, num_tokens: int) -> TokenLogprobs:
    """With places in front for tokens of an engine before, of which nothing is known here."""
    num_missing = num_tokens - len(told.ranks)
    num_entries = num_missing * told.k
    padded = TokenLogprobs(
        [nan] * num_missing, [0] * num_missing, told.k, [0] * num_entries, [nan] * num_entries
    )
    padded.extend(told)
    return padded
