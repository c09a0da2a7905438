"""The ranks of one model as processes that exchange tensors through torch.distributed. Knows no model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Sends between two stages are told apart by their number, of which this many are in use at a time at most.
_NUM_TAGS = 1 << 15


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank stands: ranks are numbered stage by stage. Experts are divided where `divides_experts`."""

    rank: int
    tp_size: int
    pp_size: int
    divides_experts: bool = False

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        """The place among those that share each layer."""
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """The stage."""
        return self.rank // self.tp_size

    @property
    def is_last_stage(self) -> bool:
        """Whether logits come out here."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank tells what was sampled: all ranks of the last stage know it."""
        return self.is_last_stage and self.tp_rank == 0


class ProcessParallel:
    """A rank's `Parallel`. All ranks make theirs at the same time, and meet through one store.

    store_path: of a file that all ranks have open and nobody else can see.  Raises RuntimeError where a rank
    does not answer within timeout_s, here and in every exchange.
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
            # Every rank has to take part in the making of every group.
            stages = [
                range(first, first + position.tp_size)
                for first in range(0, position.num_ranks, position.tp_size)
            ]
            groups = [dist.new_group(list(stage)) for stage in stages]
            self._stage = groups[position.pp_rank]
        # Gloo adds three and more in an order that depends on the size of the tensor: a row's sum
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
        """Hand [T, hidden] to the next stage, which may take it later: the caller no longer writes it."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self._next, tag=self._num_sent % _NUM_TAGS)
        assert work is not None, "this rank takes part in the group that it sends in"
        self._num_sent += 1
        # Kept until it is out: its memory must not be used again before.
        self._sending.append((work, hidden))

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[T, hidden] from the stage before this one, in new memory."""
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(hidden, self._previous, tag=self._num_received % _NUM_TAGS)
        self._num_received += 1
        return hidden

    def _part_of_each(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        dist.all_gather(parts, x, group=self._stage)
        return parts

    def close(self) -> None:
        """Leave the others. Nothing may be under way."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        # A group ends its threads when nobody refers to it. One that still lets go of a tensor while the
        # interpreter ends aborts the process.
        del self._stage
        dist.destroy_process_group()
