"""The turns of a request: where one begins, when it ends. Pure; knows no queues and no blocks.

Most requests have one turn. A resumable request waits with its KV at the end of a turn, and its next input
segment begins another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine_svc.core.request import FinishReason, InputSegment, Request, Timeline
from engine_svc.core.sampling_params import RepetitionLimits

INPUT = "input"  # the blocker of a request between two turns, which waits for its next input segment


def note_limits(request: Request, max_model_len: int) -> None:
    """Set the lengths from which on the tokens of a turn have to be checked."""
    sampling = request.sampling
    request.max_num_tokens = min(request.num_prompt_tokens + sampling.max_tokens, max_model_len)
    request.check_from = request.max_num_tokens
    if sampling.repetition is not None:
        # Repetition is allowed below min_tokens.
        request.check_from = min(request.check_from, request.num_prompt_tokens + sampling.min_tokens)


def begin_turn(request: Request, segment: InputSegment, max_model_len: int, now: float) -> None:
    """Append an input segment. All tokens before the output of this turn count as prompt from now on.

    Times, end, drafts and cached tokens are recorded anew for each turn.
    """
    start = request.num_tokens
    request.spans += tuple(replace(span, start=start + span.start) for span in segment.spans)
    request.token_ids += segment.token_ids
    request.num_prompt_tokens = request.num_tokens
    request.sampling = segment.sampling
    request.end_token_ids = segment.sampling.end_token_ids
    request.extras = dict(segment.extras)
    request.blockers |= segment.blockers
    request.needs_verdict, request.verdict = False, None
    if segment.arrival_at is not None:
        request.arrival_at = segment.arrival_at
    request.timeline = Timeline(queued_at=now)
    request.finish_reason = request.drafts = None
    request.num_chunks = 0
    request.is_turn_cancelled = False
    note_limits(request, max_model_len)


def cancel_turn(request: Request) -> None:
    """Let the next token end the turn."""
    request.is_turn_cancelled = True
    request.check_from = 0


def why_stopped(request: Request) -> tuple[FinishReason, int | None] | None:
    """Why the newest token of `request` ends the turn, and the stop token if one did; None: it continues.

    The end-of-sequence token takes precedence over a stop token, both over length, length over a cancelled
    turn, that over repetition.
    Only repetition depends on `min_tokens` here: below it the sampler masks the tokens that end a turn.
    """
    token = request.token_ids[-1]
    sampling = request.sampling
    if token == sampling.eos_token_id and not sampling.ignore_eos:
        return FinishReason.STOP, None
    if token in sampling.stop_token_ids:
        return FinishReason.STOP, token
    if len(request.token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH, None
    if request.is_turn_cancelled:
        return FinishReason.ABORT, None
    if (
        sampling.repetition is not None
        and len(request.token_ids) >= request.check_from
        and repeats_itself(request.token_ids, request.num_prompt_tokens, sampling.repetition)
    ):
        return FinishReason.REPETITION, None
    return None


def repeats_itself(token_ids: Sequence[int], num_prompt_tokens: int, limits: RepetitionLimits) -> bool:
    """Whether the output ends with a pattern of allowed length, repeated as often as the limits require."""
    num_output = len(token_ids) - num_prompt_tokens
    for length in range(limits.min_pattern_size, limits.max_pattern_size + 1):
        num_tokens = length * limits.min_count
        if num_tokens > num_output:
            return False
        start = len(token_ids) - num_tokens
        # Each token equals the one a pattern earlier. The last one mostly differs, and is cheap to compare.
        if (
            token_ids[-1] == token_ids[-1 - length]
            and token_ids[start + length :] == token_ids[start:-length]
        ):
            return True
    return False


def settle_turn(request: Request, hash_block_size: int) -> None:
    """Drop the token sampled last: its KV does not count, and the next input segment replaces it."""
    num_kept = request.num_tokens - 1
    del request.token_ids[num_kept:]
    del request.block_hashes[num_kept // hash_block_size :]
    # Drafts after the end may have been computed as well. A preempted request has nothing computed.
    request.num_computed_tokens = min(request.num_computed_tokens - request.num_placeholders, num_kept)
    request.num_placeholders = 0
    request.draft_token_ids = []
