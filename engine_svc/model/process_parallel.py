"""Ranks of one model as processes that exchange tensors through torch.distributed. Knows no model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Tags distinguish the sends between two stages. At most this many sends are in flight at a time.
_NUM_TAGS = 1 << 15


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Coordinates of a rank; ranks are numbered stage by stage."""

    rank: int
    tp_size: int
    pp_size: int
    divides_experts: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank reports sampled tokens; all ranks of the last stage know them."""
        return self.is_last_stage and self.tp_rank == 0


class ProcessParallel:
    """A rank's `Parallel`. All ranks must create theirs at the same time; they meet through one store.

    store_path: of a file that all ranks have open and no other process can see.  Raises RuntimeError if a
    rank does not answer within timeout_s, here and in every exchange.
    """

    def __init__(
        self, position: RankPosition, *, store_path: str, device: torch.device, timeout_s: float
    ) -> None:
        self.tp_rank, self.tp_size = position.tp_rank, position.tp_size
        self.pp_rank, self.pp_size = position.pp_rank, position.pp_size
        self.ep_rank, self.ep_size = (
            (position.tp_rank, position.tp_size) if position.divides_experts else (0, 1)
        )
        self._previous, self._next = position.rank - position.tp_size, position.rank + position.tp_size
        self._device = device
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=dist.FileStore(store_path, position.num_ranks),  # type: ignore[attr-defined]  # It is there.
            rank=position.rank,
            world_size=position.num_ranks,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if is_gpu else None,
        )
        self._stage = dist.GroupMember.WORLD
        if position.pp_size > 1:
            # Every rank has to take part in the creation of every group.
            stages = [
                range(first, first + position.tp_size)
                for first in range(0, position.num_ranks, position.tp_size)
            ]
            groups = [dist.new_group(list(stage)) for stage in stages]
            self._stage = groups[position.pp_rank]
        # Gloo adds three or more values in an order that depends on the size of the tensor: the sum of a row
        # would depend on the rows beside it.
        self._adds_in_order = self.tp_size > 2 and not is_gpu
        self._num_sent = self._num_received = 0
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, written into x where x is contiguous."""
        if self.tp_size == 1:
            return x
        x = x.contiguous()
        if self._adds_in_order:
            first, *others = self._part_of_each(x)
            total = first.float()
            for part in others:
                total += part
            return x.copy_(total)
        dist.all_reduce(x, group=self._stage)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., N] of each tensor-parallel rank, side by side in the last dimension."""
        if self.tp_size == 1:
            return x
        return torch.cat(self._part_of_each(x.contiguous()), dim=-1)

    def send(self, hidden: Tensor) -> None:
        """Send [T, hidden] to the next stage. It may be read later: the caller must not write it any more."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self._next, tag=self._num_sent % _NUM_TAGS)
        assert work is not None, "this rank takes part in the group that it sends in"
        self._num_sent += 1
        # Kept until it is sent: its memory must not be reused before.
        self._sending.append((work, hidden))

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[T, hidden] from the previous stage, in new memory."""
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(hidden, self._previous, tag=self._num_received % _NUM_TAGS)
        self._num_received += 1
        return hidden

    def _part_of_each(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        dist.all_gather(parts, x, group=self._stage)
        return parts

    def close(self) -> None:
        """Leave the group. No exchange may be in flight."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        # A group ends its threads when its last reference is gone. A group that still releases a tensor while
        # the interpreter shuts down aborts the process.
        del self._stage
        dist.destroy_process_group()
