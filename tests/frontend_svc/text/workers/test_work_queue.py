"""Which piece of work is next."""

from __future__ import annotations

import asyncio

import pytest

from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.workers.work_queue import LONG_BYTES, Work, WorkQueue

FILES = TextFiles(b"{}")


@pytest.fixture
async def queue() -> WorkQueue:
    return WorkQueue(max_pieces=100, max_bytes=10 * LONG_BYTES)


def piece(num_bytes: int = 1) -> Work:
    return Work(FILES, {}, b"x" * num_bytes, "prompt", asyncio.get_running_loop().create_future())


def take_all(queue: WorkQueue, *, may_be_long: bool = True) -> list[Work]:
    taken = []
    while (work := queue.take(may_be_long=may_be_long)) is not None:
        taken.append(work)
    return taken


async def test_short_pieces_go_first_each_line_in_its_order(queue):
    long, short = [piece(LONG_BYTES + 1) for _ in range(2)], [piece(LONG_BYTES) for _ in range(2)]
    for work in (*long, *short):
        queue.add(work)
    assert take_all(queue) == [*short, *long]
    assert len(queue) == 0


async def test_long_pieces_are_not_passed_over_for_ever(queue):
    long, short = piece(LONG_BYTES + 1), [piece() for _ in range(50)]
    for work in (*short, long):
        queue.add(work)
    assert take_all(queue).index(long) == 16


async def test_long_pieces_wait_for_a_worker_that_may_take_them(queue):
    long, short = piece(LONG_BYTES + 1), [piece() for _ in range(50)]
    for work in (long, *short):
        queue.add(work)
    assert take_all(queue, may_be_long=False) == short
    assert queue.take(may_be_long=True) is long


async def test_work_that_was_taken_before_is_next(queue):
    first, second = piece(), piece()
    queue.add(first)
    queue.add(second, first=True)
    assert take_all(queue) == [second, first]


async def test_room_is_counted_in_pieces_and_in_bytes(queue):
    large = piece(9 * LONG_BYTES)
    queue.add(large)
    assert queue.has_room_for(piece(LONG_BYTES))
    assert not queue.has_room_for(piece(LONG_BYTES + 1))
    queue.remove(large)
    queue.remove(large)
    assert len(queue) == 0
    assert queue.has_room_for(piece(11 * LONG_BYTES))
    for _ in range(100):
        queue.add(piece())
    assert not queue.has_room_for(piece())
