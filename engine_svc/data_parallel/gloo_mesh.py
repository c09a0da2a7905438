"""Messages between the processes of a group, each with each other, through gloo. Knows no model and no vote.

Sends and receives rather than collectives: sizes need not be equal, what has no rows is not sent, and a
message wakes one thread less. No `init_process_group`: a process may be in one group after the other.
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
    """What is used of torch's group, whose own annotations leave it out."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...


class GlooMesh:
    """The connections of one rank. Raises PeersLost where another one is gone or does not answer in time.

    After an error it is closed: the others find out at once, wherever they wait.
    One thread exchanges at a time; `close` may be called by any thread.
    """

    def __init__(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # Its annotations lack it.
        options._timeout = self._timeout
        # By address: which interface a name of this machine belongs to is not asked.
        options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._threads = 1
        self._lock = threading.Lock()
        self._group: _Messages | None = None
        with self._lost_if_it_fails():
            self._group = ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank says, in order; all say equally many."""
        with self._lost_if_it_fails():
            own = torch.tensor(numbers, dtype=torch.int64)
            rooms = own.repeat(self.size, 1)
            group = self._open_group()
            works = [group.recv([rooms[rank]], rank, _NUMBERS) for rank in self._others()]
            works += [group.send([own], rank, _NUMBERS) for rank in self._others()]
            for work in works:
                work.wait(self._timeout)
        numbers_by_rank: list[list[int]] = rooms.tolist()
        return numbers_by_rank

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """[sum of sizes, H], the rows of all ranks in order. own: [sizes[rank], H]; all know all sizes."""
        room = own.new_empty(sum(sizes), own.shape[1])
        parts = room.split(list(sizes))
        sent = own.contiguous()
        with self._lost_if_it_fails():
            group = self._open_group()
            # Who finds the receiver ready sends at once, and does not ask first.
            works = [group.recv([parts[rank]], rank, _GATHERED) for rank in self._others() if sizes[rank]]
            if len(own):
                works += [group.send([sent], rank, _GATHERED) for rank in self._others()]
                parts[self.rank].copy_(own)
            for work in works:
                work.wait(self._timeout)
        return room

    def hand_back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """[ranks, sizes[rank], H], what each rank has computed for this one's rows.

        rows: [sum of sizes, H], what this rank has computed for all, as `gather` has ordered them.
        """
        parts = rows.contiguous().split(list(sizes))
        room = rows.new_empty(self.size, sizes[self.rank], rows.shape[1])
        with self._lost_if_it_fails():
            group = self._open_group()
            works = []
            if sizes[self.rank]:
                works = [group.recv([room[rank]], rank, _HANDED_BACK) for rank in self._others()]
                room[self.rank].copy_(parts[self.rank])
            works += [group.send([parts[rank]], rank, _HANDED_BACK) for rank in self._others() if sizes[rank]]
            for work in works:
                work.wait(self._timeout)
        return room

    def wait_for(self, rank: int, number: int) -> int:
        """Wait until that rank waits for this one as well, however long it takes, and swap a number with it.

        Beside other exchanges.
        """
        room = torch.empty(1, dtype=torch.int64)
        with self._lost_if_it_fails():
            group = self._open_group()
            works = [group.recv([room], rank, _PRESENCE)]
            works.append(group.send([torch.tensor([number], dtype=torch.int64)], rank, _PRESENCE))
            for work in works:
                work.wait(_FOREVER)
        return int(room.item())

    def wait_for_end_of(self, rank: int) -> None:
        """Return when that rank is gone, or this mesh closed; for a thread that has nothing else to do."""
        with suppress(RuntimeError):
            self._open_group().recv([torch.empty(1)], rank, _NEVER_SENT).wait(_FOREVER)

    def check(self) -> None:
        """Nothing: whoever waits here has what he waited for."""

    def close(self) -> None:
        """End every wait, here and at the others; a second time does nothing."""
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        for rank in self._others():
            # A wait that takes too long has gloo give up all connections of the group, whoever waits.
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
        # A number that no message holds comes from the others as well, and is no request's fault.
        except (RuntimeError, ValueError, OverflowError) as error:
            self.close()
            raise PeersLost(f"the ranks of a group no longer reach each other: {error}") from error
