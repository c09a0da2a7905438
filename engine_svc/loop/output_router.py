"""Where the outputs of each request go, and what is kept of those that may go elsewhere one day.

Belongs to the engine thread. Knows no scheduler and no wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan

from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import PromptTokenLogprobs, StepPlan, StepResult, TokenLogprobs
from engine_svc.loop.mailbox import Add, Adopt, Outbox
from engine_svc.loop.step_output import FinishedRow, LogprobDeltas, LogprobRouter, StepOutput


@dataclass(slots=True)
class _DetachedOutput:
    request: Request
    counts: list[int]  # of its output tokens, as they came step by step
    num_cached_tokens: int | None = None
    finished: FinishedRow | None = None
    token_logprobs: TokenLogprobs | None = None  # of its newest output tokens
    prompt: list[PromptTokenLogprobs] = field(default_factory=list)


class DetachedOutputs:
    """By request id, until they are forgotten. Costs nothing of a step in which none of them has a row."""

    def __init__(self) -> None:
        self._detached: dict[str, _DetachedOutput] = {}

    def __len__(self) -> int:
        return len(self._detached)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._detached

    def keep(self, request: Request) -> None:
        """Remember what comes of `request`, whose outputs before this engine are one step."""
        num_before = request.num_output_tokens
        self._detached[request.request_id] = _DetachedOutput(request, [num_before] if num_before else [])

    def forget(self, request_id: str) -> None:
        """Nobody adopts it any more. Unknown ids are ignored."""
        self._detached.pop(request_id, None)

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Take in what a step yielded."""
        if not self._detached:
            return
        for output in outputs:
            detached = self._detached.get(output.request_id)
            if detached is None:
                continue
            if output.new_token_ids:
                detached.counts.append(len(output.new_token_ids))
            if output.num_cached_tokens is not None:
                detached.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None and not output.continues:
                detached.finished = FinishedRow(0, output.finish_reason, output.stop_token_id, output.message)

    def note_logprobs(self, request_id: str, token_logprobs: LogprobDeltas, handle: int) -> None:
        """Take in what was told of its tokens, under the handle that it has now."""
        detached = self._detached.get(request_id)
        if detached is None:
            return
        news = token_logprobs.sampled.get(handle)
        if news is not None and detached.token_logprobs is not None:
            detached.token_logprobs.extend(news)
        elif news is not None:
            detached.token_logprobs = news.part(0, len(news.ranks))
        detached.prompt += token_logprobs.prompts.get(handle, [])

    def row(self, request_id: str, handle: int, step_number: int) -> StepOutput:
        """All that it has yielded, as one step for `handle`; KeyError where it is not kept."""
        detached = self._detached[request_id]
        token_ids = detached.request.output_token_ids
        output = StepOutput(step_number, [handle], [len(token_ids)], token_ids)
        if len(detached.counts) > 1:
            output.parts.append((0, list(detached.counts)))
        if detached.num_cached_tokens is not None:
            output.first.append((0, detached.num_cached_tokens))
        if detached.finished is not None:
            output.finished.append(detached.finished)
        token_logprobs = _sampled_logprobs(detached) if token_ids else None
        if token_logprobs is not None or detached.prompt:
            sampled = {} if token_logprobs is None else {handle: _padded(token_logprobs, len(token_ids))}
            output.token_logprobs = LogprobDeltas(
                sampled, {handle: list(detached.prompt)} if detached.prompt else {}
            )
        return output


def _sampled_logprobs(detached: _DetachedOutput) -> TokenLogprobs | None:
    """What is told of its newest tokens, be it nothing yet; None where it did not ask."""
    sampling = detached.request.sampling
    if detached.token_logprobs is not None or not sampling.wants_logprobs:
        return detached.token_logprobs
    # All its tokens are of an engine before. They have places all the same, and in them entries where later
    # ones have some, or what comes next would take theirs.
    return TokenLogprobs([], [], k=1 if sampling.logprobs or sampling.logprob_token_ids else 0)


def _padded(token_logprobs: TokenLogprobs, num_tokens: int) -> TokenLogprobs:
    """With places in front for tokens of an engine before, of which nothing is known here."""
    num_missing = num_tokens - len(token_logprobs.ranks)
    num_entries = num_missing * token_logprobs.k
    padded = TokenLogprobs(
        [nan] * num_missing, [0] * num_missing, token_logprobs.k, [0] * num_entries, [nan] * num_entries
    )
    padded.extend(token_logprobs)
    return padded


class Routes:
    """The outbox and the handle of every request that has not ended, by its id; others read `by_id` alone."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[Outbox, int]] = {}
        self._logprob_router = LogprobRouter()
        self._detached = DetachedOutputs()
        self._detached_ids: dict[tuple[Outbox, int], str] = {}  # of those that are kept and have not ended

    def begin(self, command: Add) -> None:
        """A request comes in."""
        request_id, route = command.request.request_id, (command.outbox, command.handle)
        self.by_id[request_id] = route
        if command.keeps_outputs:
            self._detached.keep(command.request)
            self._detached_ids[route] = request_id

    def forget(self, request_id: str) -> None:
        """Nobody adopts it any more."""
        self._detached.forget(request_id)
        route = self.by_id.get(request_id)
        if route is not None:
            self._detached_ids.pop(route, None)

    def adopt(self, command: Adopt, step_number: int) -> dict[Outbox, StepOutput]:
        """Send the outputs of a request elsewhere from now on: all it has yielded so far, for a start.

        Who had it is told of its end. What is not kept any more ends as aborted for who adopts it.
        """
        request_id, handle = command.request_id, command.handle
        old, found = self.by_id.get(request_id), {}
        if old is not None:
            self._detached_ids.pop(old, None)
            found[old[0]] = _ended(old[1], step_number)
        if request_id not in self._detached:
            found[command.outbox] = _ended(handle, step_number)
            return found
        if old is not None:
            route = self.by_id[request_id] = (command.outbox, handle)
            self._detached_ids[route] = request_id
        found[command.outbox] = self._detached.row(request_id, handle, step_number)
        return found

    def token_logprobs(self, plan: StepPlan, result: StepResult) -> dict[Outbox, LogprobDeltas]:
        """What a result tells of tokens besides their ids, by who is to hear it."""
        return self._logprob_router.route(plan, result, self.by_id)

    def rows(
        self, outputs: list[RequestOutput], token_logprobs: Mapping[Outbox, LogprobDeltas], step_number: int
    ) -> dict[Outbox, StepOutput]:
        """What each outbox gets of these outputs, as one step."""
        steps: dict[Outbox, StepOutput] = {}
        routes, latest, ended = self.by_id, None, []
        self._detached.note(outputs)
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
                self._logprob_router.forget(output.request_id)
        for outbox, part in token_logprobs.items():
            step = steps.setdefault(outbox, StepOutput(step_number))
            step.add_logprobs(part)
            if self._detached_ids and step.token_logprobs is not None:
                self._note_logprobs(outbox, step.token_logprobs)
        if self._detached_ids:
            for route in ended:
                self._detached_ids.pop(route, None)
        return steps

    def _note_logprobs(self, outbox: Outbox, token_logprobs: LogprobDeltas) -> None:
        for handle in {*token_logprobs.sampled, *token_logprobs.prompts}:
            request_id = self._detached_ids.get((outbox, handle))
            if request_id is not None:
                self._detached.note_logprobs(request_id, token_logprobs, handle)


def _ended(handle: int, step_number: int) -> StepOutput:
    return StepOutput(step_number, [handle], [0], finished=[FinishedRow(0, FinishReason.ABORT)])
