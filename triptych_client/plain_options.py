"""Sampling parameters that Python writes as the contract does. Written by `make protos`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class PlainSamplingOptions(TypedDict, total=False):
    """The options whose types are plain."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    n: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    detokenize: bool
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: Sequence[int]
    stream_interval: int
    thinking_token_budget: int
    skip_reading_prefix_cache: bool
    max_draft_tokens: int
