"""Converts between protos and `Request`; the only file that knows both.

Checks everything that arrives, without relying on the frontend's checks. Knows no stream and no thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypedDict, Unpack

from engine_svc.cache.observer import StoredBlocks
from engine_svc.convert.feature import AddContext, WireFeatures, to_us
from engine_svc.convert.logprobs import add_logprobs, pack
from engine_svc.convert.sampling import to_sampling
from engine_svc.core.errors import RequestFailed
from engine_svc.core.facts import GENERATE, EngineFacts
from engine_svc.core.request import (
    NO_STOP_TOKEN,
    DraftUse,
    FinishReason,
    FirstOutput,
    InputSegment,
    PrefillStats,
    Request,
)
from engine_svc.loop.mailbox import AllBlocksRemoved, KVEvent, KVEventBatch, RemovedBlocks
from engine_svc.loop.step_output import FinishedRow, StepOutput
from engine_svc.tensors.source import TensorSource
from triptych.common.v1 import error_pb2, output_pb2, sampling_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, kv_pb2, step_pb2
from triptych_kit.errors import InvalidArgument, ServiceError, Unimplemented, to_details, to_number, to_parts
from triptych_kit.field_checks import check, to_token_ids
from triptych_kit.rules import MAX_LOGPROBS, VOCABULARY, MessageRules

# Columns are checked where they are decoded, tensors where they are read. Paths of sampling parameters begin
# at these.
_RULES = MessageRules(
    add_pb2.AddEntry,
    apart=("prompt_token_ids", "output_token_ids", "sampling", "pooling", "prompt_embeds", "media"),
)
_SAMPLING_RULES = MessageRules(sampling_pb2.SamplingParams)

_REASONS = {
    FinishReason.STOP: output_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: output_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: output_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: output_pb2.FINISH_REASON_ERROR,
    FinishReason.REPETITION: output_pb2.FINISH_REASON_REPETITION,
}


class RequestContext(TypedDict):
    """The surroundings of an ADD, as `to_request` takes them."""

    session_number: int
    facts: EngineFacts
    now: float
    features: WireFeatures
    tensors: TensorSource | None


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What the KV of a resumable request depends on beside its tokens."""

    cache_salt: str
    extra_keys: tuple[str, ...]


MIGRATED = "migrated"
# An unset or unknown reason counts as an abort by the client.
_ABORT_CAUSES = {
    engine_pb2.ABORT_REASON_DEADLINE: "deadline",
    engine_pb2.ABORT_REASON_STOP_STRING: "stop_string",
    engine_pb2.ABORT_REASON_SLOW_CONSUMER: "slow_consumer",
    engine_pb2.ABORT_REASON_MIGRATED: MIGRATED,
}


def to_request(
    entry: add_pb2.AddEntry,
    *,
    session_number: int,
    facts: EngineFacts,
    now: float,
    features: WireFeatures,
    tensors: TensorSource | None = None,
) -> Request:
    """Build the request of an ADD. tensors: source of its tensors; None: it may refer to none.

    Raises InvalidArgument or Unimplemented, or what `tensors` raises; they concern this request alone.
    """
    if entry.WhichOneof("params") is None:
        raise InvalidArgument("params is not set, it takes sampling or pooling", field="params")
    samples = entry.HasField("sampling")
    if samples and GENERATE not in facts.supported_tasks:
        supported = ", ".join(facts.supported_tasks)
        raise Unimplemented(
            f"the model samples no tokens, it supports {supported}",
            reason="TASK_NOT_SUPPORTED",
            metadata={"task": GENERATE, "supported_tasks": supported},
        )
    # The last token of a sequence is sampled and never computed.
    takes = facts.max_model_len - samples
    sampling = features.served(entry.sampling)
    _check_rules(entry, sampling, facts)
    # Checked by size before decoding: a prompt that is far too long must cost no more than this check.
    num_tokens = (len(entry.prompt_token_ids) + len(entry.output_token_ids)) // 4
    if num_tokens > takes:
        raise InvalidArgument(
            f"prompt has {num_tokens} tokens, the model takes {takes}",
            field="prompt_token_ids",
        )
    if entry.resumable:
        _check_resumable(entry)
    context = AddContext(
        facts, tensors, to_token_ids(entry.prompt_token_ids, "prompt_token_ids", facts.vocab_size)
    )
    parsed = features.parse(entry, context)
    prompt = context.token_ids
    output = to_token_ids(entry.output_token_ids, "output_token_ids", facts.vocab_size)
    num_tokens = len(prompt) + len(output)
    check(num_tokens <= takes, "prompt", num_tokens, f"{takes} positions at most")
    if not prompt:
        raise InvalidArgument("prompt has no tokens, it needs at least 1", field="prompt_token_ids")
    request = Request(
        # Readable in logs, and unique for anything a frontend may send.
        request_id=f"{entry.request_id}/{session_number}.{entry.handle}.{entry.attempt}",
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        sampling=to_sampling(
            entry,
            sampling,
            facts,
            num_prompt_tokens=len(prompt) if samples else 0,
            skips_reading_prefix_cache=any(one.skips_reading_prefix_cache for one in parsed),
        ),
        priority=entry.priority,
        account=entry.account,
        weight=entry.weight or 1,
        arrival_at=now - entry.age_ms / 1000,
        cache_salt=scoped_salt(entry.tenant, entry.cache_salt),
        extra_keys=context.cache_keys,
        variant=next((one.variant for one in parsed if one.variant), ""),
        job=next((one.job for one in parsed if one.job), ""),
        spans=context.spans,
        samples=samples,
        is_resumable=entry.resumable,
        extras={type(one.extra): one.extra for one in parsed},
    )
    # Its age counts for its order in the queue; its queue time here starts now.
    request.timeline.queued_at = now
    return request


