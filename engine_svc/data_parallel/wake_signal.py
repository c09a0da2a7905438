"""Starts waves on other ranks without the coordinator, by a key in the store of rank 0.

Its thread polls the store while its rank is between two waves, and sets the key while its rank asks for one.
Knows no process group and no wave machine.
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
from triptych_kit.clock import Clock

logger = logging.getLogger(__name__)

# How long the coordinator, if there is one, has to start the wave on the other ranks.
SIGNAL_AFTER_S = 0.5
# Poll interval: with a coordinator, signals are sent only after SIGNAL_AFTER_S.
_POLL_S = 0.25
_POLL_ALONE_S = 0.05
# After the store could not be reached.
_RETRY_S = 1.0


class SignalStore(Protocol):
    """A connection to the store. Both methods raise RuntimeError or OSError if the store is gone."""

    def signal(self, wave: int) -> None:
        """Set the key of a wave in which this rank waits."""
        ...

    def is_signaled(self, wave: int) -> bool: ...


class WakeSignal:
    """Sends and receives wake signals for one rank. `move` may be called by any thread.

    connect: connects to the store of a meeting.
    on_signal: called, in the thread of this object, with a wave in which another rank waits.
    has_coordinator: whether a coordinator starts waves on other ranks.
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
        self._signaled: tuple[int, int] = (0, 0)  # generation and wave of the last signal sent
        self._received: tuple[int, int] = (0, 0)
        self._signal_store: tuple[Meeting, SignalStore] | None = None  # of the thread
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="wake-signal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def move(self, rank_status: RankStatus, meeting: Meeting | None) -> None:
        """Set the rank's status, and the meeting of its group."""
        with self._changed:
            if not rank_status.asks:
                self._asks_since = None
            elif not self._rank_status.asks or rank_status.wave != self._rank_status.wave:
                self._asks_since = self._clock.now()
            if rank_status.state is not LockstepState.PAUSED:
                # A signal received before may have been refused, and is sent only once per wave.
                self._received = (0, 0)
            self._rank_status, self._meeting = rank_status, meeting
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False if it still runs."""
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
                cause = str(error).partition("\n")[0]
                logger.info("wake signal store unreachable", extra={"cause": cause})
                self._signal_store = None
                wait_s = _RETRY_S

    def _turn(
        self, rank_status: RankStatus, meeting: Meeting | None, asks_since: float | None
    ) -> float | None:
        """Send or poll. Returns how long to wait then; None: until the status changes."""
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
            logger.info("wake signal received", extra={"wave": rank_status.wave})
            self._on_signal(rank_status.wave)
        return _POLL_S if self._has_coordinator() else _POLL_ALONE_S

    def _signal(self, key: tuple[int, int], meeting: Meeting, asks_since: float) -> float | None:
        if self._signaled == key:
            return None
        left_s = asks_since + SIGNAL_AFTER_S - self._clock.now()
        if left_s > 0 and self._has_coordinator():
            return min(left_s, _POLL_ALONE_S)
        self._reach(meeting).signal(key[1])
        self._signaled = key
        logger.info("wake signal sent", extra={"wave": key[1]})
        return None

    def _reach(self, meeting: Meeting) -> SignalStore:
        if self._signal_store is None or self._signal_store[0] != meeting:
            self._signal_store = (meeting, self._connect(meeting))
        return self._signal_store[1]


class TorchSignalStore:
    """Wake signals as keys in the store of rank 0 of a generation."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._signaled = 0  # the last wave that this rank has signaled; 0: none

    def signal(self, wave: int) -> None:
        """Set the key of a wave, and delete the one of the wave before, which is over."""
        if self._signaled not in (0, wave):
            self._store.delete_key(str(self._signaled))
        self._signaled = wave
        self._store.set(str(wave), "")

    def is_signaled(self, wave: int) -> bool:
        return self._store.check([str(wave)])


def connect_signal_store(meeting: Meeting, timeout_s: float) -> TorchSignalStore:
    """Connect to the store of a meeting. Raises RuntimeError or OSError if it does not answer in time."""
    store = reach_store(meeting.master_address, meeting.store_port, timeout_s)
    return TorchSignalStore(PrefixStore(signal_prefix(meeting), store))
