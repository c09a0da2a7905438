"""What the ranks of a lockstep group tell each other now and then. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank has to say, and in the same form what all of them have."""

    wave: int
    has_work: bool  # of all: whether any has
    is_pausing: bool  # of all: whether all are
    generation: int  # the newest one that is ready to be changed to; of all: the oldest of these

    @staticmethod
    def count(votes: Sequence[Vote]) -> Vote:
        """The verdict of these votes, one of each rank."""
        return Vote(
            wave=max(vote.wave for vote in votes),
            has_work=any(vote.has_work for vote in votes),
            is_pausing=all(vote.is_pausing for vote in votes),
            generation=min(vote.generation for vote in votes),
        )
