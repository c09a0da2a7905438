"""Converts sampling parameters of an ADD, and checks them against each other and the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_svc.core.facts import EngineFacts
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.field_checks import check


def to_sampling(
    entry: add_pb2.AddEntry,
    given: Mapping[str, Any],
    facts: EngineFacts,
    *,
    num_prompt_tokens: int,
    skips_reading_prefix_cache: bool,
) -> SamplingParams:
    """The core's sampling parameters of a request. Raises InvalidArgument.

    given: those that are set, by name, which keep the rules of the contract.
    """
    max_tokens = _max_tokens(given, facts.max_model_len - num_prompt_tokens)
    stop_token_ids = frozenset(given.get("stop_token_ids", ()))
    ignore_eos = given.get("ignore_eos", False)
    if not ignore_eos:
        stop_token_ids |= frozenset(facts.eos_token_ids[1:])
    top_k = given.get("top_k", 0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given.get("temperature", 1.0),
        top_k=0 if top_k == -1 else min(top_k, facts.vocab_size),
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


def _to_repetition(given: sampling_pb2.RepetitionDetection) -> RepetitionLimits | None:
    longest, shortest = given.max_pattern_size, given.min_pattern_size
    name, limit = "repetition_detection.min_pattern_size", f"0 to max_pattern_size, {longest}"
    check(shortest <= longest, name, shortest, limit)
    return RepetitionLimits(longest, shortest or 1, given.min_count) if longest else None
