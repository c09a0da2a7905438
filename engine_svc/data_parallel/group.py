"""What the lockstep of data-parallel ranks asks of the process group that they form. Declared by its user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_svc.data_parallel.wave import Vote


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one generation meet, and as which of them this engine comes."""

    generation: int
    rank: int
    size: int
    master_address: str  # host of rank 0
    store_port: int  # of the store that rank 0 holds


class RankGroup(Protocol):
    """The ranks of one generation. Whatever cannot be done because another rank is gone raises PeersLost."""

    meeting: Meeting

    def count(self, vote: Vote) -> Vote:
        """The verdict of all ranks' votes; waits for the slowest. Never called by two threads at once."""
        ...

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank says, in order; all say equally many. As `count`, and never beside it."""
        ...

    def when_all_resumed(self, weights: int, done: Callable[[], None], lost: Callable[[], None]) -> None:
        """Tell that this rank has resumed, with these weights; one of both is called, in any thread.

        done: all have, with the same ones.  lost: one is gone, or has others.
        """
        ...

    def close(self) -> None:
        """Leave: the others notice at once, and every wait here for them ends. For any thread."""
        ...


class RankGroups(Protocol):
    """Makes process groups, one after the other, in one process.

    host: where others reach the store of this engine.  store_port: its port.
    """

    host: str
    store_port: int

    def form(self, meeting: Meeting) -> RankGroup:
        """Meet the others; the model exchanges tensors through this group from now on. Raises PeersLost.

        For a thread of its own, while no step is in flight and none can be launched.
        """
        ...


class ExpertShards(Protocol):
    """Which of the model's experts this engine holds."""

    num_bytes: int  # of those that are held now

    def prepare(self, rank: int, size: int, *, may_release: bool = False) -> None:
        """Load what this rank of so many is to hold beside what is held now. For a thread of its own.

        Raises ValueError or OSError, and holds what it held. may_release: nothing runs with that before
        something was prepared and adopted, so that it may be given up where memory is short.
        """
        ...

    def adopt(self) -> None:
        """Hold what was prepared last, and forget the rest. For the engine thread, with no step in flight."""
        ...

    def forget(self) -> None:
        """Give up what was prepared and not adopted. For the thread that prepares."""
        ...