def to_open_request(request: Request) -> OpenRequest:
    return OpenRequest(request.cache_salt, request.extra_keys)


def to_segment(
    entry: add_pb2.AddEntry, opened: OpenRequest, **context: Unpack[RequestContext]
) -> InputSegment:
    """The input segment of an ADD for a request that takes further input.

    Raises what `to_request` raises, and InvalidArgument if their KV cannot be the same.
    """
    turn = to_request(entry, **context)
    for field, of_turn, of_request in (
        ("cache_salt", turn.cache_salt, opened.cache_salt),
        ("adapter", turn.extra_keys, opened.extra_keys),
    ):
        if of_turn != of_request:
            raise InvalidArgument(f"{field} differs from that of the open request", field=field)
    if turn.sampling.skip_reading_prefix_cache:
        raise InvalidArgument(
            "a parameter needs the whole prompt computed again, which an input segment does not do",
            field="segment",
        )
    return InputSegment(turn.token_ids, turn.sampling, turn.arrival_at, turn.extras, spans=turn.spans)


def to_failure(error: ServiceError) -> RequestFailed:
    """`error` as the end of a request that runs."""
    violations = error.violations if isinstance(error, InvalidArgument) else []
    field = violations[0][0] if violations else ""
    return RequestFailed(error.code.name, error.message, error.reason, field)


def _check_resumable(entry: add_pb2.AddEntry) -> None:
    for name, is_set in (
        ("pooling", entry.HasField("pooling")),
        ("prompt_embeds", entry.HasField("prompt_embeds")),
        ("output_token_ids", entry.segment > 0 and bool(entry.output_token_ids)),
    ):
        if is_set:
            raise InvalidArgument(f"{name} is set, which a resumable request cannot have", field=name)


def scoped_salt(tenant: str, salt: str) -> str:
    """The salt of a tenant's blocks: tenants never share prefix cache entries, whatever their salts are."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant else salt


def _check_rules(entry: add_pb2.AddEntry, sampling: Mapping[str, Any], facts: EngineFacts) -> None:
    """Raise InvalidArgument for a field that breaks a rule."""
    limits = {VOCABULARY: facts.vocab_size, MAX_LOGPROBS: facts.max_logprobs}
    broken = _RULES.violations(entry, limits) or _SAMPLING_RULES.violations_in(sampling, limits)
    if broken:
        raise InvalidArgument(broken[0].message, field=broken[0].field)


def to_deadline(entry: add_pb2.AddEntry, now: float) -> float | None:
    """Deadline of the request on the engine's clock; None: it has none."""
    return now + entry.remaining_ms / 1000 if entry.HasField("remaining_ms") else None


def to_abort_cause(reason: engine_pb2.AbortReason) -> str:
    """The cause of an abort as used in trace spans."""
    return _ABORT_CAUSES.get(reason, "client")


