"""Follows how many engines a group is to have, as its coordinator says. Starts and ends none itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from service_kit.channel import open_channel
from triptych.coordinator.v1 import scaling_pb2, scaling_pb2_grpc

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 2.0


class Want(Protocol):
    """Takes how many engines there are to be, and whether those that have left are to come back."""

    def __call__(self, num_engines: int, *, starts_missing: bool, num_kv_blocks: int) -> None:
        """Have so many from now on. num_kv_blocks: what those that are there have each; 0: not known."""
        ...


async def follow_group(
    group: str, admin_address: Callable[[], str], want: Want, report: Callable[[str], None]
) -> None:
    """Tell `want` the size of `group` on every change, for ever. An error in that is reported, once a try.

    The coordinator may be away, and may come back elsewhere: `admin_address` is asked before each attempt,
    and while it is away what it said last holds. One that has just started wants nothing until it is told to.
    """
    retry_s = _MIN_RETRY_S
    while True:
        address = admin_address()
        try:
            if address and await _follow_session(group, address, want):
                retry_s = _MIN_RETRY_S
        except Exception as error:  # noqa: BLE001  What runs goes on, and so does the size that is wanted.
            report(f"the size of group {group!r} could not be followed: {type(error).__name__}: {error}")
        await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
        retry_s = min(2 * retry_s, _MAX_RETRY_S)


async def _follow_session(group: str, address: str, want: Want) -> bool:
    """Follow one coordinator until its stream breaks; whether it had anything to say."""
    has_received = False
    async with open_channel(address) as channel:
        stub = scaling_pb2_grpc.ScalingServiceStub(channel)
        try:
            async for message in stub.WatchGroups(scaling_pb2.WatchGroupsRequest()):
                has_received = True
                _forward(group, message.groups, want)
        except grpc.RpcError:
            # It ends whenever the coordinator does; its own log says why.
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
