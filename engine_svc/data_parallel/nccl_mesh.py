"""Messages between the GPUs of a group, through NCCL; numbers go between the processes. Knows no model.

A GPU waits for others without its process, which cannot detect that one of them is gone. So a thread waits
for the end of each other process, and then aborts NCCL.
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
    """The methods used of torch's group, which its own annotations lack."""

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
    """The connections of one GPU. `numbers` are those of its process, which are closed together with it.

    Raises PeersLost, and leaves nothing open, if another process ends before the GPUs are connected.
    The results of `gather` and `hand_back` are computed asynchronously on the device. They are complete only
    if `check`, called after the device has finished the step, does not raise.
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
        # NCCL waits for ranks that do not connect; only a watcher makes it abort before its timeout.
        for rank in range(self.size):
            if rank != self.rank:
                threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank}", daemon=True).start()
        try:
            # The communicator is made now, while all ranks are known to be running.
            self._group.eager_connect_single_device(device)
        except RuntimeError as error:
            self.close()
            raise PeersLost(f"the GPUs of a group do not reach each other: {error}") from error

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """See Mesh.swap_numbers; in the host's memory, without waiting for a device."""
        return self._numbers.swap_numbers(numbers)

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        # The same rows to each rank: sizes differ, which NCCL's all-gather does not support.
        sent = own.repeat(self.size, 1)
        gathered = own.new_empty(sum(sizes), own.shape[1])
        self._all_to_all(gathered, sent, list(sizes), [own.shape[0]] * self.size)
        return gathered

    def hand_back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        own = sizes[self.rank]
        received = rows.new_empty(self.size * own, rows.shape[1])
        self._all_to_all(received, rows.contiguous(), [own] * self.size, list(sizes))
        return received.view(self.size, own, rows.shape[1])

    def check(self) -> None:
        if self._is_closed.is_set():
            raise PeersLost("another rank was lost while the GPUs exchanged tensors")

    def close(self) -> None:
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._group.abort()
        self._numbers.close()

    def _all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> None:
        self.check()
        try:
            # Makes the device wait, not the thread.
            options = AllToAllOptions()
            self._group.alltoall_base(received, sent, received_sizes, sent_sizes, options).wait()
        except RuntimeError as error:
            self.close()
            raise PeersLost(f"the GPUs of a group no longer reach each other: {error}") from error

    def _watch(self, rank: int) -> None:
        self._numbers.wait_for_end_of(rank)
        self.close()


def _make_group(store: Store, rank: int, size: int, timeout_s: float) -> _Nccl:
    # Imported here, as CPU builds of torch lack it.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group: _Nccl = ProcessGroupNCCL(store, rank, size, options)  # type: ignore[assignment]
    return group
