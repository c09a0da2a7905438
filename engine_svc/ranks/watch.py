"""Starts the rank processes and watches their messages, heartbeats and exits. Knows no plans.

One thread owns the processes. It is also their parent for the kernel: if it ends, for any reason, they end.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from engine_svc.core.errors import DeviceLost
from engine_svc.ranks.control_pipe import RankConnection, RankMessage, read_prepared
from engine_svc.ranks.progress_board import RankHeartbeats
from triptych_kit.clock import StallTimer
from triptych_kit.process.child import Child
from triptych_kit.process.setup import child_command
from triptych_kit.process.stacks import write_beside, write_stacks_of

if TYPE_CHECKING:  # It imports torch, and the engine's process knows this module before it listens.
    from engine_svc.runner.preparer import OnPrepared

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_KILL_WAIT_S = 10.0
# For writing the stacks of ranks that hang, before they are ended.
_WRITE_S = 0.8


class RankLost(DeviceLost):
    """A rank ended, hung or failed, so that the engine cannot go on; all its ranks are being ended.

    details: the text of an error, which may hold paths or values.
    """

    def __init__(self, rank: int, why: str, details: str = "") -> None:
        super().__init__(f"rank {rank} {why}" + (f": {details}" if details else ""))
        self.rank = rank
        self.why = why
        self.details = details


@dataclass(frozen=True, slots=True)
class RankStart:
    """How to start a rank: the module to run, its first message, and what it inherits."""

    module: str
    spec: Mapping[str, object]
    pass_fds: tuple[int, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Time without heartbeats. A long step is not counted, as another thread sends the heartbeats."""

    hang_s: float = 4.0
    start_hang_s: float = 60.0  # until all are ready, and in a call: some work lets no other thread run
    stop_s: float = 5.0  # from the request to end until the kill


