"""Inputs of a routing policy: the engines and the request. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from frontend_svc.text.model import ServedModel


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A ready engine as one frontend knows it.

    `num_waiting` to `num_total_blocks` come from the engine's last report, which covers the requests of all
    frontends, minus own requests that have ended since. The counts of own requests are exact.
    `num_unreported` are own requests that the report cannot include yet: add them to it. All other own
    requests may be included in the report already.
    """

    address: str
    dp_rank: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests that no cache holds
    num_used_blocks: int = 0
    num_total_blocks: int = 0  # 0: not reported
    block_size: int = 0  # token positions in a block; 0: not reported
    num_unreported: int = 0
    num_unreported_tokens: int = 0  # of their prompts
    num_in_flight: int = 0  # all own requests
    num_pending_tokens: int = 0  # prompt tokens of own requests without a first token
    is_held: bool = False  # an operator has paused it: requests sent there wait
    slots: frozenset[str] = frozenset()  # digests of the variants that it used last

    @property
    def num_requests(self) -> int:
        """Lower bound of its requests, own ones included."""
        return max(self.num_waiting + self.num_running + self.num_unreported, self.num_in_flight)

    @property
    def num_queued_tokens(self) -> int:
        """Lower bound of the prompt tokens it has to compute before those of another request."""
        return max(self.num_waiting_tokens + self.num_unreported_tokens, self.num_pending_tokens)


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """A requirement of a request that not every engine of its model meets.

    `description` and `reason` are for the error if no ready engine meets it.
    """

    description: str
    reason: str
    is_met: Callable[[ServedModel], bool]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request, or several outputs of one that go to an engine together."""

    num_prompt_tokens: int = 0  # counted once for all outputs
    num_requests: int = 1  # outputs: each is a request to the engine
    session_id: str = ""  # requests with equal ids share most of their prompts; empty: none
    prefix_hash: bytes = b""  # of the prompt's first tokens, see `prefix_hash`; empty: too short
    affinity_key: str = ""  # requests with equal keys must go to one engine; empty: none
    slot: str = ""  # digest of the variant that an engine should have in a slot; empty: none
    data_parallel_rank: int | None = None  # chosen by the client; None: any
    needs: tuple[EngineNeed, ...] = ()


class RoutingPolicy(Protocol):
    """Chooses among engines that can all take the request. Keeps no state between calls."""

    def __call__(self, engines: Sequence[EngineInfo], request: RoutingRequest, turn: int) -> EngineInfo:
        """One of `engines`, which is not empty.

        `engines` have the same order in each call and on every frontend. `turn` counts the calls of one
        frontend, from a different start on each: use it to break ties and as a source of random numbers.
        """
        ...
