"""Decodes the packed columns of a step message into plain sequences. No other module knows their layout."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from frontend_svc.output.collector import DraftUse, Ending, EndReason
from frontend_svc.output.engine_times import EventKind, Progress
from frontend_svc.output.logprobs import LogprobColumns
from frontend_svc.output.processor import StepColumns
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import from_status

_REASONS = {
    output_pb2.FINISH_REASON_STOP: EndReason.STOP,
    output_pb2.FINISH_REASON_LENGTH: EndReason.LENGTH,
    output_pb2.FINISH_REASON_ABORT: EndReason.ABORT,
    output_pb2.FINISH_REASON_ERROR: EndReason.ERROR,
    output_pb2.FINISH_REASON_REPETITION: EndReason.REPETITION,
}

# Others are ignored, as those of a newer engine are.
_EVENTS = {
    step_pb2.STEP_EVENT_KIND_QUEUED: EventKind.QUEUED,
    step_pb2.STEP_EVENT_KIND_SCHEDULED: EventKind.SCHEDULED,
    step_pb2.STEP_EVENT_KIND_PREEMPTED: EventKind.PREEMPTED,
    step_pb2.STEP_EVENT_KIND_RESUMED: EventKind.RESUMED,
}


class MalformedStep(ValueError):
    """A step message with inconsistent columns: the engine violates the protocol."""


def read_step(step: step_pb2.Step, vocab_size: int = 0) -> StepColumns:
    """Raises MalformedStep. vocab_size: of the model; 0 if it is not known."""
    handles = _u32("handles", step.handles)
    num_rows = len(handles)
    counts: Sequence[int] = (
        step.num_tokens or _u32("num_tokens_wide", step.num_tokens_wide) or bytes(num_rows)
    )
    token_ids = _u32("token_ids", step.token_ids).tolist()
    # Usually each row has one token, which `count` checks much faster than `sum` adds.
    num_tokens = num_rows if counts.count(1) == num_rows else sum(counts)
    if len(counts) != num_rows or num_tokens != len(token_ids):
        raise MalformedStep(
            f"{num_rows} handles, {len(counts)} counts of {num_tokens} tokens, {len(token_ids)} ids"
        )
    if vocab_size and max(token_ids, default=0) >= vocab_size:
        raise MalformedStep(f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}")
    endings = {finished.row: _ending(finished) for finished in step.finished}
    cached = {first.row: first.num_cached_tokens for first in step.first}
    if max(endings, default=-1) >= num_rows or max(cached, default=-1) >= num_rows:
        raise MalformedStep(f"a finished or first row is beyond the {num_rows} rows")
    extras: dict[int, list[step_pb2.StepExtra]] = {}
    for extra in step.extras:
        if extra.row >= num_rows:
            raise MalformedStep(f"an extra row {extra.row} is beyond the {num_rows} rows")
        extras.setdefault(extra.row, []).append(extra)
    parts = {}
    for part in step.parts:
        if part.row >= num_rows or sum(part.num_tokens) != counts[part.row]:
            raise MalformedStep(
                f"parts of row {part.row} have {sum(part.num_tokens)} tokens of {num_rows} rows"
            )
        parts[part.row] = part.num_tokens
    logprobs = _sampled_logprobs(step, len(token_ids))
    progress = _progress(step, num_rows) if step.events or step.first else {}
    return StepColumns(handles, counts, token_ids, endings, cached, logprobs, extras, parts, progress)


def _progress(step: step_pb2.Step, num_rows: int) -> dict[int, Progress]:
    """Events of requests by row, for the few rows that have any."""
    by_row: dict[int, Progress] = {}
    for event in step.events:
        if event.row >= num_rows:
            raise MalformedStep(f"an event row {event.row} is beyond the {num_rows} rows")
        kind = _EVENTS.get(event.kind)
        if kind is not None:
            by_row.setdefault(event.row, Progress()).events.append((kind, 1000 * event.age_us))
    for first in step.first:
        progress = by_row.setdefault(first.row, Progress())
        progress.first_age_ns = 1000 * step.age_us
        if first.HasField("prefill_stats"):
            progress.prefill_ns = 1000 * first.prefill_stats.prefill_us
    return by_row


def _sampled_logprobs(step: step_pb2.Step, num_positions: int) -> LogprobColumns | None:
    if not step.sampled_logprobs:
        return None
    top = step.top_logprobs if step.HasField("top_logprobs") else None
    return read_logprobs(step.sampled_logprobs, step.sampled_ranks, top, num_positions)


def read_logprobs(
    logprobs: bytes, ranks: bytes, top: step_pb2.StepTopLogprobs | None, num_positions: int
) -> LogprobColumns:
    """Raises MalformedStep."""
    values, ranks_read = _f32("logprobs", logprobs), _u32("ranks", ranks)
    k = 0 if top is None else top.k
    top_ids = array("I") if top is None else _u32("top token_ids", top.token_ids)
    top_values = array("f") if top is None else _f32("top logprobs", top.logprobs)
    if len(values) != num_positions or len(ranks_read) != num_positions:
        raise MalformedStep(f"{len(values)} logprobs, {len(ranks_read)} ranks at {num_positions} positions")
    if len(top_ids) != k * num_positions or len(top_values) != k * num_positions:
        raise MalformedStep(f"{len(top_ids)} top ids, {len(top_values)} top logprobs, {k} a position")
    return LogprobColumns(values, ranks_read, k, top_ids, top_values)


def _u32(name: str, column: bytes) -> array[int]:
    values = array("I")
    _fill(values, name, column)
    return values


def _f32(name: str, column: bytes) -> array[float]:
    values = array("f")
    _fill(values, name, column)
    return values


def _fill(values: array[int] | array[float], name: str, column: bytes) -> None:
    try:
        values.frombytes(column)
    except ValueError as error:
        raise MalformedStep(f"{name} has {len(column)} bytes, no multiple of 4") from error
    if sys.byteorder == "big":
        values.byteswap()


def _ending(finished: step_pb2.StepFinished) -> Ending:
    if finished.reason == output_pb2.FINISH_REASON_UNSPECIFIED:
        raise MalformedStep("a finish reason is missing")
    reason, message = _REASONS.get(finished.reason), finished.message
    if reason is None:
        reason = EndReason.ERROR
        message = message or f"the engine ended it with finish reason {finished.reason}, unknown here"
    kind = finished.WhichOneof("stop")
    return Ending(
        reason,
        stop_token_id=finished.stop_token_id if kind == "stop_token_id" else None,
        eos_token_id=finished.eos_token_id if kind == "eos_token_id" else None,
        message=message,
        failure=from_status(finished.code, message, finished.details) if finished.code else None,
        drafts=_drafts(finished.drafts) if finished.HasField("drafts") else None,
        error_fields=tuple(finished.error_fields),
        turn_ended=finished.turn_ended,
    )


def _drafts(drafts: step_pb2.DraftUse) -> DraftUse:
    return DraftUse(drafts.num_proposed, drafts.num_accepted)