class RankWatch:
    """Starts ranks and watches them until `stop`, or until one is lost; then none is left."""

    def __init__(
        self,
        starts: Sequence[RankStart],
        heartbeats: RankHeartbeats,
        *,
        limits: WatchLimits,
        on_lost: Callable[[RankLost], object] = lambda lost: None,
        on_prepared: OnPrepared = lambda number, failure: None,
    ) -> None:
        self._starts = tuple(starts)
        self._heartbeats = heartbeats
        self._on_lost = on_lost
        self._on_prepared = on_prepared
        self._messages: SimpleQueue[tuple[int, RankMessage] | RankLost] = SimpleQueue()
        self._ranks: list[_Rank] = []
        # Readable as soon as waits are to be interrupted.
        self.lost_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.lost: RankLost | None = None
        self._blamed: RankLost | None = None
        self._is_stopping = False
        self._grace_s = limits.stop_s
        self._silence = Silence(len(starts), limits)
        # Busy with work that stops heartbeats for seconds, such as imports, or the end of a profile.
        self.may_be_busy = True
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def next_message(self, timeout_s: float) -> tuple[int, RankMessage]:
        """The next message of any rank. Raises RankLost, and TimeoutError after timeout_s."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"no rank sent a message for {timeout_s:g} s") from None
        if isinstance(message, RankLost):
            raise message
        return message

    def send(self, rank: int, message: Mapping[str, object]) -> None:
        """Send a rank a message; only while it starts, as it reads no messages afterwards."""
        # The message is short and the rank waits for it, so this does not block.
        try:
            self._ranks[rank].connection.send(message)
        except EOFError as error:
            # The watching thread finds out what happened to the rank.
            logger.debug("a rank cannot be sent a message", extra={"rank": rank, "error": str(error)})

    def all_are_ready(self) -> None:
        """Apply the shorter limit to ranks without heartbeats from now on."""
        self.may_be_busy = False

    def blame(self, rank: int, why: str) -> RankLost:
        """End the ranks because of what the caller has observed; returns the loss when none is left."""
        self._blamed = RankLost(rank, why)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        assert self.lost is not None, "the watch ended without having lost a rank or having been stopped"
        return self.lost

    def stop(self, grace_s: float | None = None) -> None:
        """End all ranks and wait for them; those that have not ended after grace_s are killed."""
        if grace_s is not None:
            self._grace_s = grace_s
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for fd in (self.lost_fd, self._wake_fd):
            os.close(fd)

    @property
    def process_ids(self) -> list[int]:
        return [rank.child.pid for rank in self._ranks]

    def _run(self) -> None:
        # Inherited by the ranks: a terminal or a service manager signals all processes, but the engine ends
        # its ranks, once its requests have ended.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        lost: RankLost | None = None
        try:
            for rank, start in enumerate(self._starts):
                self._ranks.append(_start(rank, start))
            for rank, start in enumerate(self._starts):
                self.send(rank, start.spec)
            lost = self._watch()
        except OSError as error:
            lost = RankLost(len(self._ranks), "cannot be started", str(error))
        except (
            Exception
        ) as error:  # Otherwise nothing would watch the ranks, and the engine would wait forever.
            logger.exception("the watch over the ranks failed")
            lost = RankLost(0, f"can no longer be watched ({type(error).__name__})", str(error))
        finally:
            # Whatever ended the watch, no rank is left behind.
            self._ask_to_end()
            if lost is not None:
                self._kill_all()
                self._notify_lost(lost)
            self._wait_for_ends(self._grace_s)

    def _notify_lost(self, lost: RankLost) -> None:
        logger.error("a rank is lost", extra={"rank": lost.rank, "why": lost.why, "details": lost.details})
        self.lost = lost
        self._messages.put(lost)
        os.eventfd_write(self.lost_fd, 1)
        self._on_lost(lost)

    def _watch(self) -> RankLost | None:
        """Returns when stopped, or when a rank is lost, which it returns."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for rank in self._ranks:
            poll.register(rank.end_fd, select.POLLIN)
            poll.register(rank.connection, select.POLLIN)
        while not self._is_stopping:
            ready = {fd for fd, _ in poll.poll(_POLL_S * 1000)}
            failed = self._blamed
            for index, rank in enumerate(self._ranks):
                if rank.connection.fileno() in ready:
                    failed = self._read(index, rank) or failed
                    if not rank.connection.is_open:
                        poll.unregister(rank.connection)
            if failed is not None and failed is not self._blamed:
                # When a rank is killed, others fail, and their messages may arrive before its exit.
                poll.poll(_POLL_S * 1000)
            killed, ended = self._find_ended()
            silent = self._find_silent()
            lost = killed or failed or ended or silent
            if lost is not None and not self._is_stopping:
                if lost is silent or lost is self._blamed:
                    # The rank hangs: its stacks cannot be read once it is ended.
                    write_beside(partial(write_stacks_of, self.process_ids), _WRITE_S)
                return lost
        return None

    def _read(self, index: int, rank: _Rank) -> RankLost | None:
        """Pass on a rank's messages; an error that it reports is its loss."""
        for message in rank.connection.receive_ready():
            if "failed" in message:
                return RankLost(index, str(message["failed"]), str(message["details"]))
            if "prepared" in message:
                self._on_prepared(*read_prepared(message))
            else:
                self._messages.put((index, message))
        return None

    def _find_ended(self) -> tuple[RankLost | None, RankLost | None]:
        """The first rank that was killed, and the first that ended by itself."""
        killed: RankLost | None = None
        ended: RankLost | None = None
        for index, rank in enumerate(self._ranks):
            code = rank.child.exit_code
            if code is not None and code < 0:
                killed = killed or RankLost(index, rank.child.how_it_ended)
            elif code is not None:
                ended = ended or RankLost(index, rank.child.how_it_ended)
        return killed, ended

    def _find_silent(self) -> RankLost | None:
        beats = [self._heartbeats.beats(index) for index in range(len(self._ranks))]
        silent = self._silence.look(beats, time.monotonic(), may_be_busy=self.may_be_busy)
        return RankLost(silent[0], f"sent no heartbeat for {silent[1]:g} s") if silent else None

    def _ask_to_end(self) -> None:
        for rank in self._ranks:
            rank.connection.close()

    def _kill_all(self) -> None:
        for rank in self._ranks:
            rank.child.kill()

    def _wait_for_ends(self, grace_s: float) -> None:
        """Wait until no rank is left; those that have not ended after grace_s are killed."""
        deadline = time.monotonic() + grace_s
        for rank in self._ranks:
            if not rank.child.join(deadline - time.monotonic()):
                rank.child.kill()
        for rank in self._ranks:
            if not rank.child.join(_KILL_WAIT_S):
                logger.error(
                    "a rank's process does not end after SIGKILL", extra={"process_id": rank.child.pid}
                )
            os.close(rank.end_fd)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank's process and the parent's end of its connection."""

    child: Child
    end_fd: int
    connection: RankConnection


class Silence:
    """Finds ranks without heartbeats. The silence of busy ranks does not count once they are not busy."""

    def __init__(self, num_ranks: int, limits: WatchLimits) -> None:
        self._limits = limits
        self._timers = [StallTimer(_POLL_S) for _ in range(num_ranks)]

    def look(self, beats: Sequence[int], now: float, *, may_be_busy: bool) -> tuple[int, float] | None:
        """The first rank without a heartbeat within the limit, and the limit. beats: counts by rank."""
        limit_s = self._limits.start_hang_s if may_be_busy else self._limits.hang_s
        silent_s = [
            timer.look((count, may_be_busy), now) for timer, count in zip(self._timers, beats, strict=True)
        ]
        return next(((rank, limit_s) for rank, seconds in enumerate(silent_s) if seconds >= limit_s), None)


def _start(rank: int, start: RankStart) -> _Rank:
    mine, theirs = socket.socketpair()
    with theirs:
        child = Child(
            f"rank-{rank}",
            child_command(start.module, str(theirs.fileno())),
            start.environment,
            pass_fds=(*start.pass_fds, theirs.fileno()),
        )
    return _Rank(child, child.end_fd(), RankConnection(mine))
