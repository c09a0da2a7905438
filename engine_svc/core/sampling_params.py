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


# Never changed, but not frozen: that would make construction, before each first token, three times as slow.
@dataclass(slots=True)
class SamplingParams:
    """The parameters that scheduler and sampler need, validated and complete.

    `temperature` 0 is greedy; then top_k, top_p and min_p have no effect. `seed` is the request's own 64-bit
    seed: noise at a position is a pure function of (seed, position), so a request can continue anywhere.
    What features change in the logits comes first, so it binds greedy requests too.
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
    logprobs: int | None = None  # number of most likely tokens to report; -1 = all, None = no logprobs
    logprob_token_ids: tuple[int, ...] = ()  # ids to report in addition
    max_draft_tokens: int | None = None  # for the scheduler: most in a step; None = its own limit alone

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs of sampled tokens are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every id that ends the request and so is masked below `min_tokens`."""
        if self.eos_token_id is None or self.ignore_eos:
            return self.stop_token_ids
        return self.stop_token_ids | {self.eos_token_id}
