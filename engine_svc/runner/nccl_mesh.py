"""Messages between the GPUs of a group, through NCCL; numbers go between the processes. Knows no model.

A GPU waits for others by itself, and nobody on its machine notices that one of them is gone. So a thread
waits for each of the other processes, and has NCCL give up when one is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllToAllOptions, Store

from engine_svc.device_errors import PeersLost
from engine_svc.runner.gloo_mesh import GlooMesh


class _AllToAll(Protocol):
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions,
    ) -> Work: ...


class NcclMesh:
    """The connections of one GPU. `numbers` are those of its process, which are closed with it.

    What `gather` and `hand_back` return is there when the device comes to it; only after `check`, behind the
    device's end of a step, is it certain to be whole.
    """

    def __init__(self, store: Store, numbers: GlooMesh, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size = numbers.rank, numbers.size
        self._numbers = numbers
        self._is_closed = threading.Event()
        # Here and not above: builds of torch for CPUs lack it.
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group = ProcessGroupNCCL(store, self.rank, self.size, options)
        # The communicator is made now, while the ranks are known to be there.
        self._group.eager_connect_single_device(device)
        for rank in range(self.size):
            if rank != self.rank:
                threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """See Mesh.swap_numbers; in the host's memory, so that nobody waits for a device."""
        return self._numbers.swap_numbers(numbers)

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """See Mesh.gather."""
        # To each rank the same rows: sizes differ, which an all-gather of NCCL does not allow.
        sent = own.repeat(self.size, 1)
        room = own.new_empty(sum(sizes), own.shape[1])
        self._all_to_all(room, sent, list(sizes), [own.shape[0]] * self.size)
        return room

    def hand_back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """See Mesh.hand_back."""
        own = sizes[self.rank]
        room = rows.new_empty(self.size * own, rows.shape[1])
        self._all_to_all(room, rows.contiguous(), [own] * self.size, list(sizes))
        return room.view(self.size, own, rows.shape[1])

    def check(self) -> None:
        """See Mesh.check."""
        if self._is_closed.is_set():
            raise PeersLost("another rank was lost while the GPUs exchanged tensors")

    def close(self) -> None:
        """See Mesh.close."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._group.abort()
        self._numbers.close()

    def _all_to_all(self, room: Tensor, sent: Tensor, received: list[int], given: list[int]) -> None:
        self.check()
        try:
            # The device waits, the thread does not.
            group: _AllToAll = self._group  # type: ignore[assignment]  # Its annotations lack it.
            group.alltoall_base(room, sent, received, given, AllToAllOptions()).wait()
        except RuntimeError as error:
            self.close()
            raise PeersLost(f"the GPUs of a group no longer reach each other: {error}") from error

    def _watch(self, rank: int) -> None:
        self._numbers.wait_for_end_of(rank)
        self.close()
