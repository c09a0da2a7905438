"""Converts sampling parameters of an ADD, and checks each without relying on the frontend's checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from engine_svc.core.facts import EngineFacts
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.field_checks import check, check_token_ids, unserved

_MAX_STOP_TOKEN_IDS = 4096
# By name: minimum, maximum, and the range in words.
_RANGES = {
    "temperature": (0.0, 2.0, "0 to 2"),
    "top_p": (math.ulp(0.0), 1.0, "above 0, at most 1"),
    "top_k": (-1, math.inf, "-1 or more"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "max_draft_tokens": (0, 64, "0 to 64"),
}
_MAX_LOGPROB_TOKEN_IDS = 128
_MAX_PATTERN_SIZE = 256
_MAX_PATTERN_COUNT = 64


def to_sampling(
    entry: add_pb2.AddEntry,
    facts: EngineFacts,
    *,
    num_prompt_tokens: int,
    fields: Set[str],
    skips_reading_prefix_cache: bool,
) -> SamplingParams:
    """The core's sampling parameters of a request; others of `fields` are features'.

    Raises InvalidArgument or Unimplemented.
    """
    # Only the fields that are set: most requests set few, and each access to a message costs time.
    given = {descriptor.name: value for descriptor, value in entry.sampling.ListFields()}
    for name, value in given.items():
        if name in _RANGES:
            least, most, limit = _RANGES[name]
            check(least <= value <= most, name, value, limit)
        elif name not in fields or (name == "n" and value != 1):
            raise unserved(name)
    vocab_size = facts.vocab_size
    max_tokens = _max_tokens(given, facts.max_model_len - num_prompt_tokens)
    stop_token_ids = frozenset(_ids(given, "stop_token_ids", _MAX_STOP_TOKEN_IDS, vocab_size))
    _check_logprobs(given, facts)
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
        skip_reading_prefix_cache=entry.skip_reading_prefix_cache
        or given.get("skip_reading_prefix_cache", False)
        or skips_reading_prefix_cache,
        repetition=_to_repetition(given["repetition_detection"]) if "repetition_detection" in given else None,
        logprobs=given.get("logprobs"),
        logprob_token_ids=tuple(given.get("logprob_token_ids", ())),
        max_draft_tokens=given.get("max_draft_tokens"),
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
    check_token_ids(token_ids, name, most, vocab_size)
    return token_ids


def _check_logprobs(given: Mapping[str, Any], facts: EngineFacts) -> None:
    is_open = facts.max_logprobs == -1
    least, most = (-1, facts.vocab_size) if is_open else (0, facts.max_logprobs)
    if "logprobs" in given:
        check(least <= given["logprobs"] <= most, "logprobs", given["logprobs"], f"{least} to {most}")
    _ids(given, "logprob_token_ids", _MAX_LOGPROB_TOKEN_IDS, facts.vocab_size)


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
