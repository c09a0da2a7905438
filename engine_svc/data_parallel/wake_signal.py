"""How a rank tells the others of a wave where no coordinator does: a word left in the store of rank 0.

A thread of its own looks there while its rank stands between two waves, and rings while it asks for one.
Knows no process group and no machine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from torch.distributed.distributed_c10d import PrefixStore, Store

from engine_svc.data_parallel.driver import RankStatus
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.torch_group import reach_store, signal_prefix
from engine_svc.data_parallel.wave import LockstepState
from service_kit.clock import Clock

logger = logging.getLogger(__name__)

# So long the coordinator, where there is one, has to let the others join.
SIGNAL_AFTER_S = 0.5
# How often a rank listens: with a coordinator it will not hear anything for as long as that.
_LISTEN_S = 0.25
_LISTEN_ALONE_S = 0.05
# After the store could not be reached.
_RETRY_S = 1.0


class SignalStore(Protocol):
    """A connection to the store. Each of these raises RuntimeError or OSError where the store is gone."""

    def signal(self, wave: int) -> None:
        """Leave word that a rank waits in this wave."""
        ...

    def is_signaled(self, wave: int) -> bool:
        """Whether one does."""
        ...


class WakeSignal:
    """Rings and listens for one rank. `move` may be called by any thread.

    connect: reaches the store of a meeting.  on_signal: told of a wave that another rank waits in, in the
    doorbell's thread.  has_coordinator: whether one is there to tell the others.
    """

    def __init__(
        self,
        *,
        connect: Callable[[Meeting], SignalStore],
        on_signal: Callable[[int], None],
        has_coordinator: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._connect = connect
        self._on_signal = on_signal
        self._has_coordinator = has_coordinator
        self._clock = clock
        self._changed = threading.Condition()
        self._rank_status = RankStatus()
        self._meeting: Meeting | None = None
        self._asks_since: float | None = None
        self._signaled: tuple[int, int] = (0, 0)  # generation and wave that this rank has rung for last
        self._received: tuple[int, int] = (0, 0)
        self._signal_store: tuple[Meeting, SignalStore] | None = None  # of the thread
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="doorbell", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def move(self, rank_status: RankStatus, meeting: Meeting | None) -> None:
        """The rank stands there now, in the group of that meeting."""
        with self._changed:
            if not rank_status.asks:
                self._asks_since = None
            elif not self._rank_status.asks or rank_status.wave != self._rank_status.wave:
                self._asks_since = self._clock.now()
            if rank_status.state is not LockstepState.PAUSED:
                # What was heard before may have been refused, and nobody rings twice for a wave.
                self._received = (0, 0)
            self._rank_status, self._meeting = rank_status, meeting
            self._changed.notify()

    def stop(self) -> None:
        """Listen no more."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait until it listens no more; False where it still does."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s: float | None = 0.0
        while True:
            with self._changed:
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                if self._is_over:
                    return
                rank_status, meeting, asks_since = self._rank_status, self._meeting, self._asks_since
            try:
                wait_s = self._turn(rank_status, meeting, asks_since)
            except (RuntimeError, OSError) as error:
                logger.info("doorbell out of reach", extra={"cause": str(error).partition("\n")[0]})
                self._signal_store = None
                wait_s = _RETRY_S

    def _turn(
        self, rank_status: RankStatus, meeting: Meeting | None, asks_since: float | None
    ) -> float | None:
        """Ring or listen, as is due. For how long to wait then; None: until the rank moves."""
        if meeting is None or meeting.generation != rank_status.generation:
            self._signal_store = None
            return None
        key = (rank_status.generation, rank_status.wave)
        if asks_since is not None:
            return self._signal(key, meeting, asks_since)
        if rank_status.state is not LockstepState.PAUSED:
            return None
        if self._received != key and self._reach(meeting).is_signaled(rank_status.wave):
            with self._changed:
                if self._rank_status != rank_status:
                    return 0.0
                self._received = key
            logger.info("another rank has rung", extra={"wave": rank_status.wave})
            self._on_signal(rank_status.wave)
        return _LISTEN_S if self._has_coordinator() else _LISTEN_ALONE_S

    def _signal(self, key: tuple[int, int], meeting: Meeting, asks_since: float) -> float | None:
        if self._signaled == key:
            return None
        left_s = asks_since + SIGNAL_AFTER_S - self._clock.now()
        if left_s > 0 and self._has_coordinator():
            return min(left_s, _LISTEN_ALONE_S)
        self._reach(meeting).signal(key[1])
        self._signaled = key
        logger.info("rung for the other ranks", extra={"wave": key[1]})
        return None

    def _reach(self, meeting: Meeting) -> SignalStore:
        if self._signal_store is None or self._signal_store[0] != meeting:
            self._signal_store = (meeting, self._connect(meeting))
        return self._signal_store[1]


class TorchSignalStore:
    """A client of the store that rank 0 of a generation holds, with a connection of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._signaled = 0  # the wave that this rank has left word of last; 0: of none

    def signal(self, wave: int) -> None:
        """Leave word that a rank waits in this wave, and take back that of the one before: it is over."""
        if self._signaled not in (0, wave):
            self._store.delete_key(str(self._signaled))
        self._signaled = wave
        self._store.set(str(wave), "")

    def is_signaled(self, wave: int) -> bool:
        """Whether one does."""
        return self._store.check([str(wave)])


def connect_signal_store(meeting: Meeting, timeout_s: float) -> TorchSignalStore:
    """The bell of the ranks that meet there; RuntimeError or OSError where nobody answers in time."""
    store = reach_store(meeting.master_address, meeting.store_port, timeout_s)
    return TorchSignalStore(PrefixStore(signal_prefix(meeting), store))
