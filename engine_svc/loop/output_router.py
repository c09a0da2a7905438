"""Routes the outputs of each request to the session that it belongs to, and keeps those that may move.

Belongs to the engine thread. Knows no scheduler and no wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine_svc.adoption.detached_outputs import DetachedOutput, DetachedOutputs
from engine_svc.core.request import FinishReason, RequestOutput
from engine_svc.core.step import TokenLogprobs
from engine_svc.loop.mailbox import Add, Adopt, Outbox
from engine_svc.loop.step_output import FinishedRow, LogprobDeltas, StepOutput


class OutputRouter:
    """The outbox and the handle of every request that has not ended. Others only read `by_id`."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[Outbox, int]] = {}
        self.ended_turns: list[str] = []  # requests that take further input since then
        self._detached = DetachedOutputs()

    def begin(self, command: Add) -> None:
        """Route the outputs of a new request."""
        self.by_id[command.request.request_id] = (command.outbox, command.handle)
        if command.keeps_outputs:
            self._detached.keep(command.request)

    def forget(self, request_id: str) -> None:
        """Keep no outputs of this request any more."""
        self._detached.forget(request_id)

    def adopt(self, command: Adopt, step_number: int) -> dict[Outbox, StepOutput]:
        """Move a request to another session, beginning with all of its earlier outputs.

        The session that had it gets an aborted request. So does the new one if the outputs are not kept.
        """
        request_id, handle = command.request_id, command.handle
        old, detached = self.by_id.get(request_id), self._detached.get(request_id)
        steps = {} if old is None else {old[0]: _aborted(old[1], step_number)}
        if detached is None:
            steps[command.outbox] = _aborted(handle, step_number)
            return steps
        if old is not None:
            self.by_id[request_id] = (command.outbox, handle)
        steps[command.outbox] = _whole(detached, handle, step_number)
        return steps

    def rows(
        self,
        outputs: list[RequestOutput],
        sampled: Mapping[str, TokenLogprobs],
        step_number: int,
        ended_at: float | None = None,
    ) -> dict[Outbox, StepOutput]:
        """The outputs of each outbox, as one step. sampled: their logprobs, by request.

        ended_at: when the step that produced them ended; None: none did.
        """
        steps: dict[Outbox, StepOutput] = {}
        routes, latest = self.by_id, None
        logprobs = self._logprobs_by_outbox(sampled)
        self._detached.note(outputs, sampled)
        for output in outputs:
            outbox, handle = routes[output.request_id]
            # Neighbours mostly have the same outbox, so its columns are looked up once for all of them.
            if outbox is not latest:
                step = steps.setdefault(outbox, StepOutput(step_number, ended_at=ended_at))
                handles, num_tokens, token_ids = step.handles, step.num_tokens, step.token_ids
                latest = outbox
            handles.append(handle)
            num_tokens.append(len(output.new_token_ids))
            token_ids += output.new_token_ids
            if output.first is not None:
                step.first.append((len(handles) - 1, output.first))
            if output.extras:
                step.extras[handle] = output.extras
            if output.finish_reason is not None:
                step.finished.append(_finished_row(len(handles) - 1, output, output.finish_reason))
                if output.continues:
                    self.ended_turns.append(output.request_id)
                else:
                    del routes[output.request_id]
        for outbox, deltas in logprobs.items():
            # Logprobs alone are of tokens behind the end of a turn.
            if outbox in steps:
                steps[outbox].add_logprobs(deltas)
        return steps

    def _logprobs_by_outbox(self, sampled: Mapping[str, TokenLogprobs]) -> dict[Outbox, LogprobDeltas]:
        """The logprobs of requests that have not ended, by session and handle."""
        deltas: dict[Outbox, LogprobDeltas] = {}
        for request_id, token_logprobs in sampled.items():
            if (route := self.by_id.get(request_id)) is not None:
                deltas.setdefault(route[0], LogprobDeltas()).sampled[route[1]] = token_logprobs
        return deltas


def _finished_row(row: int, output: RequestOutput, reason: FinishReason) -> FinishedRow:
    failure = output.failure
    ended = FinishedRow(
        row,
        reason,
        output.stop_token_id,
        output.message,
        drafts=output.drafts,
        turn_ended=output.continues,
    )
    if failure is None:
        return ended
    return replace(
        ended,
        code=failure.code,
        error_reason=failure.reason,
        error_field=failure.field,
        error_fields=failure.rules,
    )


def _aborted(handle: int, step_number: int) -> StepOutput:
    return StepOutput(step_number, [handle], [0], finished=[FinishedRow(0, FinishReason.ABORT)])


def _whole(detached: DetachedOutput, handle: int, step_number: int) -> StepOutput:
    """All outputs of a request as one step for `handle`."""
    token_ids, final = detached.request.output_token_ids, detached.final
    step = StepOutput(step_number, [handle], [len(token_ids)], token_ids)
    if len(detached.counts) > 1:
        step.parts.append((0, list(detached.counts)))
    if detached.first is not None:
        step.first.append((0, detached.first))
    if final is not None and final.finish_reason is not None:
        step.finished.append(_finished_row(0, final, final.finish_reason))
    token_logprobs = detached.token_logprobs()
    if token_logprobs is not None:
        step.token_logprobs = LogprobDeltas({handle: token_logprobs})
    if detached.extras:
        step.extras[handle] = detached.extras
    return step
