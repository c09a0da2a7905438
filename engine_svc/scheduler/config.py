"""Configuration of the scheduler. Knows no flags and no environment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine_svc.core.step import StepCosts


class PauseState(Enum):
    """The requests that a paused scheduler holds back."""

    NONE = "none"
    NEW = "new"  # admits no request, not even preempted ones; running requests continue
    ALL = "all"  # plans nothing


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step."""

    max_model_len: int  # tokens of one request, prompt and output
    max_num_batched_tokens: int = 2048  # token budget of a step
    max_num_seqs: int = 256  # running requests
    enable_chunked_prefill: bool = True  # False: a prompt enters whole, and no later request overtakes it
    enable_common_prefix: bool = True  # plans count the leading blocks that all their rows share
    long_prefill_token_threshold: int = 0  # tokens of one request in a step; 0 = no such limit
    reserve_full_prompt: bool = True  # admit only with room for all known tokens, not just for a chunk
    num_speculative_tokens: int = 0  # most drafts of a request in a step
    drafts_at_launch: bool = False  # proposed when a step is launched, not with the result of the last
    step_costs: StepCosts | None = None  # to limit drafts that are proposed at launch; None: no limit
    async_scheduling: bool = False  # plan a step before the tokens of the step before it are known
    max_steps_in_flight: int = 1  # planned steps whose tokens are not known yet
    pipeline_stages: int = 1  # steps on the device at the same time, each with other decodes
    holds_idle: bool = False  # requests that wait for an input segment keep a row and their blocks
    prefill_share: float = 0.5  # of a step's tokens, for prompts, if the policy divides them

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_model_len", self.max_model_len, 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("long_prefill_token_threshold", self.long_prefill_token_threshold, 0),
            ("num_speculative_tokens", self.num_speculative_tokens, 0),
            ("max_steps_in_flight", self.max_steps_in_flight, 1),
            ("pipeline_stages", self.pipeline_stages, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
        if not 0 < self.prefill_share < 1:
            raise ValueError(f"prefill_share is {self.prefill_share}, must be above 0 and below 1")
        if self.max_steps_in_flight > self.pipeline_stages and not self.async_scheduling:
            raise ValueError(
                f"max_steps_in_flight is {self.max_steps_in_flight}, without async_scheduling it must be "
                f"at most pipeline_stages, {self.pipeline_stages}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, without chunked prefill it must "
                f"be at least max_model_len, {self.max_model_len}, or long prompts could never enter"
            )
