"""Protocols of the process group and the expert shards that the lockstep uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_svc.data_parallel.wave import Vote


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one generation meet, and this engine's rank among them."""

    generation: int
    rank: int
    size: int
    master_address: str  # host of rank 0
    store_port: int  # of the store of rank 0


class RankGroup(Protocol):
    """The ranks of one generation. Calls that fail because another rank is gone raise PeersLost."""

    meeting: Meeting

    def count(self, vote: Vote) -> Vote:
        """The result of all ranks' votes; waits for the slowest. Never called by two threads at once."""
        ...

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, in order of rank; all give equally many. Never called beside `count`."""
        ...

    def when_all_resumed(self, weights: int, done: Callable[[], None], lost: Callable[[], None]) -> None:
        """Announce that this rank has resumed, with these weights. One callback is called, in any thread.

        done: all ranks have resumed with the same weights.  lost: one is gone, or has others.
        """
        ...

    def close(self) -> None:
        """Leave the group, which ends all waits, here and at the other ranks. For any thread."""
        ...


class RankGroups(Protocol):
    """Forms process groups, one after the other, in one process.

    host, store_port: the address of this engine's store.
    """

    host: str
    store_port: int

    def form(self, meeting: Meeting) -> RankGroup:
        """Form a group; from now on the model exchanges tensors through it. Raises PeersLost.

        For its own thread, while no step is in flight and none can be launched.
        """
        ...


class ExpertShards(Protocol):
    """The part of the model's experts that this engine holds."""

    num_bytes: int  # of the present experts

    def prepare(self, rank: int, size: int, *, may_release: bool = False) -> None:
        """Load the experts of this rank beside the present ones. For its own thread.

        Raises ValueError or OSError, and then changes nothing. may_release: nothing runs with the present
        experts before others are adopted, so that they may be released if memory is short.
        """
        ...

    def adopt(self) -> None:
        """Replace the experts by those prepared last. For the engine thread, with no step in flight."""
        ...

    def forget(self) -> None:
        """Drop what was prepared and not adopted. For the thread that prepares."""
        ...
