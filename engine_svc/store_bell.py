"""The doorbell's word in a store of torch.distributed. Imports torch, so that build.py imports it late."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from engine_svc.rank_group import Meeting

# Of words that were left long ago: their waves are over.
_KEPT_WAVES = 16


class StoreBell:
    """A client of the store that rank 0 of a generation holds, with a connection of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def ring(self, wave: int) -> None:
        """Leave word that a rank waits in this wave."""
        self._store.set(str(wave), "")
        self._store.delete_key(str(wave - _KEPT_WAVES))

    def is_rung(self, wave: int) -> bool:
        """Whether one does."""
        return self._store.check([str(wave)])


def reach_bell(meeting: Meeting, timeout_s: float) -> StoreBell:
    """The bell of the ranks that meet there; RuntimeError where nobody answers in time."""
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # It is there.
        meeting.master_address,
        meeting.store_port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return StoreBell(PrefixStore(f"doorbell-{meeting.generation}", store))
