"""What an engine of a lockstep group can be told about its membership. Knows no streams and no protos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Prepare:
    """Be ready to be `rank` of `size` in a generation that meets at the store of its rank 0."""

    generation: int
    size: int
    rank: int | None  # None: leave the group and exit
    host: str
    store_port: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Change over to a prepared generation."""

    generation: int
    lost_generation: int = 0  # the newest of which a member has ended, so that nobody can vote in it


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a prepared generation."""

    generation: int


Order: TypeAlias = Prepare | Commit | Abort
