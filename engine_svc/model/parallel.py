"""The interface between a model and the other ranks that hold parts of it. Declared here, by its user."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class InvalidStage(RuntimeError):
    """A stage was asked for a neighbour that it does not have: a bug."""


class Parallel(Protocol):
    """This rank's coordinates among the ranks that run one model together.

    Tensor-parallel ranks hold a share of every layer, expert-parallel ranks whole experts, pipeline stages
    whole layers. All ranks call the same methods in the same order.
    """

    tp_rank: int
    tp_size: int
    # Experts are divided over ep_size ranks. These are the tensor-parallel ranks where ep_size > 1.
    ep_rank: int
    ep_size: int
    pp_rank: int
    pp_size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, which may be written into x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., N] of each tensor-parallel rank, side by side in the last dimension."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Send [T, hidden] to the next pipeline stage."""
        ...

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[T, hidden] from the previous pipeline stage, in new memory."""
        ...


class Solo:
    """A model that is whole on one rank."""

    tp_rank = ep_rank = pp_rank = 0
    tp_size = ep_size = pp_size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def send(self, hidden: Tensor) -> None:
        raise InvalidStage("a model of one stage sends nothing")

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        raise InvalidStage("a model of one stage receives nothing")
