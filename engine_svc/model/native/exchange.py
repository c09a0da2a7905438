"""What a native decoder asks of engines that hold other experts of its layers. Declared here, by its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ExpertExchange(Protocol):
    """Brings tokens to all experts, and what these make of them back.

    Engines of a group call the same methods in the same order, each with tokens of its own or none.
    Raises PeersLost where another engine is gone.
    """

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """A step begins with so many tokens of this engine; its last layer computes `num_rows` of them."""
        ...

    def gather(self, x: Tensor, *, is_last_layer: bool) -> Tensor:
        """[tokens of all engines, hidden] of each one's [T, hidden]."""
        ...

    def add_up(self, parts: Tensor, *, is_last_layer: bool) -> Tensor:
        """[T, hidden], the sum over all engines of what their experts add to this one's tokens.

        parts: of this engine's experts, for the tokens of all, as gathered.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Which of the experts an engine loads where they are divided over engines, and how these meet."""

    rank: int
    size: int
    exchange: ExpertExchange


class NoExchange:
    """The exchange of a model that has all its experts here."""

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """Nobody has to know."""

    def gather(self, x: Tensor, *, is_last_layer: bool) -> Tensor:
        """There are no others."""
        return x

    def add_up(self, parts: Tensor, *, is_last_layer: bool) -> Tensor:
        """There are no other parts."""
        return parts
