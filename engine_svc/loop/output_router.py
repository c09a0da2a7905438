"""Where the outputs of each request go, and what is kept of those that may go elsewhere one day.

Belongs to the engine thread. Knows no scheduler and no wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan

from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import PromptPlaces, StepPlan, StepResult, TokenLogprobs
from engine_svc.loop.mailbox import Add, Adopt, Outbox
from engine_svc.loop.step_output import FinishedRow, StepOutput, Teller, Told


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


class Routes:
    """The outbox and the handle of every request that has not ended, by its id; others read `by_id` alone."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[Outbox, int]] = {}
        self._teller = Teller()
        self._kept = KeptRequests()
        self._kept_ids: dict[tuple[Outbox, int], str] = {}  # of those that are kept and have not ended

    def begin(self, command: Add) -> None:
        """A request comes in."""
        request_id, route = command.request.request_id, (command.outbox, command.handle)
        self.by_id[request_id] = route
        if command.is_kept:
            self._kept.keep(command.request)
            self._kept_ids[route] = request_id

    def forget(self, request_id: str) -> None:
        """Nobody adopts it any more."""
        self._kept.forget(request_id)
        route = self.by_id.get(request_id)
        if route is not None:
            self._kept_ids.pop(route, None)

    def adopt(self, command: Adopt, step_number: int) -> dict[Outbox, StepOutput]:
        """Send the outputs of a request elsewhere from now on: all it has yielded so far, for a start.

        Who had it is told of its end. What is not kept any more ends as aborted for who adopts it.
        """
        request_id, handle = command.request_id, command.handle
        old, found = self.by_id.get(request_id), {}
        if old is not None:
            self._kept_ids.pop(old, None)
            found[old[0]] = _ended(old[1], step_number)
        if request_id not in self._kept:
            found[command.outbox] = _ended(handle, step_number)
            return found
        if old is not None:
            route = self.by_id[request_id] = (command.outbox, handle)
            self._kept_ids[route] = request_id
        found[command.outbox] = self._kept.row(request_id, handle, step_number)
        return found

    def told(self, plan: StepPlan, result: StepResult) -> dict[Outbox, Told]:
        """What a result tells of tokens besides their ids, by who is to hear it."""
        return self._teller.tell(plan, result, self.by_id)

    def rows(
        self, outputs: list[RequestOutput], told: Mapping[Outbox, Told], step_number: int
    ) -> dict[Outbox, StepOutput]:
        """What each outbox gets of these outputs, as one step."""
        steps: dict[Outbox, StepOutput] = {}
        routes, latest, ended = self.by_id, None, []
        self._kept.note(outputs)
        for output in outputs:
            outbox, handle = routes[output.request_id]
            # Neighbours mostly have the same outbox, so its columns are looked up once for all of them.
            if outbox is not latest:
                step = steps.setdefault(outbox, StepOutput(step_number))
                handles, num_tokens, token_ids = step.handles, step.num_tokens, step.token_ids
                latest = outbox
            handles.append(handle)
            num_tokens.append(len(output.new_token_ids))
            token_ids += output.new_token_ids
            if output.num_cached_tokens is not None:
                step.first.append((len(handles) - 1, output.num_cached_tokens))
            if output.finish_reason is not None and not output.continues:
                end = FinishedRow(
                    len(handles) - 1, output.finish_reason, output.stop_token_id, output.message
                )
                step.finished.append(end)
                ended.append(routes.pop(output.request_id))
                self._teller.forget(output.request_id)
        for outbox, part in told.items():
            step = steps.setdefault(outbox, StepOutput(step_number))
            step.tell(part)
            if self._kept_ids and step.told is not None:
                self._note_told(outbox, step.told)
        if self._kept_ids:
            for route in ended:
                self._kept_ids.pop(route, None)
        return steps

    def _note_told(self, outbox: Outbox, told: Told) -> None:
        for handle in {*told.sampled, *told.prompts}:
            request_id = self._kept_ids.get((outbox, handle))
            if request_id is not None:
                self._kept.note_told(request_id, told, handle)


def _ended(handle: int, step_number: int) -> StepOutput:
    return StepOutput(step_number, [handle], [0], finished=[FinishedRow(0, FinishReason.ABORT)])
