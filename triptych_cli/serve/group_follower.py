"""Follows the wanted size of a group at its coordinator. Starts and stops no engines itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from triptych.coordinator.v1 import scaling_pb2, scaling_pb2_grpc
from triptych_kit.backoff import Backoff
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock

_MAX_RETRY_S = 2.0


class Want(Protocol):
    """Called with the wanted number of engines, and whether those that have left must be started again."""

    def __call__(self, num_engines: int, *, starts_missing: bool, num_kv_blocks: int) -> None:
        """num_kv_blocks: of each engine that runs; 0: not known."""
        ...


async def follow_group(
    group: str, admin_address: Callable[[], str], want: Want, report: Callable[[str], None]
) -> None:
    """Call `want` on every change of the wanted size of `group`, until cancelled. Errors are reported.

    The coordinator may be away, and may return at another address: `admin_address` is called before each
    attempt, and meanwhile its last size stays in force. A new coordinator has no wanted sizes at first.
    """
    backoff = Backoff(MonotonicClock(), max_s=_MAX_RETRY_S)
    while True:
        address = admin_address()
        try:
            if address and await _follow_session(group, address, want):
                backoff.note_connected()
        except Exception as error:  # noqa: BLE001  Running engines must not be affected.
            report(f"the size of group {group!r} could not be followed: {type(error).__name__}: {error}")
        await asyncio.sleep(backoff.next_s())


async def _follow_session(group: str, address: str, want: Want) -> bool:
    """Follow one coordinator until its stream breaks; returns whether it has sent a message."""
    has_received = False
    async with open_channel(address) as channel:
        stub = scaling_pb2_grpc.ScalingServiceStub(channel)
        try:
            async for message in stub.WatchGroups(scaling_pb2.WatchGroupsRequest()):
                has_received = True
                _forward(group, message.groups, want)
        except grpc.RpcError:
            # The stream ends with the coordinator, whose log has the reason.
            return has_received
    return has_received


def _forward(group: str, states: Iterable[scaling_pb2.GroupState], want: Want) -> None:
    for state in states:
        if state.dp_group == group and state.wanted_size:
            want(
                state.wanted_size,
                starts_missing=bool(state.operation_id),
                num_kv_blocks=state.num_kv_blocks,
            )
