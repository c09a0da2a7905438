"""Routes the outputs of each request to the session that it belongs to, and keeps those that may move.

Belongs to the engine thread. Knows no scheduler and no wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import nan

from engine_svc.core.extras import Extras, merge_extras
from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult, TokenLogprobs
from engine_svc.loop.mailbox import Add, Adopt, Outbox
from engine_svc.loop.step_output import FinishedRow, LogprobDeltas, StepOutput


class OutputRouter:
    """The outbox and the handle of every request that has not ended. Others only read `by_id`."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[Outbox, int]] = {}
        self._detached = DetachedOutputs()
        # By outbox and handle: requests whose outputs are kept and that have not ended.
        self._detached_ids: dict[tuple[Outbox, int], str] = {}

    def begin(self, command: Add) -> None:
        """Route the outputs of a new request."""
        request_id, route = command.request.request_id, (command.outbox, command.handle)
        self.by_id[request_id] = route
        if command.keeps_outputs:
            self._detached.keep(command.request)
            self._detached_ids[route] = request_id

    def forget(self, request_id: str) -> None:
        """Keep no outputs of this request any more."""
        self._detached.forget(request_id)
        route = self.by_id.get(request_id)
        if route is not None:
            self._detached_ids.pop(route, None)

    def adopt(self, command: Adopt, step_number: int) -> dict[Outbox, StepOutput]:
        """Move a request to another session, beginning with all of its outputs so far.

        The session that had it gets an aborted request. So does the new one if the outputs are not kept.
        """
        request_id, handle = command.request_id, command.handle
        old, steps = self.by_id.get(request_id), {}
        if old is not None:
            self._detached_ids.pop(old, None)
            steps[old[0]] = _aborted(old[1], step_number)
        if request_id not in self._detached:
            steps[command.outbox] = _aborted(handle, step_number)
            return steps
        if old is not None:
            route = self.by_id[request_id] = (command.outbox, handle)
            self._detached_ids[route] = request_id
        steps[command.outbox] = self._detached.row(request_id, handle, step_number)
        return steps

    def token_logprobs(self, plan: StepPlan, result: StepResult) -> dict[Outbox, LogprobDeltas]:
        """The logprobs of a result by session, of requests that have not ended."""
        found: dict[Outbox, LogprobDeltas] = {}
        for row, token_logprobs in result.logprobs.items():
            if (route := self.by_id.get(plan.request_ids[row])) is not None:
                found.setdefault(route[0], LogprobDeltas()).sampled[route[1]] = token_logprobs
        return found

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
            if output.extras:
                step.extras[handle] = output.extras
            if output.finish_reason is not None and not output.continues:
                step.finished.append(_finished_row(len(handles) - 1, output, output.finish_reason))
                ended.append(routes.pop(output.request_id))
        for outbox, deltas in token_logprobs.items():
            step = steps.setdefault(outbox, StepOutput(step_number))
            step.add_logprobs(deltas)
            if self._detached_ids and step.token_logprobs is not None:
                self._note_logprobs(outbox, step.token_logprobs)
        if self._detached_ids:
            for route in ended:
                self._detached_ids.pop(route, None)
        return steps

    def _note_logprobs(self, outbox: Outbox, token_logprobs: LogprobDeltas) -> None:
        for handle in token_logprobs.sampled:
            request_id = self._detached_ids.get((outbox, handle))
            if request_id is not None:
                self._detached.note_logprobs(request_id, token_logprobs, handle)


def _finished_row(row: int, output: RequestOutput, reason: FinishReason) -> FinishedRow:
    return FinishedRow(row, reason, output.stop_token_id, output.message)


def _aborted(handle: int, step_number: int) -> StepOutput:
    return StepOutput(step_number, [handle], [0], finished=[FinishedRow(0, FinishReason.ABORT)])


@dataclass(slots=True)
class _DetachedOutput:
    """Everything that one request has produced, apart from its token ids, which are in the request."""

    request: Request
    counts: list[int]  # output tokens of each step
    num_cached_tokens: int | None = None
    finished: FinishedRow | None = None
    logprobs: LogprobDeltas = field(default_factory=LogprobDeltas)  # under handle 0
    extras: Extras = field(default_factory=dict)


class DetachedOutputs:
    """Outputs kept for sessions that may adopt the requests, by request id, until they are forgotten.

    A step without rows of such requests costs nothing.
    """

    def __init__(self) -> None:
        self._detached: dict[str, _DetachedOutput] = {}

    def __len__(self) -> int:
        return len(self._detached)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._detached

    def keep(self, request: Request) -> None:
        """Keep the outputs of `request`. Those that it has from an earlier engine count as one step."""
        num_before = request.num_output_tokens
        self._detached[request.request_id] = _DetachedOutput(request, [num_before] if num_before else [])

    def forget(self, request_id: str) -> None:
        """Drop the outputs of a request. Unknown ids are ignored."""
        self._detached.pop(request_id, None)

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Add the outputs of a step."""
        if not self._detached:
            return
        for output in outputs:
            detached = self._detached.get(output.request_id)
            if detached is None:
                continue
            if output.new_token_ids:
                detached.counts.append(len(output.new_token_ids))
            if output.extras:
                detached.extras = merge_extras(detached.extras, output.extras)
            if output.num_cached_tokens is not None:
                detached.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None and not output.continues:
                detached.finished = _finished_row(0, output, output.finish_reason)

    def note_logprobs(self, request_id: str, token_logprobs: LogprobDeltas, handle: int) -> None:
        """Add the logprobs of a step, which has the request under `handle`."""
        detached = self._detached.get(request_id)
        if detached is not None:
            detached.logprobs.merge(token_logprobs.row(handle, as_handle=0))

    def row(self, request_id: str, handle: int, step_number: int) -> StepOutput:
        """All outputs of a request as one step for `handle`. Raises KeyError if they are not kept."""
        detached = self._detached[request_id]
        token_ids = detached.request.output_token_ids
        output = StepOutput(step_number, [handle], [len(token_ids)], token_ids)
        if len(detached.counts) > 1:
            output.parts.append((0, list(detached.counts)))
        if detached.num_cached_tokens is not None:
            output.first.append((0, detached.num_cached_tokens))
        if detached.finished is not None:
            output.finished.append(detached.finished)
        sampled = _sampled_logprobs(detached) if token_ids else None
        if sampled is not None:
            output.token_logprobs = LogprobDeltas({handle: _padded(sampled, len(token_ids))})
        if detached.extras:
            output.extras[handle] = detached.extras
        return output


def _sampled_logprobs(detached: _DetachedOutput) -> TokenLogprobs | None:
    """The logprobs of its newest tokens, which may be none yet; None if it asked for none."""
    sampled, sampling = detached.logprobs.sampled.get(0), detached.request.sampling
    if sampled is not None or not sampling.wants_logprobs:
        return sampled
    # All its tokens are from an earlier engine. Their positions are padded all the same, with as many entries
    # as later ones have: otherwise logprobs of the next tokens would be read as theirs.
    return TokenLogprobs([], [], k=1 if sampling.logprobs or sampling.logprob_token_ids else 0)


def _padded(token_logprobs: TokenLogprobs, num_tokens: int) -> TokenLogprobs:
    """With NaN in front for tokens of an earlier engine, whose logprobs are not known here."""
    num_missing = num_tokens - len(token_logprobs.ranks)
    num_entries = num_missing * token_logprobs.k
    padded = TokenLogprobs(
        [nan] * num_missing, [0] * num_missing, token_logprobs.k, [0] * num_entries, [nan] * num_entries
    )
    padded.extend(token_logprobs)
    return padded
