"""Messages between the GPUs of a group, through NCCL; numbers go between the processes. Knows no model.

A GPU waits for others by itself, and nobody on its machine notices that one of them is gone. So a thread
waits for each of the other processes, and has NCCL give up when one is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllToAllOptions, Store

from engine_svc.core.errors import PeersLost


class _Numbers(Protocol):
    """The connections of the processes."""

    rank: int
    size: int

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]: ...

    def wait_for_end_of(self, rank: int) -> None: ...

    def close(self) -> None: ...


class _Nccl(Protocol):
    """What is used of torch's group, whose own annotations leave it out."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def abort(self) -> None: ...

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

    Raises PeersLost, and leaves nothing open, where another process ends before the GPUs are connected.
    What `gather` and `hand_back` return is there when the device comes to it; only after `check`, behind the
    device's end of a step, is it certain to be whole.
    """

    def __init__(
        self,
        store: Store,
        numbers: _Numbers,
        device: torch.device,
        timeout_s: float,
        *,
        make_group: Callable[[Store, int, int, float], _Nccl] | None = None,
    ) -> None:
        self.rank, self.size = numbers.rank, numbers.size
        self._numbers = numbers
        self._is_closed = threading.Event()
        self._group = (make_group or _make_group)(store, self.rank, self.size, timeout_s)
        # NCCL waits for who does not connect, and only a watcher has it give up before its time.
        for rank in range(self.size):
            if rank != self.rank:
                threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()
        try:
            # The communicator is made now, while the ranks are known to be there.
            self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            self.close()
            raise PeersLost(f"the GPUs of a group do not reach each other: {error}") from error

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
            self._group.alltoall_base(room, sent, received, given, AllToAllOptions()).wait()
        except RuntimeError as error:
            self.close()
            raise PeersLost(f"the GPUs of a group no longer reach each other: {error}") from error

    def _watch(self, rank: int) -> None:
        self._numbers.wait_for_end_of(rank)
        self.close()


def _make_group(store: Store, rank: int, size: int, timeout_s: float) -> _Nccl:
    # Here and not above: builds of torch for CPUs lack it.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group: _Nccl = ProcessGroupNCCL(store, rank, size, options)  # type: ignore[assignment]
    return group
