"""The numbers by which the scheduler decides. Knows no flags and no environment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine_svc.scheduler.policy import POLICIES


class PauseState(Enum):
    """What the scheduler holds back on request."""

    NONE = "none"
    NEW = "new"  # admits nobody, preempted requests included; the running go on
    ALL = "all"  # plans nothing


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and the choice of policy."""

    max_model_len: int  # most tokens of one request, prompt and output
    max_num_batched_tokens: int = 2048  # token budget of a step
    max_num_seqs: int = 256  # most running requests
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True  # False: a prompt enters whole or not yet, and nobody overtakes it
    long_prefill_token_threshold: int = 0  # most tokens of one request in a step; 0 = no such limit
    reserve_full_prompt: bool = True  # admit only with room for all known tokens, not just a chunk
    num_speculative_tokens: int = 0  # most drafts of a request in a step
    async_scheduling: bool = False  # plan a step before the tokens of the one before it are known

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_model_len", self.max_model_len, 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("long_prefill_token_threshold", self.long_prefill_token_threshold, 0),
            ("num_speculative_tokens", self.num_speculative_tokens, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}, must be one of {', '.join(sorted(POLICIES))}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, without chunked prefill it must "
                f"be at least max_model_len, {self.max_model_len}, or long prompts could never enter"
            )
