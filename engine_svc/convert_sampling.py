"""Sampling parameters of the wire, checked value by value as if no frontend had looked at them."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.facts import EngineFacts
from engine_svc.sampling_params import RepetitionLimits, SamplingParams, ThinkingBudget
from engine_svc.wire_checks import check, refuse_unserved, to_token_ids, unserved
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2

_MAX_STOP_TOKEN_IDS = 4096
_MAX_TEMPERATURE = 2.0
_MAX_PENALTY = 2.0
# Beyond these a logit times or over it might be no number any more.
_LEAST_REPETITION, _MOST_REPETITION = 0.001, 1000.0
_MAX_LOGIT_BIASES = 300
_MAX_BIAS = 100.0
_MAX_LOGPROB_TOKEN_IDS = 128
# Most likely tokens told of a whole prompt: they all go through memory and wire before the first token.
_MAX_PROMPT_CELLS = 200_000
_MAX_PATTERN_SIZE = 256
_MAX_PATTERN_COUNT = 64

_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_IDS = 64
_MAX_MARKER_IDS = 16

# Of bad words the frontend makes tokens, which come beside these parameters.
_UNSERVED = ("bad_words", "structured_output")


def to_sampling(entry: add_pb2.AddEntry, facts: EngineFacts, *, num_prompt_tokens: int) -> SamplingParams:
    """How the tokens of a request are chosen. Raises InvalidArgument or Unimplemented."""
    given = entry.sampling
    refuse_unserved(given, _UNSERVED)
    if given.HasField("n") and given.n != 1:
        raise unserved("n")
    _check_draw(given)
    _check_penalties(given)
    max_tokens = _max_tokens(given, facts.max_model_len - num_prompt_tokens)
    _check_ids(given.stop_token_ids, "stop_token_ids", _MAX_STOP_TOKEN_IDS, facts.vocab_size)
    _check_ids(given.allowed_token_ids, "allowed_token_ids", facts.vocab_size, facts.vocab_size)
    _check_logprobs(given, facts, num_prompt_tokens)
    stop_token_ids = frozenset(given.stop_token_ids)
    if not given.ignore_eos:
        stop_token_ids |= frozenset(facts.eos_token_ids[1:])
    wants_prompt = given.HasField("prompt_logprobs")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=0 if given.top_k in (-1, 0) else min(given.top_k, facts.vocab_size),
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        min_p=given.min_p,
        seed=entry.request_seed,
        min_tokens=given.min_tokens,
        ignore_eos=given.ignore_eos,
        eos_token_id=facts.eos_token_ids[0] if facts.eos_token_ids else None,
        stop_token_ids=stop_token_ids,
        # Nothing is told of places that are not computed.
        skip_reading_prefix_cache=entry.skip_reading_prefix_cache
        or given.skip_reading_prefix_cache
        or wants_prompt,
        repetition=_to_repetition(given.repetition_detection)
        if given.HasField("repetition_detection")
        else None,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        logit_bias=_to_bias(given, facts.vocab_size),
        allowed_token_ids=frozenset(given.allowed_token_ids) if given.allowed_token_ids else None,
        bad_words=_to_bad_words(entry, facts.vocab_size),
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        prompt_logprobs=given.prompt_logprobs if wants_prompt else None,
        logprob_token_ids=tuple(given.logprob_token_ids),
        thinking=_to_thinking(entry, facts.vocab_size),
    )


def _check_draw(given: sampling_pb2.SamplingParams) -> None:
    temperature = given.temperature
    check(0.0 <= temperature <= _MAX_TEMPERATURE, "temperature", temperature, "0 to 2")
    check(not given.HasField("top_p") or 0.0 < given.top_p <= 1.0, "top_p", given.top_p, "above 0, at most 1")
    check(given.top_k >= -1, "top_k", given.top_k, "-1 or more")
    check(0.0 <= given.min_p <= 1.0, "min_p", given.min_p, "0 to 1")


def _check_penalties(given: sampling_pb2.SamplingParams) -> None:
    for name, value in (
        ("presence_penalty", given.presence_penalty),
        ("frequency_penalty", given.frequency_penalty),
    ):
        check(-_MAX_PENALTY <= value <= _MAX_PENALTY, name, value, "-2 to 2")
    repetition = given.repetition_penalty
    is_fine = not given.HasField("repetition_penalty") or _LEAST_REPETITION <= repetition <= _MOST_REPETITION
    limit = f"{_LEAST_REPETITION:g} to {_MOST_REPETITION:g}"
    check(is_fine, "repetition_penalty", repetition, limit)


def _max_tokens(given: sampling_pb2.SamplingParams, most: int) -> int:
    max_tokens = given.max_tokens if given.HasField("max_tokens") else most
    check(1 <= max_tokens <= most, "max_tokens", max_tokens, f"1 to {most} for this prompt")
    least = given.min_tokens
    check(0 <= least <= max_tokens, "min_tokens", least, f"0 to max_tokens, {max_tokens}")
    return max_tokens


def _check_ids(token_ids: Sequence[int], name: str, most: int, vocab_size: int) -> None:
    if not token_ids:
        return
    check(len(token_ids) <= most, name, len(token_ids), f"at most {most} ids")
    largest = max(token_ids)
    check(largest < vocab_size, name, largest, f"below the vocabulary's size, {vocab_size}")


def _check_logprobs(given: sampling_pb2.SamplingParams, facts: EngineFacts, num_prompt_tokens: int) -> None:
    if not (given.HasField("logprobs") or given.HasField("prompt_logprobs") or given.logprob_token_ids):
        return
    is_open = facts.max_logprobs == -1
    least, most = (-1, facts.vocab_size) if is_open else (0, facts.max_logprobs)
    for name, value in (("logprobs", given.logprobs), ("prompt_logprobs", given.prompt_logprobs)):
        check(least <= value <= most, name, value, f"{least} to {most}")
    _check_ids(given.logprob_token_ids, "logprob_token_ids", _MAX_LOGPROB_TOKEN_IDS, facts.vocab_size)
    if given.HasField("prompt_logprobs"):
        num_each = facts.vocab_size if given.prompt_logprobs == -1 else given.prompt_logprobs
        num_cells = num_prompt_tokens * (num_each + len(given.logprob_token_ids))
        limit = f"at most {_MAX_PROMPT_CELLS} entries for the whole prompt"
        check(num_cells <= _MAX_PROMPT_CELLS, "prompt_logprobs", num_cells, limit)


def _to_bias(given: sampling_pb2.SamplingParams, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not given.logit_bias:
        return ()
    _check_ids([entry.token_id for entry in given.logit_bias], "logit_bias", _MAX_LOGIT_BIASES, vocab_size)
    total: dict[int, float] = {}
    for entry in given.logit_bias:
        check(-_MAX_BIAS <= entry.bias <= _MAX_BIAS, "logit_bias", entry.bias, "-100 to 100")
        total[entry.token_id] = total.get(entry.token_id, 0.0) + entry.bias
    return tuple(total.items())


def _to_bad_words(entry: add_pb2.AddEntry, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    num_words = len(entry.bad_words)
    if not num_words:
        return ()
    check(num_words <= _MAX_BAD_WORDS, "bad_words", num_words, f"at most {_MAX_BAD_WORDS} words")
    words = [to_token_ids(word.token_ids, "bad_words", vocab_size) for word in entry.bad_words]
    for word in words:
        check(
            1 <= len(word) <= _MAX_BAD_WORD_IDS,
            "bad_words",
            len(word),
            f"1 to {_MAX_BAD_WORD_IDS} ids a word",
        )
    return tuple(tuple(word) for word in words)


def _to_thinking(entry: add_pb2.AddEntry, vocab_size: int) -> ThinkingBudget | None:
    given, markers = entry.sampling, entry.reasoning_options
    if not given.HasField("thinking_token_budget"):
        return None
    budget = given.thinking_token_budget
    check(budget >= -1, "thinking_token_budget", budget, "-1 for none, 0 or more")
    if budget == -1:
        return None
    for name, ids in (
        ("reasoning_options.start_token_ids", markers.start_token_ids),
        ("reasoning_options.end_token_ids", markers.end_token_ids),
    ):
        check(len(ids) >= 1, name, len(ids), f"1 to {_MAX_MARKER_IDS} ids with a thinking_token_budget")
        _check_ids(ids, name, _MAX_MARKER_IDS, vocab_size)
    return ThinkingBudget(budget, tuple(markers.start_token_ids), tuple(markers.end_token_ids))


def _to_repetition(given: sampling_pb2.RepetitionDetection) -> RepetitionLimits | None:
    longest, shortest = given.max_pattern_size, given.min_pattern_size
    _check_repetition(
        0 <= longest <= _MAX_PATTERN_SIZE, "max_pattern_size", longest, f"0 to {_MAX_PATTERN_SIZE}"
    )
    _check_repetition(
        0 <= shortest <= longest, "min_pattern_size", shortest, f"0 to max_pattern_size, {longest}"
    )
    if longest == 0:
        return None
    _check_repetition(
        2 <= given.min_count <= _MAX_PATTERN_COUNT, "min_count", given.min_count, f"2 to {_MAX_PATTERN_COUNT}"
    )
    return RepetitionLimits(longest, shortest or 1, given.min_count)


def _check_repetition(holds: bool, name: str, value: int, limit: str) -> None:
    check(holds, f"repetition_detection.{name}", value, limit)
