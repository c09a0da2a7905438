"""Sampling parameters of one request. Knows no protos, no tensors and no defaults of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RepetitionLimits:
    """When an output ends because it repeats the same tokens at its end."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2  # times in a row

    def __post_init__(self) -> None:
        if not 1 <= self.min_pattern_size <= self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size is {self.min_pattern_size}, "
                f"must be 1 to max_pattern_size, {self.max_pattern_size}"
            )
        if self.min_count < 2:
            raise ValueError(f"min_count is {self.min_count}, must be at least 2")


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens reasoning may have, and the markers around it."""

    num_tokens: int
    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ValueError(f"num_tokens is {self.num_tokens}, must be at least 0")
        if not self.start_token_ids or not self.end_token_ids:
            raise ValueError("start_token_ids and end_token_ids must not be empty")


# Never changed, but not frozen: that would make construction, before each first token, three times as slow.
@dataclass(slots=True)
class SamplingParams:
    """The parameters that scheduler and sampler need, validated and complete.

    `temperature` 0 is greedy; then top_k, top_p and min_p have no effect. `seed` is the request's own 64-bit
    seed: noise at a position is a pure function of (seed, position), so a request can continue anywhere.
    Penalties, bias and bans change logits first, so they bind greedy requests too.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_id: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    skip_reading_prefix_cache: bool = False
    repetition: RepetitionLimits | None = None  # None = no limit
    min_p: float = 0.0  # minimum share of the most likely token's probability; 0 = all
    presence_penalty: float = 0.0  # subtracted once for each token of the output
    frequency_penalty: float = 0.0  # subtracted for each occurrence of a token in the output
    # For tokens of prompt or output: divides logits above 0, multiplies the rest.
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, addend of its logit), each id once
    allowed_token_ids: frozenset[int] | None = None  # None = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences whose last id may not follow the others
    logprobs: int | None = None  # number of most likely tokens to report; -1 = all, None = no logprobs
    prompt_logprobs: int | None = None  # the same for positions of the prompt
    logprob_token_ids: tuple[int, ...] = ()  # ids to report in addition, wherever there are logprobs
    thinking: ThinkingBudget | None = None  # None = no limit

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs of sampled tokens are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every id that ends the request and so is masked below `min_tokens`."""
        if self.eos_token_id is None or self.ignore_eos:
            return self.stop_token_ids
        return self.stop_token_ids | {self.eos_token_id}
