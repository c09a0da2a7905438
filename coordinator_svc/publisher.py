"""Tells one frontend what changed, in its own time. Keeps no queue: a late reader gets the newest."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from coordinator_svc.load import PublishTimer
from coordinator_svc.topology import Seen, Topology
from service_kit.clock import Clock
from triptych.coordinator.v1 import coordinator_pb2

# A frontend that is slow to ack gets its next message after this all the same: acks pace, they do not guard.
_ACK_PATIENCE_S = 1.0


class ChangeSignal:
    """Wakes whoever waits for a change of the topology."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change, or after `timeout_s`."""
        await _wait(self._event, timeout_s)


class Publisher:
    """The messages to one frontend: a snapshot, then deltas, one at a time."""

    def __init__(self, topology: Topology, signal: ChangeSignal, clock: Clock) -> None:
        self._topology = topology
        self._signal = signal
        self._clock = clock
        self._acked = 0
        self._ack_came = asyncio.Event()

    def take_ack(self, nonce: int) -> None:
        """Note that the frontend has taken in the message of that nonce."""
        self._acked = max(self._acked, nonce)
        self._ack_came.set()

    async def run(
        self, write: Callable[[coordinator_pb2.FrontendSessionResponse], Awaitable[None]], *, delay_s: float
    ) -> None:
        """Send the snapshot after `delay_s`, then whatever changes, until cancelled."""
        await asyncio.sleep(delay_s)
        seen = self._topology.seen()
        snapshot = self._topology.snapshot()
        await write(
            coordinator_pb2.FrontendSessionResponse(version=snapshot.version, nonce=1, snapshot=snapshot)
        )
        timer = PublishTimer(self._clock.now())
        for nonce in itertools.count(2):
            await self._until_acked(nonce - 1)
            await self._until_due(seen, timer)
            delta, version = self._topology.delta(seen), self._topology.version
            seen = self._topology.seen()
            await write(coordinator_pb2.FrontendSessionResponse(version=version, nonce=nonce, delta=delta))
            timer.published(self._clock.now())

    async def _until_acked(self, nonce: int) -> None:
        while self._acked < nonce:
            self._ack_came.clear()
            if not await _wait(self._ack_came, _ACK_PATIENCE_S):
                return

    async def _until_due(self, seen: Seen, timer: PublishTimer) -> None:
        while True:
            wait_s = timer.wait_s(
                self._clock.now(),
                members_changed=self._topology.members_version != seen.members_version,
                loads_changed=self._topology.loads_version != seen.loads_version,
            )
            if wait_s <= 0:
                return
            await self._signal.wait(wait_s)


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        # Not wait_for, which in Python 3.11 may swallow the cancellation that ends a publisher.
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
