"""Converts sampling parameters of an ADD, and checks each without relying on the frontend's checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine_svc.core.facts import EngineFacts
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams, ThinkingBudget
from service_kit.field_checks import check, to_token_ids, unserved
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2

_MAX_STOP_TOKEN_IDS = 4096
# By name: minimum, maximum, and the range in words.
_RANGES = {
    "temperature": (0.0, 2.0, "0 to 2"),
    "top_p": (math.ulp(0.0), 1.0, "above 0, at most 1"),
    "top_k": (-1, math.inf, "-1 or more"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "presence_penalty": (-2.0, 2.0, "-2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2"),
    # Outside this range, scaling a logit can overflow to inf or NaN.
    "repetition_penalty": (0.001, 1000.0, "0.001 to 1000"),
}
_MAX_LOGIT_BIASES = 300
_MAX_BIAS = 100.0
_MAX_LOGPROB_TOKEN_IDS = 128
# Logprob entries of a whole prompt: all of them are held in memory and sent before the first token.
_MAX_PROMPT_CELLS = 200_000
_MAX_PATTERN_SIZE = 256
_MAX_PATTERN_COUNT = 64

_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_IDS = 64
_MAX_MARKER_IDS = 16

# The frontend tokenizes bad words and sends them beside these parameters.
_UNSERVED = ("bad_words", "structured_output")


def to_sampling(entry: add_pb2.AddEntry, facts: EngineFacts, *, num_prompt_tokens: int) -> SamplingParams:
    """Sampling parameters of a request. Raises InvalidArgument or Unimplemented."""
    # Only the fields that are set: most requests set few, and each access to a message costs time.
    given = {descriptor.name: value for descriptor, value in entry.sampling.ListFields()}
    for name, value in given.items():
        if name in _RANGES:
            least, most, limit = _RANGES[name]
            check(least <= value <= most, name, value, limit)
        elif name in _UNSERVED or (name == "n" and value != 1):
            raise unserved(name)
    vocab_size = facts.vocab_size
    max_tokens = _max_tokens(given, facts.max_model_len - num_prompt_tokens)
    stop_token_ids = frozenset(_ids(given, "stop_token_ids", _MAX_STOP_TOKEN_IDS, vocab_size))
    allowed_token_ids = frozenset(_ids(given, "allowed_token_ids", vocab_size, vocab_size))
    _check_logprobs(given, facts, num_prompt_tokens)
    ignore_eos = given.get("ignore_eos", False)
    if not ignore_eos:
        stop_token_ids |= frozenset(facts.eos_token_ids[1:])
    top_k = given.get("top_k", 0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given.get("temperature", 1.0),
        top_k=0 if top_k == -1 else min(top_k, vocab_size),
        top_p=given.get("top_p", 1.0),
        min_p=given.get("min_p", 0.0),
        seed=entry.request_seed,
        min_tokens=given.get("min_tokens", 0),
        ignore_eos=ignore_eos,
        eos_token_id=facts.eos_token_ids[0] if facts.eos_token_ids else None,
        stop_token_ids=stop_token_ids,
        # There are no logprobs of positions that are not computed.
        skip_reading_prefix_cache=entry.skip_reading_prefix_cache
        or given.get("skip_reading_prefix_cache", False)
        or "prompt_logprobs" in given,
        repetition=_to_repetition(given["repetition_detection"]) if "repetition_detection" in given else None,
        presence_penalty=given.get("presence_penalty", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        repetition_penalty=given.get("repetition_penalty", 1.0),
        logit_bias=_to_bias(given["logit_bias"], vocab_size) if "logit_bias" in given else (),
        allowed_token_ids=allowed_token_ids or None,
        bad_words=_to_bad_words(entry.bad_words, vocab_size) if entry.bad_words else (),
        logprobs=given.get("logprobs"),
        prompt_logprobs=given.get("prompt_logprobs"),
        logprob_token_ids=tuple(given.get("logprob_token_ids", ())),
        thinking=_to_thinking(given["thinking_token_budget"], entry.reasoning_options, vocab_size)
        if "thinking_token_budget" in given
        else None,
    )


def _max_tokens(given: Mapping[str, Any], most: int) -> int:
    max_tokens: int = given.get("max_tokens", most)
    check(1 <= max_tokens <= most, "max_tokens", max_tokens, f"1 to {most} for this prompt")
    least = given.get("min_tokens", 0)
    check(0 <= least <= max_tokens, "min_tokens", least, f"0 to max_tokens, {max_tokens}")
    return max_tokens


def _ids(given: Mapping[str, Any], name: str, most: int, vocab_size: int) -> Sequence[int]:
    """The checked ids of a list; empty if it is not set."""
    token_ids: Sequence[int] = given.get(name, ())
    _check_ids(token_ids, name, most, vocab_size)
    return token_ids


def _check_ids(token_ids: Sequence[int], name: str, most: int, vocab_size: int) -> None:
    if not token_ids:
        return
    check(len(token_ids) <= most, name, len(token_ids), f"at most {most} ids")
    largest = max(token_ids)
    check(largest < vocab_size, name, largest, f"below the vocabulary's size, {vocab_size}")


def _check_logprobs(given: Mapping[str, Any], facts: EngineFacts, num_prompt_tokens: int) -> None:
    is_open = facts.max_logprobs == -1
    least, most = (-1, facts.vocab_size) if is_open else (0, facts.max_logprobs)
    for name in ("logprobs", "prompt_logprobs"):
        if name in given:
            check(least <= given[name] <= most, name, given[name], f"{least} to {most}")
    token_ids = _ids(given, "logprob_token_ids", _MAX_LOGPROB_TOKEN_IDS, facts.vocab_size)
    if "prompt_logprobs" in given:
        num_each = facts.vocab_size if given["prompt_logprobs"] == -1 else given["prompt_logprobs"]
        num_cells = num_prompt_tokens * (num_each + len(token_ids))
        limit = f"at most {_MAX_PROMPT_CELLS} entries for the whole prompt"
        check(num_cells <= _MAX_PROMPT_CELLS, "prompt_logprobs", num_cells, limit)


def _to_bias(entries: Sequence[sampling_pb2.LogitBias], vocab_size: int) -> tuple[tuple[int, float], ...]:
    _check_ids([entry.token_id for entry in entries], "logit_bias", _MAX_LOGIT_BIASES, vocab_size)
    total: dict[int, float] = {}
    for entry in entries:
        check(-_MAX_BIAS <= entry.bias <= _MAX_BIAS, "logit_bias", entry.bias, "-100 to 100")
        total[entry.token_id] = total.get(entry.token_id, 0.0) + entry.bias
    return tuple(total.items())


def _to_bad_words(sequences: Sequence[add_pb2.TokenSequence], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    num_words = len(sequences)
    check(num_words <= _MAX_BAD_WORDS, "bad_words", num_words, f"at most {_MAX_BAD_WORDS} words")
    words = [to_token_ids(word.token_ids, "bad_words", vocab_size) for word in sequences]
    for word in words:
        check(
            1 <= len(word) <= _MAX_BAD_WORD_IDS,
            "bad_words",
            len(word),
            f"1 to {_MAX_BAD_WORD_IDS} ids a word",
        )
    return tuple(tuple(word) for word in words)


def _to_thinking(budget: int, markers: add_pb2.ReasoningOptions, vocab_size: int) -> ThinkingBudget | None:
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
