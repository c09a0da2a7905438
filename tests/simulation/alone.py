"""What a request would produce if it were alone: the measure of every stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine_svc.core.request import FinishReason
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from tests.simulation.digest_model import Identity, link, next_token


@dataclass(frozen=True, slots=True)
class Turn:
    """One piece of input, and how it is to be continued."""

    token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """What a turn produces, and why it ends."""

    token_ids: list[int]
    reason: FinishReason
    stop_token_id: int | None


def answers_alone(
    identity: Identity, turns: Sequence[Turn], max_model_len: int, cuts: Mapping[int, int] | None = None
) -> Iterator[Answer]:
    """The answer to each turn in order. What a turn produces last has no KV, and is not part of the next.

    cuts: how many tokens turns have that were cancelled, by their place; their answers here are whole.
    """
    token_ids: list[int] = []
    digests: list[int] = []
    for index, turn in enumerate(turns):
        if token_ids:
            # The last token was never linked.
            token_ids.pop()
        token_ids += turn.token_ids
        identity.extend(digests, token_ids)
        num_prompt = len(token_ids)
        yield _continue(token_ids, digests, turn.sampling, max_model_len)
        if cuts is not None and index in cuts:
            del token_ids[num_prompt + cuts[index] :], digests[num_prompt + cuts[index] - 1 :]


def _continue(
    token_ids: list[int], digests: list[int], sampling: SamplingParams, max_model_len: int
) -> Answer:
    num_prompt = len(token_ids)
    digest = digests[-1]
    most = min(sampling.max_tokens, max_model_len - num_prompt)
    while True:
        token = next_token(digest)
        token_ids.append(token)
        output = token_ids[num_prompt:]
        if token == sampling.eos_token_id and not sampling.ignore_eos:
            return Answer(output, FinishReason.STOP, None)
        if token in sampling.stop_token_ids:
            return Answer(output, FinishReason.STOP, token)
        if len(output) == most:
            return Answer(output, FinishReason.LENGTH, None)
        if (
            sampling.repetition is not None
            and len(output) >= sampling.min_tokens
            and _repeats(output, sampling.repetition)
        ):
            return Answer(output, FinishReason.REPETITION, None)
        digest = link(digest, token)
        digests.append(digest)


def _repeats(output: Sequence[int], limits: RepetitionLimits) -> bool:
    for size in range(limits.min_pattern_size, limits.max_pattern_size + 1):
        pattern, num_tokens = list(output[-size:]), size * limits.min_count
        if len(output) >= num_tokens and list(output[-num_tokens:]) == pattern * limits.min_count:
            return True
    return False
