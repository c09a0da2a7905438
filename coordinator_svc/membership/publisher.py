"""Publishes topology changes to one frontend at its own pace. Has no queue: a slow reader gets the newest."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from coordinator_svc.membership.load import PublishTimer
from coordinator_svc.membership.topology import Seen, Topology
from triptych.coordinator.v1 import coordinator_pb2
from triptych_kit.clock import Clock

# A frontend that is slow to ack still gets its next message after this time: acks only pace the messages.
_ACK_PATIENCE_S = 1.0
# The least time between snapshots for a frontend that refuses every message.
_SNAPSHOT_INTERVAL_S = 1.0


class ChangeSignal:
    """Wakes tasks that wait for a change of the topology.

    Loads change thousands of times a second, so a task that already knows of a change of loads can leave
    those out of its wait.
    """

    def __init__(self) -> None:
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        self._urgent.set()
        self._urgent = asyncio.Event()
        self.notify_loads()

    def notify_loads(self) -> None:
        """Only loads have changed: wake the tasks that wait for any change."""
        self._any.set()
        self._any = asyncio.Event()

    async def wait(self, timeout_s: float, *, loads_too: bool = True) -> None:
        """Return at the next change, or after `timeout_s`."""
        await _wait(self._any if loads_too else self._urgent, timeout_s)


class Publisher:
    """The messages to one frontend: a snapshot, then deltas, one at a time."""

    def __init__(self, topology: Topology, signal: ChangeSignal, clock: Clock) -> None:
        self._topology = topology
        self._signal = signal
        self._clock = clock
        self._acked = 0
        self._ack_came = asyncio.Event()
        self._is_refused = False
        self._snapshot_at = 0.0

    def take_ack(self, nonce: int) -> None:
        """The frontend has applied the message with that nonce."""
        self._acked = max(self._acked, nonce)
        self._ack_came.set()

    def take_nack(self, nonce: int) -> None:
        """The frontend could not apply the message with that nonce; its next message is a snapshot."""
        self._is_refused = True
        self.take_ack(nonce)

    async def run(
        self, write: Callable[[coordinator_pb2.FrontendSessionResponse], Awaitable[None]], *, delay_s: float
    ) -> None:
        """Send a snapshot after `delay_s`, then the changes, until cancelled."""
        await asyncio.sleep(delay_s)
        timer = PublishTimer(self._clock.now())
        seen: Seen | None = None
        for nonce in itertools.count(1):
            message = self._message(nonce, seen)
            seen = self._topology.seen()
            await write(message)
            timer.published(self._clock.now())
            await self._until_acked(nonce)
            await self._until_due(seen, timer)
            if self._is_refused:
                seen = None

    def _message(self, nonce: int, seen: Seen | None) -> coordinator_pb2.FrontendSessionResponse:
        message = coordinator_pb2.FrontendSessionResponse(version=self._topology.version, nonce=nonce)
        if seen is None:
            message.snapshot.CopyFrom(self._topology.snapshot())
            self._is_refused, self._snapshot_at = False, self._clock.now()
        else:
            message.delta.CopyFrom(self._topology.delta(seen))
        return message

    async def _until_acked(self, nonce: int) -> None:
        while self._acked < nonce:
            self._ack_came.clear()
            if not await _wait(self._ack_came, _ACK_PATIENCE_S):
                return

    async def _until_due(self, seen: Seen, timer: PublishTimer) -> None:
        while True:
            now = self._clock.now()
            loads_changed = self._topology.loads_version != seen.loads_version
            wait_s = timer.wait_s(
                now, members_changed=self._topology.is_changed_since(seen), loads_changed=loads_changed
            )
            if self._is_refused:
                wait_s = self._snapshot_at + _SNAPSHOT_INTERVAL_S - now
            if wait_s <= 0:
                return
            await self._signal.wait(wait_s, loads_too=not loads_changed)


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        # Not wait_for, which in Python 3.11 may swallow the cancellation that ends a publisher.
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
