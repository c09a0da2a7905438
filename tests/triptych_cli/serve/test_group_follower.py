"""Following the size that a coordinator wants of a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.coordinator_svc.scaling.scaling_fakes import Served, asking, dense, scaling_service
from triptych.coordinator.v1 import scaling_pb2
from triptych_cli.serve.group_follower import follow_group


class Follower:
    """Records its calls, and waits for more."""

    def __init__(self) -> None:
        self.address = ""
        self.failures: list[Exception] = []  # raised by the next calls
        self.lines: list[str] = []
        self.num_kv_blocks = 0  # of the last call
        self._wanted: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()

    def want(self, num_engines: int, *, starts_missing: bool, num_kv_blocks: int) -> None:
        if self.failures:
            raise self.failures.pop()
        self.num_kv_blocks = num_kv_blocks
        self._wanted.put_nowait((num_engines, starts_missing))

    async def next(self) -> tuple[int, bool]:
        return await asyncio.wait_for(self._wanted.get(), 30)


@asynccontextmanager
async def following(group: str, served: Served) -> AsyncIterator[Follower]:
    """A follower of that group for the length of a test."""
    follower = Follower()
    follower.address = served.address
    task = asyncio.ensure_future(
        follow_group(group, lambda: follower.address, follower.want, follower.lines.append)
    )
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def scale(served: Served, group: str, size: int) -> None:
    async with asking(served) as stub:
        await stub.Scale(scaling_pb2.ScaleRequest(dp_group=group, new_size=size), timeout=30)


async def test_missing_engines_are_asked_for_while_an_operation_runs() -> None:
    async with scaling_service(dense("", 0, 1)) as served, following("", served) as follower:
        await scale(served, "", 3)
        assert await follower.next() == (3, True)
        async with asking(served) as stub:
            request = scaling_pb2.CancelOperationRequest(operation_id="scale-1")
            await stub.CancelOperation(request, timeout=30)
        assert await follower.next() == (2, False)


async def test_those_that_are_started_are_to_have_the_memory_of_those_that_are_there() -> None:
    async with (
        scaling_service(dense("", 0, 1, num_kv_blocks=640)) as served,
        following("", served) as follower,
    ):
        await scale(served, "", 3)
        assert await follower.next() == (3, True)
        assert follower.num_kv_blocks == 640


async def test_other_groups_and_groups_that_were_never_scaled_want_nothing() -> None:
    async with (
        scaling_service(dense("mine", 0), dense("other", 0)) as served,
        following("mine", served) as follower,
    ):
        await scale(served, "other", 4)
        await scale(served, "mine", 2)
        assert await follower.next() == (2, True)


async def test_a_coordinator_that_comes_back_elsewhere_is_followed_there() -> None:
    async with scaling_service(dense("", 0)) as first:
        await scale(first, "", 2)
        async with following("", first) as follower:
            assert await follower.next() == (2, True)
            async with scaling_service(dense("", 0)) as second:
                follower.address = second.address
                first.end()
                await scale(second, "", 5)
                assert await follower.next() == (5, True)


async def test_an_error_in_what_is_wanted_is_reported_and_the_size_is_followed_on() -> None:
    async with scaling_service(dense("", 0)) as served, following("", served) as follower:
        follower.failures.append(ValueError("a bug"))
        await scale(served, "", 2)
        assert await follower.next() == (2, True)
        assert follower.lines == ["the size of group '' could not be followed: ValueError: a bug"]
