"""Writes that begin where their message is made."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest

from tests.connections import without_collections
from triptych_kit.eager_writer import EagerWriter


class Wire:
    """Takes messages at once, and completes their writes when a test does."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.ended: list[int] = []
        self.taken: list[asyncio.Future[None]] = []

    async def write(self, message: int) -> None:
        self.given.append(message)
        self.taken.append(asyncio.get_running_loop().create_future())
        await self.taken[-1]
        self.ended.append(message)


async def test_a_message_is_on_the_wire_when_start_returns():
    wire = Wire()
    assert EagerWriter(wire.write).start(1)
    assert wire.given == [1]


async def test_a_stream_is_free_again_when_it_has_taken_the_message():
    wire = Wire()
    writer = EagerWriter(wire.write)
    assert writer.is_free()
    writer.start(1)
    assert not writer.is_free()
    wire.taken[0].set_result(None)
    assert writer.is_free()
    assert wire.ended == [1]


async def test_finish_waits_for_a_write_that_begins_while_it_waits():
    wire = Wire()
    writer = EagerWriter(wire.write)
    writer.start(1)
    finishing = asyncio.ensure_future(writer.finish())
    await asyncio.sleep(0)
    wire.taken[0].set_result(None)
    assert writer.is_free()
    writer.start(2)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not finishing.done()
    wire.taken[1].set_result(None)
    await finishing
    assert wire.ended == [1, 2]


async def test_a_write_that_waits_twice_keeps_the_stream_until_its_end():
    wire = Wire()

    async def write_twice(message: int) -> None:
        await wire.write(message)
        await wire.write(-message)

    writer = EagerWriter(write_twice)
    writer.start(1)
    wire.taken[0].set_result(None)
    assert not writer.is_free()
    wire.taken[1].set_result(None)
    await writer.finish()
    assert wire.ended == [1, -1]


async def test_finish_raises_for_a_stream_that_accepts_no_more():
    async def refuse(message: int) -> None:
        raise asyncio.InvalidStateError("the call is over")

    writer = EagerWriter(refuse)
    assert not writer.start(1)
    assert not writer.is_free()
    with pytest.raises(asyncio.InvalidStateError, match="over"):
        await writer.finish()


async def test_a_writer_to_a_cancelled_call_is_not_cancelled():
    async def refuse(message: int) -> None:
        raise asyncio.CancelledError

    writer = EagerWriter(refuse)
    assert not writer.start(1)
    with pytest.raises(asyncio.InvalidStateError, match="cancelled"):
        await writer.finish()


async def test_finish_raises_for_a_message_that_was_lost():
    wire = Wire()
    writer = EagerWriter(wire.write)
    assert writer.start(1)
    wire.taken[0].set_exception(asyncio.InvalidStateError("cut off"))
    assert not writer.is_free()
    with pytest.raises(asyncio.InvalidStateError, match="cut off"):
        await writer.finish()


async def test_what_a_closed_writer_has_written_ends_by_itself():
    wire = Wire()
    writer = EagerWriter(wire.write)
    writer.start(1)
    writer.close()
    # Left alone, it would be logged as an error that was never retrieved.
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    wire.taken[0].set_exception(asyncio.InvalidStateError("the call is over"))
    await asyncio.sleep(0)
    wire.taken.clear()
    del writer
    gc.collect()
    assert not unseen


async def test_a_writer_that_failed_and_is_closed_is_freed_without_a_collection():
    async def refuse(message: int) -> None:
        raise asyncio.InvalidStateError("the call is over")

    with without_collections():
        freed = weakref.ref(writer := EagerWriter(refuse))
        writer.start(1)
        with contextlib.suppress(asyncio.InvalidStateError):
            await writer.finish()
        writer.close()
        del writer
        assert freed() is None
