"""All-to-all messages between the processes of a group, through gloo. Knows no model and no vote.

Uses sends and receives rather than collectives: sizes may differ, empty parts are not sent, and a message
wakes one thread less. There is no `init_process_group`, as a process may be in one group after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from engine_svc.core.errors import PeersLost

# Messages of one kind between two ranks arrive in the order in which they were sent.
_NUMBERS, _GATHERED, _HANDED_BACK, _PRESENCE, _NEVER_SENT = range(5)
_AT_ONCE = timedelta(milliseconds=1)
_FOREVER = timedelta(days=365)


class _Messages(Protocol):
    """The methods used of torch's group, which its own annotations lack."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...


class GlooMesh:
    """The connections of one rank. Raises PeersLost if another rank is gone or does not answer in time.

    After an error the mesh is closed, which ends all waits of the other ranks.
    One thread exchanges at a time; `close` may be called by any thread.
    """

    def __init__(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # Its annotations lack it.
        options._timeout = self._timeout
        # By address, so that the name of this machine need not resolve to the interface.
        options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._threads = 1
        self._lock = threading.Lock()
        self._group: _Messages | None = None
        with self._lost_if_it_fails():
            self._group = ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, in order of rank; all ranks give equally many."""
        with self._lost_if_it_fails():
            own = torch.tensor(numbers, dtype=torch.int64)
            received = own.repeat(self.size, 1)
            group = self._open_group()
            works = [group.recv([received[rank]], rank, _NUMBERS) for rank in self._others()]
            works += [group.send([own], rank, _NUMBERS) for rank in self._others()]
            for work in works:
                work.wait(self._timeout)
        numbers_by_rank: list[list[int]] = received.tolist()
        return numbers_by_rank

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """[sum of sizes, H], the rows of all ranks in order. own: [sizes[rank], H]; all know all sizes."""
        gathered = own.new_empty(sum(sizes), own.shape[1])
        parts = gathered.split(list(sizes))
        sent = own.contiguous()
        with self._lost_if_it_fails():
            group = self._open_group()
            # Receives first: a sender whose receiver is ready sends at once, without a handshake.
            works = [group.recv([parts[rank]], rank, _GATHERED) for rank in self._others() if sizes[rank]]
            if len(own):
                works += [group.send([sent], rank, _GATHERED) for rank in self._others()]
                parts[self.rank].copy_(own)
            for work in works:
                work.wait(self._timeout)
        return gathered

    def hand_back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """[ranks, sizes[rank], H], what each rank has computed for this one's rows.

        rows: [sum of sizes, H], what this rank has computed for all ranks, in the order of `gather`.
        """
        parts = rows.contiguous().split(list(sizes))
        received = rows.new_empty(self.size, sizes[self.rank], rows.shape[1])
        with self._lost_if_it_fails():
            group = self._open_group()
            works = []
            if sizes[self.rank]:
                works = [group.recv([received[rank]], rank, _HANDED_BACK) for rank in self._others()]
                received[self.rank].copy_(parts[self.rank])
            works += [group.send([parts[rank]], rank, _HANDED_BACK) for rank in self._others() if sizes[rank]]
            for work in works:
                work.wait(self._timeout)
        return received

    def wait_for(self, rank: int, number: int) -> int:
        """Wait without timeout until that rank waits for this one as well, and swap a number with it.

        May run beside other exchanges.
        """
        received = torch.empty(1, dtype=torch.int64)
        with self._lost_if_it_fails():
            group = self._open_group()
            works = [group.recv([received], rank, _PRESENCE)]
            works.append(group.send([torch.tensor([number], dtype=torch.int64)], rank, _PRESENCE))
            for work in works:
                work.wait(_FOREVER)
        return int(received.item())

    def wait_for_end_of(self, rank: int) -> None:
        """Return when that rank is gone or this mesh is closed; for a thread that only waits."""
        with suppress(RuntimeError):
            self._open_group().recv([torch.empty(1)], rank, _NEVER_SENT).wait(_FOREVER)

    def check(self) -> None:
        """Nothing: every exchange here has waited for its result."""

    def close(self) -> None:
        """End every wait, here and at the other ranks; a second time does nothing."""
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        for rank in self._others():
            # After a wait that times out, gloo closes all connections of the group, also for other threads.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], rank, _NEVER_SENT).wait(_AT_ONCE)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _open_group(self) -> _Messages:
        with self._lock:
            if self._group is None:
                raise PeersLost("this rank has left its group")
            return self._group

    @contextmanager
    def _lost_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except PeersLost:
            raise
        # Numbers out of range come from other ranks as well, and are no request's fault.
        except (RuntimeError, ValueError, OverflowError) as error:
            self.close()
            raise PeersLost(f"the ranks of a group no longer reach each other: {error}") from error
