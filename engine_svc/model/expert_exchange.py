"""The tokens of a lockstep group's engines, brought to all experts and back. Knows no sockets, no weights."""

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
        """What each rank says, in order."""
        ...

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """[sum of sizes, H], the rows of all ranks in order."""
        ...

    def hand_back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """[ranks, sizes[rank], H], what each rank has computed for this one's rows."""
        ...

    def check(self) -> None:
        """Raise PeersLost if what a GPU has exchanged so far may not have come to its end."""
        ...

    def close(self) -> None:
        """End every wait, here and at the others."""
        ...


class GroupExchange:
    """The exchange of an engine, whatever group it is in: none, or one after the other.

    A token's result has the same bits whatever the other engines compute beside it: what experts make of a
    token depends on no other token, and the engines' parts are added in the order of their ranks, in fp32.
    `enter` and `leave` may be called by any thread; a step that is in flight at `leave` raises PeersLost.

    holds: the rank whose experts this engine holds, and of how many; a step in another group's place would
    leave out experts, or count them twice.
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
        """From the next step on, exchange with these."""
        self._mesh, self._num_steps = mesh, 0

    def leave(self, mesh: Mesh) -> None:
        """Exchange with these no more."""
        if self._mesh is mesh:
            self._mesh = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What is computed meanwhile lacks the other engines' experts: for results that nobody reads."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def begin(self, num_tokens: int, num_rows: int) -> None:
        """See ExpertExchange.begin: tell the others, and hear how many they have."""
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
        """Raise PeersLost where a step that was launched may have gone on without the others' parts."""
        self._joined().check()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _joined(self) -> Mesh:
        mesh = self._mesh
        if mesh is None:
            raise PeersLost("this engine is in no group of engines that hold the other experts")
        return mesh
