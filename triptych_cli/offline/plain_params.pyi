# Written by `make protos`.
from collections.abc import Sequence
from dataclasses import dataclass

@dataclass(frozen=True, slots=True, kw_only=True)
class PlainParams:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool | None = None
    max_draft_tokens: int | None = None
