"""Sends the tokens of a lockstep group's engines to all experts, and the results back. Knows no sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from engine_svc.core.errors import PeersLost


class Mesh(Protocol):
    """The connections of one rank. Raises PeersLost."""

    rank: int
    size: int

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers that each rank has passed, in order."""
        ...

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """[sum of sizes, H], the rows of all ranks in order."""
        ...

    def hand_back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """[ranks, sizes[rank], H], what each rank has computed for the rows of this rank."""
        ...

    def check(self) -> None:
        """Raise PeersLost if the GPU exchanges launched before may not have completed."""
        ...

    def close(self) -> None:
        """End every wait, of this rank and of the others."""
        ...


class GroupExchange:
    """The exchange of an engine, over the mesh of the group that it is in at the time, if any.

    A token's result has the same bits whatever the other engines compute: what experts compute for a token
    depends on no other token, and the engines' parts are added in the order of their ranks, in fp32.
    `enter` and `leave` may be called by any thread; a step that is in flight at `leave` raises PeersLost.

    holds: the rank whose experts this engine holds, and the number of ranks. A step at another rank of a
    group would omit experts, or count them twice.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.holds = (rank, size)
        self._mesh: Mesh | None = None
        self._num_steps = 0  # in this group
        self._sizes: tuple[list[int], list[int]] = ([], [])  # of this step by rank: tokens, then rows
        self._is_alone = False
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each exchange with the others, in the thread that runs the step."""
        self._listeners.append(listener)

    def enter(self, mesh: Mesh) -> None:
        """Exchange over this mesh from the next step on."""
        self._mesh, self._num_steps = mesh, 0

    def leave(self, mesh: Mesh) -> None:
        if self._mesh is mesh:
            self._mesh = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile, results lack the other engines' experts: for steps whose results are not used."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """See ExpertExchange.begin: exchange the numbers of tokens and rows with the other engines."""
        if self._is_alone:
            return
        mesh = self._joined()
        if self.holds != (mesh.rank, mesh.size):
            raise RuntimeError(
                f"rank {mesh.rank} of {mesh.size} holds the experts of {self.holds[0]} of {self.holds[1]}"
            )
        self._num_steps += 1
        all_numbers = mesh.swap_numbers((self._num_steps, num_tokens, num_rows))
        self._notify()
        if any(numbers[0] != self._num_steps for numbers in all_numbers):
            raise PeersLost(f"the ranks are at steps {[numbers[0] for numbers in all_numbers]}")
        self._sizes = ([numbers[1] for numbers in all_numbers], [numbers[2] for numbers in all_numbers])

    def gather(self, x: Tensor, *, is_last_layer: bool) -> Tensor:
        """See ExpertExchange.gather."""
        if self._is_alone:
            return x
        gathered = self._joined().gather(x, self._sizes[is_last_layer])
        self._notify()
        return gathered

    def add_up(self, parts: Tensor, *, is_last_layer: bool) -> Tensor:
        """See ExpertExchange.add_up."""
        if self._is_alone:
            return parts
        by_rank = self._joined().hand_back(parts, self._sizes[is_last_layer])
        self._notify()
        total = by_rank[0].float()
        for part in by_rank[1:]:
            total += part
        return total.to(parts.dtype)

    def check(self) -> None:
        """Raise PeersLost if a step that was launched may have continued without the other engines' parts."""
        self._joined().check()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _joined(self) -> Mesh:
        mesh = self._mesh
        if mesh is None:
            raise PeersLost("this engine is in no group of engines that hold the other experts")
        return mesh
