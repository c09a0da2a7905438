"""What a routing policy sees: the engines, and the request that one of them is to get. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A ready engine as one frontend knows it.

    What an engine reports is of all frontends' requests and some time old, less what has become of ours
    since; what is "ours" is of this frontend alone and exact. `num_unreported` and its tokens are requests of
    ours that the report cannot know of yet: they are to be added to it. All of the others of ours may be part
    of the report already.
    """

    address: str
    dp_rank: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests that no cache holds
    num_used_blocks: int = 0
    num_total_blocks: int = 0  # 0: not told
    block_size: int = 0  # token places in a block; 0: not told
    num_unreported: int = 0
    num_unreported_tokens: int = 0  # of their prompts
    num_in_flight: int = 0  # all of ours
    num_pending_tokens: int = 0  # prompt tokens of ours without a first token
    is_held: bool = False  # an operator has it pause or sleep: what is sent there waits

    @property
    def num_requests(self) -> int:
        """How many requests it has at least, ours among them."""
        return max(self.num_waiting + self.num_running + self.num_unreported, self.num_in_flight)

    @property
    def num_queued_tokens(self) -> int:
        """How many prompt tokens it has to compute at least before those of one more request."""
        return max(self.num_waiting_tokens + self.num_unreported_tokens, self.num_pending_tokens)


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What is known of a request, or of the outputs of one that go to an engine together."""

    num_prompt_tokens: int = 0  # counted once, however many outputs there are
    num_requests: int = 1  # outputs: each is a request to the engine
    session_id: str = ""  # requests with the same one share most of their prompts; empty: none
    prefix_hash: bytes = b""  # of the prompt's first blocks, see `prefix_hash`; empty: too short
    affinity_key: str = ""  # requests with the same one have to meet in one engine; empty: none
    data_parallel_rank: int | None = None  # the client's choice; None: ours
    has_embeds: bool = False  # its prompt is embeddings in some places, which not every engine takes


class RoutingPolicy(Protocol):
    """Chooses among engines that all could take the request. Keeps no state between calls."""

    def __call__(self, engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
        """One of `engines`, of which there is at least one.

        `engines` come in the same order each time and on every frontend. `turn` counts the calls of one
        frontend, from another start on each: ties are to be broken and chance is to be drawn by it.
        """
        ...
