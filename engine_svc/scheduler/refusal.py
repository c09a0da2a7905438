"""Which requests an engine of these sizes can never serve. Pure; knows no queue."""

from __future__ import annotations

from engine_svc.cache.kv_cache import KVCache
from engine_svc.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.stopping import max_num_tokens


def refusal(request: Request, config: SchedulerConfig, kv_cache: KVCache) -> str | None:
    """Why this request could never be served, in words for its sender; None: it can be."""
    if not 0 < request.num_prompt_tokens <= request.num_tokens:
        return f"prompt has {request.num_prompt_tokens} tokens, must have at least 1"
    if request.num_tokens >= config.max_model_len:
        return f"request begins with {request.num_tokens} tokens, the model takes {config.max_model_len - 1}"
    if request.num_output_tokens >= request.sampling.max_tokens:
        num_given = request.num_output_tokens
        return f"{num_given} output tokens are there already, max_tokens is {request.sampling.max_tokens}"
    # The last token is never computed, but the step that yields it may carry drafts.
    num_tokens = max_num_tokens(request, config.max_model_len) - 1 + config.num_speculative_tokens
    num_blocks = kv_cache.num_blocks_for(num_tokens)
    if num_blocks > kv_cache.num_total_blocks:
        return f"request may need {num_blocks} KV blocks, the engine has {kv_cache.num_total_blocks}"
    return None
