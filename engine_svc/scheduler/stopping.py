"""When a request ends by itself. Pure; knows no scheduler."""

from __future__ import annotations

from engine_svc.request import FinishReason, Request


def max_num_tokens(request: Request, max_model_len: int) -> int:
    """Tokens, prompt and output, at which the request ends by length."""
    return min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)


def why_stopped(request: Request) -> tuple[FinishReason, int | None] | None:
    """Why the newest token of `request` ends it, with the stop token that did; None: it goes on.

    The end-of-sequence token wins over a stop token, both over length. `min_tokens` is not looked at: below
    it the sampler does not yield such tokens.
    """
    token = request.token_ids[-1]
    sampling = request.sampling
    if token == sampling.eos_token_id and not sampling.ignore_eos:
        return FinishReason.STOP, None
    if token in sampling.stop_token_ids:
        return FinishReason.STOP, token
    if len(request.token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH, None
    return None
