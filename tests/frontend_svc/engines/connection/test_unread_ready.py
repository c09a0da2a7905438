"""What an engine said of itself: the newest counts, and none is lost by a reader that is stopped."""

from __future__ import annotations

import asyncio

from frontend_svc.engines.connection.client import UnreadReady
from triptych.engine.v1 import session_pb2

OLD, NEW = session_pb2.Ready(model_name="old"), session_pb2.Ready(model_name="new")


async def test_it_is_there_until_it_was_read():
    unread = UnreadReady()
    unread.put(OLD)
    assert [await unread.get(), await unread.get()] == [OLD, OLD]
    unread.note_read(OLD)
    waiting = asyncio.ensure_future(unread.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    unread.put(NEW)
    assert await waiting is NEW


async def test_what_comes_while_another_is_read_is_read_next():
    unread = UnreadReady()
    unread.put(OLD)
    unread.put(NEW)
    unread.note_read(OLD)
    assert await unread.get() is NEW


async def test_the_end_of_a_session_takes_it_away():
    unread = UnreadReady()
    unread.put(OLD)
    unread.forget()
    waiting = asyncio.ensure_future(unread.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
