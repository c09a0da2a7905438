"""Which task is next, what fits into the queue, and what each account gets of both."""

from __future__ import annotations

import asyncio

import pytest

from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.workers.work_queue import LONG_BYTES, Work, WorkQueue
from triptych_kit.errors import ResourceExhausted

FILES = TextFiles(b"{}")
LONG = LONG_BYTES + 1


@pytest.fixture
async def queue() -> WorkQueue:
    return WorkQueue(2, max_pieces=100, max_bytes=10 * LONG_BYTES)


def piece(num_bytes: int = 1, account: str = "a", weight: int = 1) -> Work:
    answer = asyncio.get_running_loop().create_future()
    return Work(FILES, {}, b"x" * num_bytes, "prompt", answer, account, weight)


def take(queue: WorkQueue, now: float = 0.0, *, may_be_long: bool = True) -> Work | None:
    """The next task, which a worker begins."""
    work = queue.take(now, may_be_long=may_be_long)
    if work is not None:
        work.began_at = now or 0.001
    return work


def take_all(queue: WorkQueue, *, may_be_long: bool = True) -> list[Work]:
    taken = []
    while (work := queue.take(0.0, may_be_long=may_be_long)) is not None:
        taken.append(work)
    return taken


def run(queue: WorkQueue, now: float, took_s: float) -> Work | None:
    """Take the next task and end with it."""
    work = take(queue, now)
    if work is not None:
        queue.end(work, now + took_s)
    return work


def make_slow(queue: WorkQueue, account: str) -> None:
    queue.add(piece(account=account), 0.0)
    run(queue, 1.0, 4.0)


async def test_short_pieces_go_first_each_line_in_its_order(queue):
    long, short = [piece(LONG) for _ in range(2)], [piece(LONG_BYTES) for _ in range(2)]
    for work in (*long, *short):
        queue.add(work, 0.0)
    assert take_all(queue) == [*short, *long]
    assert len(queue) == 0


async def test_long_pieces_are_not_passed_over_for_ever(queue):
    long, short = piece(LONG), [piece() for _ in range(50)]
    for work in (*short, long):
        queue.add(work, 0.0)
    assert take_all(queue).index(long) == 16


async def test_long_pieces_wait_for_a_worker_that_may_take_them(queue):
    long, short = piece(LONG), [piece() for _ in range(50)]
    for work in (long, *short):
        queue.add(work, 0.0)
    assert take_all(queue, may_be_long=False) == short
    assert take(queue) is long


async def test_work_that_was_put_back_is_next(queue):
    first, second = piece(), piece()
    queue.add(second, 0.0)
    queue.add(first, 0.0, first=True)
    assert take(queue) is first
    queue.put_back(first, 0.0)
    assert take_all(queue) == [first, second]


async def test_room_is_counted_in_pieces_and_in_bytes(queue):
    large = piece(9 * LONG_BYTES)
    queue.add(large, 0.0)
    queue.check_room(piece(LONG_BYTES))
    with pytest.raises(ResourceExhausted, match=r"16385 more exceed the limit of 163840$"):
        queue.check_room(piece(LONG))
    queue.remove(large)
    queue.remove(large)
    assert len(queue) == 0
    queue.check_room(piece(11 * LONG_BYTES))
    for _ in range(100):
        queue.add(piece(), 0.0)
    with pytest.raises(ResourceExhausted, match=r"100 texts are waiting to be tokenized, the limit is 100$"):
        queue.check_room(piece())


async def test_an_account_has_its_share_of_a_queue_that_another_has_filled(queue):
    for _ in range(100):
        queue.add(piece(), 0.0)
    for _ in range(50):
        queue.check_room(piece(account="b"))
        queue.add(piece(account="b"), 0.0)
    with pytest.raises(ResourceExhausted, match=r"'b' has 50, its share is 50\)$"):
        queue.check_room(piece(account="b"))
    queue.clear()
    queue.add(piece(10 * LONG_BYTES), 0.0)
    queue.check_room(piece(5 * LONG_BYTES, "b"))
    with pytest.raises(ResourceExhausted, match="its share is 81920"):
        queue.check_room(piece(5 * LONG_BYTES + 1, "b"))


