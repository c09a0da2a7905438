"""The span of a request that has ended, with the attributes of vLLM and of the conventions. No content."""

from __future__ import annotations

from engine_svc.core.request import FinishReason, Request, Timeline
from engine_svc.features.request_spans.extras import TracedRequest
from triptych_kit.telemetry import conventions as names
from triptych_kit.telemetry.spans import SpanEvent, SpanRecord, Value

SPAN_NAME = "llm_request"
_MAX_EVENTS = 64


def span_of(request: Request, traced: TracedRequest, num_before: int, unix_ns_at_0: int) -> SpanRecord:
    """num_before: output tokens of an earlier engine.  unix_ns_at_0: when the engine's clock was 0."""

    def unix_ns(at: float) -> int:
        return unix_ns_at_0 + int(at * 1e9)

    timeline, sampling = request.timeline, request.sampling
    num_output_tokens = max(0, request.num_output_tokens - num_before)
    attributes: dict[str, Value] = {
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_ID: traced.request_id,
        names.REQUEST_ID_OF_VLLM: traced.request_id,
        names.ATTEMPT: traced.attempt,
        names.RESPONSE_MODEL: traced.model,
        names.REQUEST_N: 1,
        names.USAGE_NUM_SEQUENCES: 1,
        names.REQUEST_MAX_TOKENS: request.max_num_tokens - request.num_prompt_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_TOP_K: sampling.top_k,
        names.USAGE_INPUT_TOKENS: request.num_prompt_tokens,
        names.USAGE_PROMPT_TOKENS: request.num_prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: num_output_tokens,
        names.USAGE_COMPLETION_TOKENS: num_output_tokens,
        names.USAGE_CACHE_READ_TOKENS: request.num_cached_tokens,
        names.NUM_PREEMPTIONS: request.num_preemptions,
        **_latencies(timeline),
    }
    if request.drafts is not None:
        attributes[names.NUM_DRAFT_TOKENS] = request.drafts.num_proposed
        attributes[names.NUM_ACCEPTED_DRAFT_TOKENS] = request.drafts.num_accepted
    if request.finish_reason is not None:
        attributes[names.RESPONSE_FINISH_REASONS] = (request.finish_reason.value,)
    if request.abort_cause:
        attributes[names.CAUSE] = request.abort_cause
    events = [SpanEvent(name, unix_ns(at)) for name, at in timeline.events[:_MAX_EVENTS]]
    error = None
    if request.finish_reason is FinishReason.ERROR:
        verdict = request.verdict
        # Not the verdict's message, which may quote the request.
        error = (verdict and verdict.code) or "the engine ended the request with an error"
        attributes[names.ERROR_TYPE] = (verdict and verdict.code) or "INTERNAL"
    return traced.context.root(
        SPAN_NAME, unix_ns(timeline.queued_at), unix_ns(_end(timeline)), attributes, events, error
    )


def _latencies(timeline: Timeline) -> dict[str, Value]:
    """Seconds of the phases that the request has reached; those of the last one until its end."""
    end = _end(timeline)
    scheduled_at, first_token_at = timeline.scheduled_at, timeline.first_token_at
    queued_until = end if scheduled_at is None else scheduled_at
    latencies: dict[str, Value] = {
        names.LATENCY_TIME_IN_QUEUE: queued_until - timeline.queued_at,
        names.LATENCY_END_TO_END: end - timeline.queued_at,
    }
    if scheduled_at is not None:
        prefilled_until = end if first_token_at is None else first_token_at
        latencies[names.LATENCY_PREFILL] = prefilled_until - scheduled_at
        latencies[names.LATENCY_INFERENCE] = end - scheduled_at
    if first_token_at is not None:
        latencies[names.LATENCY_TIME_TO_FIRST_TOKEN] = first_token_at - timeline.queued_at
        latencies[names.LATENCY_DECODE] = end - first_token_at
    return latencies


def _end(timeline: Timeline) -> float:
    return timeline.queued_at if timeline.finished_at is None else timeline.finished_at