def to_step(
    output: StepOutput, stop_token_ids: dict[int, frozenset[int]], features: WireFeatures, now: float
) -> step_pb2.Step:
    """The columns of a step. stop_token_ids: by handle, those that the requests themselves named.

    now: on the engine's clock; times become ages.
    """
    step = step_pb2.Step(
        step_number=output.step_number,
        handles=pack(array("I", output.handles)),
        token_ids=pack(array("I", output.token_ids)),
    )
    try:
        step.num_tokens = bytes(output.num_tokens)
    except ValueError:
        # A row of more than 255 tokens: merged for a reader that was far behind, which is rare.
        step.num_tokens_wide = pack(array("I", output.num_tokens))
    for row, counts in output.parts:
        step.parts.add(row=row, num_tokens=counts)
    if output.ended_at is not None:
        step.age_us = to_us(now - output.ended_at)
    for row, first in output.first:
        record = step.first.add(row=row, num_cached_tokens=first.num_cached_tokens)
        if first.prefill is not None:
            _set_prefill(record.prefill_stats, first, first.prefill)
    # End offset of each row's tokens. In most steps no request stops at a token, and it is not needed.
    stops = any(finished.reason is FinishReason.STOP for finished in output.finished)
    ends = list(accumulate(output.num_tokens)) if stops else []
    for finished in output.finished:
        end = step.finished.add(
            row=finished.row, reason=_REASONS[finished.reason], turn_ended=finished.turn_ended
        )
        if finished.reason is FinishReason.STOP and finished.stop_token_id != NO_STOP_TOKEN:
            last_token = output.token_ids[ends[finished.row] - 1]
            _set_stop(end, finished, last_token, stop_token_ids[output.handles[finished.row]])
        elif finished.reason is FinishReason.ERROR:
            end.message = finished.message
            end.error_fields.extend(f"sampling.{rule}" for rule in finished.error_fields)
            if finished.code:
                end.code = to_number(finished.code)
            if finished.error_reason:
                end.details = to_details(
                    finished.code, finished.message, finished.error_reason, finished.error_field
                )
        if finished.drafts is not None:
            _set_drafts(end.drafts, finished.drafts)
    if output.token_logprobs is not None:
        add_logprobs(step, output, output.token_logprobs)
    if output.extras:
        for row, handle in enumerate(output.handles):
            for extra in output.extras.get(handle, {}).values():
                features.write(step, row, extra, now)
    return step


def to_kv_batch(batch: KVEventBatch, engine_epoch: int) -> engine_pb2.SubscribeKvEventsResponse:
    """Changes of the prefix cache, with the cursor after them."""
    return engine_pb2.SubscribeKvEventsResponse(
        cursor=kv_pb2.KvCursor(engine_epoch=engine_epoch, seq=batch.seq),
        batch=kv_pb2.KvEventBatch(events=[_kv_event(event) for event in batch.events]),
    )


def to_kv_snapshot(
    blocks: Iterable[StoredBlocks], end: kv_pb2.KvCursor | None
) -> engine_pb2.SubscribeKvEventsResponse:
    """A chunk of the prefix cache's content. The last one has the cursor `end` after the whole snapshot."""
    chunk = kv_pb2.KvSnapshotChunk(blocks=[_kv_stored(block) for block in blocks], is_last=end is not None)
    return engine_pb2.SubscribeKvEventsResponse(cursor=end, snapshot=chunk)


def to_error_status(error: ServiceError) -> error_pb2.ErrorStatus:
    """`error` as data, with its google.rpc details."""
    code, message, details = to_parts(error)
    return error_pb2.ErrorStatus(code=code, message=message, details=details)


def _set_prefill(stats: step_pb2.PrefillStats, first: FirstOutput, prefill: PrefillStats) -> None:
    stats.num_prompt_tokens = prefill.num_prompt_tokens
    stats.num_computed_tokens = prefill.num_prompt_tokens - first.num_cached_tokens
    stats.num_chunks = prefill.num_chunks
    stats.queue_us, stats.prefill_us = to_us(prefill.queue_s), to_us(prefill.prefill_s)


def _set_drafts(record: step_pb2.DraftUse, drafts: DraftUse) -> None:
    record.num_proposed, record.num_accepted = drafts.num_proposed, drafts.num_accepted


def _set_stop(
    record: step_pb2.StepFinished, finished: FinishedRow, last_token: int, stop_token_ids: frozenset[int]
) -> None:
    # To the scheduler, the model's further end-of-sequence ids are stop tokens; to the frontend they are not.
    if finished.stop_token_id is not None and finished.stop_token_id in stop_token_ids:
        record.stop_token_id = finished.stop_token_id
    else:
        record.eos_token_id = last_token


def _kv_event(event: KVEvent) -> kv_pb2.KvEvent:
    match event:
        case StoredBlocks():
            return kv_pb2.KvEvent(stored=_kv_stored(event))
        case RemovedBlocks():
            removed = kv_pb2.KvBlockRemoved(block_hashes=event.block_hashes, group=event.group)
            return kv_pb2.KvEvent(removed=removed)
        case AllBlocksRemoved():
            return kv_pb2.KvEvent(cleared=kv_pb2.KvAllBlocksCleared())


def _kv_stored(stored: StoredBlocks) -> kv_pb2.KvBlockStored:
    return kv_pb2.KvBlockStored(
        block_hashes=stored.block_hashes,
        parent_hash=stored.parent_hash,
        token_ids=pack(array("I", stored.token_ids)),
        block_size=stored.block_size,
        group=stored.group,
        adapter=stored.variant,
    )
