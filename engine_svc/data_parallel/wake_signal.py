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

from engine_svc.data_parallel.driver import Standing
from engine_svc.data_parallel.group import Meeting
from engine_svc.data_parallel.torch_group import bell_place, reach_store
from engine_svc.data_parallel.wave import LockstepState
from service_kit.clock import Clock

logger = logging.getLogger(__name__)

# So long the coordinator, where there is one, has to let the others join.
RING_AFTER_S = 0.5
# How often a rank listens: with a coordinator it will not hear anything for as long as that.
_LISTEN_S = 0.25
_LISTEN_ALONE_S = 0.05
# After the store could not be reached.
_RETRY_S = 1.0


class Bell(Protocol):
    """A connection to the store. Each of these raises RuntimeError or OSError where the store is gone."""

    def ring(self, wave: int) -> None:
        """Leave word that a rank waits in this wave."""
        ...

    def is_rung(self, wave: int) -> bool:
        """Whether one does."""
        ...


class Doorbell:
    """Rings and listens for one rank. `move` may be called by any thread.

    connect: reaches the store of a meeting.  on_ring: told of a wave that another rank waits in, in the
    doorbell's thread.  has_coordinator: whether one is there to tell the others.
    """

    def __init__(
        self,
        *,
        connect: Callable[[Meeting], Bell],
        on_ring: Callable[[int], None],
        has_coordinator: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._connect = connect
        self._on_ring = on_ring
        self._has_coordinator = has_coordinator
        self._clock = clock
        self._changed = threading.Condition()
        self._standing = Standing()
        self._meeting: Meeting | None = None
        self._asks_since: float | None = None
        self._rung: tuple[int, int] = (0, 0)  # generation and wave that this rank has rung for last
        self._heard: tuple[int, int] = (0, 0)
        self._bell: tuple[Meeting, Bell] | None = None  # of the thread
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="doorbell", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def move(self, standing: Standing, meeting: Meeting | None) -> None:
        """The rank stands there now, in the group of that meeting."""
        with self._changed:
            if not standing.asks:
                self._asks_since = None
            elif not self._standing.asks or standing.wave != self._standing.wave:
                self._asks_since = self._clock.now()
            if standing.state is not LockstepState.PAUSED:
                # What was heard before may have been refused, and nobody rings twice for a wave.
                self._heard = (0, 0)
            self._standing, self._meeting = standing, meeting
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
                standing, meeting, asks_since = self._standing, self._meeting, self._asks_since
            try:
                wait_s = self._turn(standing, meeting, asks_since)
            except (RuntimeError, OSError) as error:
                logger.info("doorbell out of reach", extra={"cause": str(error).partition("\n")[0]})
                self._bell = None
                wait_s = _RETRY_S

    def _turn(self, standing: Standing, meeting: Meeting | None, asks_since: float | None) -> float | None:
        """Ring or listen, as is due. For how long to wait then; None: until the rank moves."""
        if meeting is None or meeting.generation != standing.generation:
            self._bell = None
            return None
        place = (standing.generation, standing.wave)
        if asks_since is not None:
            return self._ring(place, meeting, asks_since)
        if standing.state is not LockstepState.PAUSED:
            return None
        if self._heard != place and self._reach(meeting).is_rung(standing.wave):
            with self._changed:
                if self._standing != standing:
                    return 0.0
                self._heard = place
            logger.info("another rank has rung", extra={"wave": standing.wave})
            self._on_ring(standing.wave)
        return _LISTEN_S if self._has_coordinator() else _LISTEN_ALONE_S

    def _ring(self, place: tuple[int, int], meeting: Meeting, asks_since: float) -> float | None:
        if self._rung == place:
            return None
        left_s = asks_since + RING_AFTER_S - self._clock.now()
        if left_s > 0 and self._has_coordinator():
            return min(left_s, _LISTEN_ALONE_S)
        self._reach(meeting).ring(place[1])
        self._rung = place
        logger.info("rung for the other ranks", extra={"wave": place[1]})
        return None

    def _reach(self, meeting: Meeting) -> Bell:
        if self._bell is None or self._bell[0] != meeting:
            self._bell = (meeting, self._connect(meeting))
        return self._bell[1]


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
