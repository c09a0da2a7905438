"""The doorbell's word in a store of torch.distributed. Imports torch, so that build.py imports it late."""

from __future__ import annotations

from torch.distributed.distributed_c10d import PrefixStore, Store

from engine_svc.process_groups import bell_place, reach_store
from engine_svc.rank_group import Meeting


class StoreBell:
    """A client of the store that rank 0 of a generation holds, with a connection of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rung = 0  # the wave that this rank has left word of last; 0: of none

    def ring(self, wave: int) -> None:
        """Leave word that a rank waits in this wave, and take back that of the one before: it is over."""
        if self._rung not in (0, wave):
            self._store.delete_key(str(self._rung))
        self._rung = wave
        self._store.set(str(wave), "")

    def is_rung(self, wave: int) -> bool:
        """Whether one does."""
        return self._store.check([str(wave)])


def reach_bell(meeting: Meeting, timeout_s: float) -> StoreBell:
    """The bell of the ranks that meet there; RuntimeError or OSError where nobody answers in time."""
    store = reach_store(meeting.master_address, meeting.store_port, timeout_s)
    return StoreBell(PrefixStore(bell_place(meeting), store))