@pytest.mark.parametrize("num_bytes", [1, LONG])
async def test_accounts_take_turns_by_the_time_that_their_tasks_take(queue, num_bytes):
    for _ in range(90):
        queue.add(piece(account="slow"), 0.0)
        queue.add(piece(account="quick"), 0.0)
    used, now = {"slow": 0.0, "quick": 0.0}, 0.0
    for _ in range(90):
        work = take(queue, now)
        assert work is not None
        took_s = 0.08 if work.account == "slow" else 0.01
        queue.end(work, now + took_s)
        used[work.account] += took_s
        now += took_s
    assert used["slow"] == pytest.approx(used["quick"], abs=0.1)


async def test_tasks_of_an_account_that_run_are_counted_before_they_end(queue):
    queue = WorkQueue(8, max_pieces=100, max_bytes=LONG)
    for account in ("a", "b"):
        queue.add(piece(account=account), 0.0)
        run(queue, 1.0, 0.05)
    for _ in range(20):
        for account in ("a", "b"):
            queue.add(piece(account=account), 2.0)
    accounts = [work.account for work in (take(queue, 2.0) for _ in range(8)) if work]
    assert accounts.count("a") == accounts.count("b") == 4


async def test_a_slow_account_leaves_a_worker_to_those_that_are_not(queue):
    make_slow(queue, "slow")
    queue.add(piece(account="other"), 5.0)
    assert run(queue, 5.0, 0.01) is not None
    for _ in range(2):
        queue.add(piece(account="slow"), 6.0)
    assert take(queue, 6.0) is not None
    assert take(queue, 6.0) is None
    other = piece(account="other")
    queue.add(other, 6.0)
    assert take(queue, 6.0) is other


@pytest.mark.parametrize(("cpu_s", "is_slow"), [(0.01, False), (0.09, True)])
async def test_a_task_that_waited_for_a_core_does_not_make_its_account_a_slow_one(queue, cpu_s, is_slow):
    waited = piece(account="a")
    queue.add(waited, 0.0)
    assert take(queue, 0.0) is waited
    waited.cpu_s = cpu_s
    queue.end(waited, 0.3)
    queue.add(piece(account="other"), 1.0)
    assert run(queue, 1.0, 0.01) is not None
    for _ in range(2):
        queue.add(piece(account="a"), 2.0)
    assert [take(queue, 2.0) is not None for _ in range(2)] == [True, not is_slow]


async def test_a_slow_account_that_is_alone_has_all_workers(queue):
    make_slow(queue, "slow")
    queue.add(piece(account="other"), 5.0)
    assert run(queue, 5.0, 0.01) is not None
    for _ in range(2):
        queue.add(piece(account="slow"), 66.0)
    assert [take(queue, 66.0) is not None for _ in range(2)] == [True, True]


async def test_slow_long_tasks_of_one_account_do_not_hold_up_long_ones_of_another(queue):
    queue.add(piece(LONG, "slow"), 0.0)
    queue.add(piece(LONG, "slow"), 0.0)
    assert take(queue, 0.0) is not None
    other = piece(LONG, "other")
    queue.add(other, 0.05)
    # It may be one of a few ms, and then the worker for short ones stays free.
    assert take(queue, 0.05, may_be_long=False) is None
    assert take(queue, 0.2, may_be_long=False) is other
    assert take(queue, 0.2, may_be_long=False) is None


async def test_one_worker_serves_slow_accounts_too():
    queue = WorkQueue(1, max_pieces=100, max_bytes=LONG)
    make_slow(queue, "slow")
    queue.add(piece(account="other"), 5.0)
    queue.add(piece(account="slow"), 5.0)
    assert [work and work.account for work in (run(queue, 5.0, 0.01), run(queue, 6.0, 4.0))] == [
        "other",
        "slow",
    ]
