"""Refuses requests and input segments that an engine can never serve. Pure; knows no queue."""

from __future__ import annotations

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import InputSegment, Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.turns import INPUT

MAX_SEGMENTS = 64  # of one request that wait for their turn


def refusal(request: Request, config: SchedulerConfig, kv_cache: KVCache) -> str | None:
    """Why this request can never be served, as a message for the client; None: it can be."""
    if not 0 < request.num_prompt_tokens <= request.num_tokens:
        return f"prompt has {request.num_prompt_tokens} tokens, must have at least 1"
    most = config.max_model_len - request.samples
    if request.num_tokens > most:
        return f"request begins with {request.num_tokens} tokens, the model takes {most}"
    if not request.samples:
        return _size_refusal(request.num_tokens, request.num_encoder_tokens, config, kv_cache)
    if request.num_output_tokens >= request.sampling.max_tokens:
        num_given = request.num_output_tokens
        return f"{num_given} output tokens are there already, max_tokens is {request.sampling.max_tokens}"
    num_tokens = request.num_prompt_tokens + request.sampling.max_tokens
    # The last token is never computed.
    num_computed = min(num_tokens, config.max_model_len) - 1
    return _size_refusal(num_computed, request.num_encoder_tokens, config, kv_cache)


def segment_refusal(
    request: Request | None, segment: InputSegment, config: SchedulerConfig, kv_cache: KVCache
) -> str | None:
    """Why `request` can never have this further input, as a message for the client; None: it can."""
    if request is None or not request.is_resumable:
        return "the request is not open for further input"
    if len(request.segments) >= MAX_SEGMENTS:
        return f"{MAX_SEGMENTS} input segments of the request wait for their turn already"
    if not segment.token_ids:
        return "input segment has 0 tokens, must have at least 1"
    if segment.sampling.max_tokens < 1:
        return f"max_tokens is {segment.sampling.max_tokens}, must be at least 1"
    # The present turn and those that are queued before this one may use all that they are allowed.
    longest = request.num_tokens if INPUT in request.blockers else request.max_num_tokens
    for queued in request.segments:
        longest += len(queued.token_ids) + queued.sampling.max_tokens
    longest += len(segment.token_ids)
    if longest >= config.max_model_len:
        return f"request could begin with {longest} tokens, the model takes {config.max_model_len - 1}"
    num_computed = min(longest + segment.sampling.max_tokens, config.max_model_len) - 1
    return _size_refusal(num_computed, request.num_encoder_tokens, config, kv_cache)


def _size_refusal(
    num_computed: int, num_encoder_tokens: int, config: SchedulerConfig, kv_cache: KVCache
) -> str | None:
    # The steps in flight when the last token is sampled may carry drafts.
    num_drafts = config.num_speculative_tokens * config.max_steps_in_flight
    num_blocks = kv_cache.max_blocks_for(num_computed + num_drafts, num_encoder_tokens)
    if num_blocks > kv_cache.num_total_blocks:
        return f"request may need {num_blocks} KV blocks, the engine has {kv_cache.num_total_blocks}"
    return None
