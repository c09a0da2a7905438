"""The interface between a native decoder and engines that hold other experts. Declared here, by its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ExpertExchange(Protocol):
    """Sends tokens to all experts, and the experts' results back.

    The engines of a group call the same methods in the same order, each with tokens of its own or none.
    Raises PeersLost if another engine is gone.
    """

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """Start a step with `num_tokens` tokens of this engine; its last layer computes `num_rows`."""
        ...

    def gather(self, x: Tensor, *, is_last_layer: bool) -> Tensor:
        """[tokens of all engines, hidden], from each engine's [T, hidden]."""
        ...

    def add_up(self, parts: Tensor, *, is_last_layer: bool) -> Tensor:
        """[T, hidden], the sum over all engines of what their experts add to this engine's tokens.

        parts: the results of this engine's experts for the gathered tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """The experts that an engine loads if they are divided over engines, and the engines' exchange."""

    rank: int
    size: int
    exchange: ExpertExchange


class NoExchange:
    """The exchange of a model that has all its experts here."""

    def begin(self, num_tokens: int, num_rows: int) -> None: ...

    def gather(self, x: Tensor, *, is_last_layer: bool) -> Tensor:
        return x

    def add_up(self, parts: Tensor, *, is_last_layer: bool) -> Tensor:
        return parts
