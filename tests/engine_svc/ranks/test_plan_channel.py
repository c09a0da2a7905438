"""Every reader gets every message, whole and in order, and whoever waits can be told to give up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine_svc.ranks.plan_channel import (
    Channel,
    ChannelInterrupted,
    ChannelReader,
    ChannelTimeout,
    ChannelWriter,
    create_channel,
)
from engine_svc.ranks.progress_board import ProgressBoard, start_heart

CAPACITY = 1 << 12


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = create_channel(num_readers=2, capacity=CAPACITY)
    yield made
    made.close()


@pytest.fixture
def interrupt() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def messages(num: int) -> list[bytes]:
    """From empty ones to some of several rings."""
    rng = random.Random(7)
    sizes = [0, 1, CAPACITY // 4, CAPACITY, 5 * CAPACITY + 3]
    return [rng.randbytes(rng.choice([*sizes, rng.randrange(300)])) for _ in range(num)]


def receive_all(reader: ChannelReader, num: int) -> list[bytes | None]:
    return [reader.receive(timeout_s=20) for _ in range(num)]


@pytest.mark.parametrize("spin_s", [0.0, 1e-4])
def test_every_reader_gets_every_message_in_order(channel: Channel, spin_s: float) -> None:
    sent = messages(400)
    writer = ChannelWriter(channel.writer)
    with ThreadPoolExecutor() as pool:
        received = [
            pool.submit(receive_all, ChannelReader(end, spin_s=spin_s), len(sent)) for end in channel.readers
        ]
        for message in sent:
            writer.send(message, timeout_s=20)
    assert [future.result() == sent for future in received] == [True, True]


def test_a_reader_without_a_message_gets_nothing(channel: Channel) -> None:
    reader = ChannelReader(channel.readers[0])
    assert reader.receive(timeout_s=0.0) is None
    ChannelWriter(channel.writer).send(b"plan", timeout_s=1)
    assert reader.receive(timeout_s=0.0) == b"plan"
    assert reader.receive(timeout_s=0.001) is None


def test_a_writer_waits_for_the_slowest_reader_and_says_who_it_is(channel: Channel) -> None:
    quick, slow = (ChannelReader(end) for end in channel.readers)
    writer = ChannelWriter(channel.writer)
    half = b"x" * (CAPACITY // 2)
    writer.send(half, timeout_s=1)
    assert quick.receive(timeout_s=1) == half
    with pytest.raises(ChannelTimeout, match="reader 1 made no room"):
        writer.send(half, timeout_s=0.01)
    assert slow.receive(timeout_s=1) == half


def test_who_waits_for_a_message_can_be_told_to_give_up(channel: Channel, interrupt: int) -> None:
    reader = ChannelReader(channel.readers[0], interrupt_fd=interrupt)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.receive)
        os.eventfd_write(interrupt, 1)
        assert isinstance(waiting.exception(timeout=20), ChannelInterrupted)


def test_who_waits_for_room_can_be_told_to_give_up(channel: Channel, interrupt: int) -> None:
    writer = ChannelWriter(channel.writer, interrupt_fd=interrupt)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(writer.send, b"y" * 2 * CAPACITY, timeout_s=60)
        os.eventfd_write(interrupt, 1)
        assert isinstance(waiting.exception(timeout=20), ChannelInterrupted)


READER = """
import sys
from engine_svc.ranks.plan_channel import ChannelReader, reader_end
reader = ChannelReader(reader_end([int(value) for value in sys.argv[1:]]))
while message := reader.receive():
    sys.stdout.buffer.write(message)
    sys.stdout.flush()
"""


def test_two_that_write_more_than_a_ring_to_each_other_both_arrive() -> None:
    """Whoever waits for room reads what the other one writes, and finds it later."""
    there, back = (create_channel(num_readers=1, capacity=CAPACITY) for _ in range(2))
    replies = ChannelReader(back.readers[0])
    writer = ChannelWriter(there.writer, replies=replies)
    plan, small, large = b"p" * 3 * CAPACITY, b"s", b"r" * 3 * CAPACITY

    def answer_before_reading() -> bytes | None:
        answers = ChannelWriter(back.writer)
        for reply in (small, small, large):
            answers.send(reply, timeout_s=5)
        return ChannelReader(there.readers[0]).receive(timeout_s=5)

    with ThreadPoolExecutor() as pool:
        received = pool.submit(answer_before_reading)
        assert replies.receive(timeout_s=5) == small
        writer.send(plan, timeout_s=5)
        assert received.result() == plan
    assert [replies.receive(timeout_s=0) for _ in range(3)] == [small, large, None]
    there.close()
    back.close()


def reading_process(channel: Channel, index: int) -> subprocess.Popen[bytes]:
    end = channel.readers[index]
    numbers = [str(number) for number in (*end.fds, end.capacity)]
    return subprocess.Popen(
        [sys.executable, "-c", READER, *numbers],
        pass_fds=end.fds,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_process_reads_what_another_writes_and_nothing_is_left_when_it_is_killed() -> None:
    channel = create_channel(num_readers=1, capacity=CAPACITY)
    with reading_process(channel, 0) as process:
        assert process.stdout is not None
        writer = ChannelWriter(channel.writer)
        sent = b"".join(message or b"." for message in messages(50))
        for start in range(0, len(sent), 9000):
            writer.send(sent[start : start + 9000], timeout_s=20)
            assert process.stdout.read(len(sent[start : start + 9000])) == sent[start : start + 9000]
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=20) == -signal.SIGKILL
    channel.close()
    # Memory with a name would stay behind.
    assert "memfd:triptych" in mapped
    assert "/dev/shm/" not in mapped


def test_signs_of_life_are_seen_on_every_board_of_the_same_memory() -> None:
    board = ProgressBoard.create(num_ranks=2)
    seen = ProgressBoard(board.fd, num_ranks=2)
    board.finish_step(1)
    start_heart(board, rank=0, interval_s=0.001)
    deadline = threading.Event()
    while seen.beats(0) < 3:
        assert not deadline.wait(0.001)
    assert [(seen.steps(rank), seen.beats(1)) for rank in range(2)] == [(0, 0), (1, 0)]
