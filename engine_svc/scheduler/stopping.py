"""When a request ends by itself. Pure; knows no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import RepetitionLimits


def note_limits(request: Request, max_model_len: int) -> None:
    """Write down at which lengths the request has to be looked at."""
    sampling = request.sampling
    request.max_num_tokens = min(request.num_prompt_tokens + sampling.max_tokens, max_model_len)
    request.check_from = request.max_num_tokens
    if sampling.repetition is not None:
        # Below min_tokens an output may repeat itself as it likes.
        request.check_from = min(request.check_from, request.num_prompt_tokens + sampling.min_tokens)


def why_stopped(request: Request) -> tuple[FinishReason, int | None] | None:
    """Why the newest token of `request` ends it, with the stop token that did; None: it goes on.

    The end-of-sequence token wins over a stop token, both over length, length over repetition. Of these only
    repetition looks at `min_tokens`: below it the sampler does not yield the tokens that end.
    """
    token = request.token_ids[-1]
    sampling = request.sampling
    if token == sampling.eos_token_id and not sampling.ignore_eos:
        return FinishReason.STOP, None
    if token in sampling.stop_token_ids:
        return FinishReason.STOP, token
    if len(request.token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH, None
    if (
        sampling.repetition is not None
        and len(request.token_ids) >= request.check_from
        and repeats_itself(request.token_ids, request.num_prompt_tokens, sampling.repetition)
    ):
        return FinishReason.REPETITION, None
    return None


def repeats_itself(token_ids: Sequence[int], num_prompt_tokens: int, limits: RepetitionLimits) -> bool:
    """Whether the output ends with a pattern of allowed length, as often in a row as the limits say."""
    num_output = len(token_ids) - num_prompt_tokens
    for length in range(limits.min_pattern_size, limits.max_pattern_size + 1):
        num_tokens = length * limits.min_count
        if num_tokens > num_output:
            return False
        start = len(token_ids) - num_tokens
        # Each token equals the one a pattern earlier; the last says no in most cases, and costs nothing.
        if (
            token_ids[-1] == token_ids[-1 - length]
            and token_ids[start + length :] == token_ids[start:-length]
        ):
            return True
    return False
