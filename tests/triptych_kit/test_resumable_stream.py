"""Numbered streams that outlive their links: what is kept, what is sent again, what is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from triptych_kit.clock import FakeClock
from triptych_kit.eager_writer import EagerWriter
from triptych_kit.errors import Aborted
from triptych_kit.resumable_stream import (
    EndOfStream,
    Link,
    MessageGap,
    PeerSilent,
    ReplayLog,
    ResumableStream,
    SilenceTimer,
    StreamReceiver,
)


def filled(num_messages: int, *, max_bytes: int = 10_000, **limits: int) -> ReplayLog[str]:
    """A log of messages "1", "2" and so on, of 10 bytes and one item each."""
    log: ReplayLog[str] = ReplayLog(max_bytes=max_bytes, **limits)
    for number in range(1, num_messages + 1):
        log.append(str(number), 10, 1)
    return log


def kept(log: ReplayLog[str]) -> list[str]:
    return [log.get(seq) for seq in range(log.first_seq, log.last_seq + 1)]


def test_what_is_acknowledged_is_dropped_and_the_rest_keeps_its_numbers():
    log = filled(5)
    log.acknowledge(3)
    assert (log.first_seq, log.last_seq, kept(log)) == (4, 5, ["4", "5"])
    assert (log.size_bytes, log.num_items) == (20, 2)


def test_an_older_acknowledgement_and_one_of_what_was_never_sent_change_nothing_that_counts():
    log = filled(4)
    log.acknowledge(2)
    log.acknowledge(1)
    assert log.first_seq == 3
    log.acknowledge(99)
    assert (log.first_seq, kept(log), log.size_bytes) == (5, [], 0)
    log.append("5", 10)
    assert kept(log) == ["5"]


def test_a_stream_can_be_resumed_after_any_message_whose_successors_are_kept():
    log = filled(5)
    log.acknowledge(3)
    assert [seq for seq in range(8) if log.can_resume(seq)] == [3, 4, 5]


def test_a_log_is_full_while_more_than_its_limit_is_unacknowledged():
    log: ReplayLog[str] = ReplayLog(max_bytes=500)
    log.append("", 400)
    assert not log.is_full
    log.append("", 5000)
    assert log.is_full
    log.acknowledge(1)
    assert log.is_full
    log.acknowledge(2)
    assert not log.is_full


def test_a_log_is_full_by_bytes_or_by_items():
    assert not filled(4, max_bytes=40, max_items=4).is_full
    assert filled(5, max_bytes=49, max_items=5).is_full
    assert filled(5, max_bytes=50, max_items=4).is_full


def test_trimming_drops_the_oldest_but_nothing_after_a_position_and_no_more_than_needed():
    log = filled(10, max_items=4)
    log.trim(3)
    assert (log.first_seq, log.is_full) == (4, True)
    log.trim(10)
    assert kept(log) == ["7", "8", "9", "10"]


def test_a_log_may_begin_after_messages_that_another_sender_has_sent():
    log: ReplayLog[str] = ReplayLog(max_bytes=10, after=7)
    assert (log.first_seq, log.last_seq, log.can_resume(7), log.can_resume(6)) == (8, 7, True, False)
    log.append("8", 1)
    assert kept(log) == ["8"]


def taken(stream: ResumableStream[str, Link], link: Link, num_messages: int = 100) -> list[str]:
    messages: list[str] = []
    while len(messages) < num_messages and (message := stream.take(link)) is not None:
        messages.append(message)
    return messages


def test_another_link_continues_after_what_was_received_over_the_one_before():
    stream: ResumableStream[str, Link] = ResumableStream(filled(5))
    first = Link()
    assert stream.attach(first) is None
    assert taken(stream, first, 4) == ["1", "2", "3", "4"]
    second = Link(after=2)
    assert stream.attach(second) is first
    assert taken(stream, second) == ["3", "4", "5"]
    stream.log.append("6", 10)
    assert taken(stream, second) == ["6"]


def test_an_acknowledgement_of_what_was_not_sent_over_the_link_drops_only_what_was():
    stream: ResumableStream[str, Link] = ResumableStream(filled(5))
    link = Link(after=1)
    stream.attach(link)
    assert taken(stream, link, 2) == ["2", "3"]
    stream.acknowledge(99)
    assert kept(stream.log) == ["4", "5"]
    assert taken(stream, link) == ["4", "5"]


def test_only_the_link_that_is_attached_can_be_detached():
    stream: ResumableStream[str, Link] = ResumableStream(filled(1))
    first, second = Link(), Link()
    stream.attach(first)
    stream.attach(second)
    assert not stream.detach(first)
    assert stream.link is second
    assert stream.detach(second)
    assert stream.link is None


def test_a_stream_that_cannot_be_resumed_keeps_nothing_that_was_taken():
    stream: ResumableStream[str, Link] = ResumableStream(filled(3), is_resumable=False)
    link = Link()
    assert taken(stream, link, 2) == ["1", "2"]
    assert (stream.log.size_bytes, kept(stream.log)) == (10, ["3"])


def test_the_first_end_counts():
    stream: ResumableStream[str, Link] = ResumableStream(filled(0))
    error = Aborted("over", reason="X")
    assert stream.end(error)
    assert not stream.end()
    assert (stream.is_over, stream.error) == (True, error)


async def test_a_change_between_two_waits_is_not_missed():
    stream: ResumableStream[str, Link] = ResumableStream(filled(0))
    for change in (stream.wake, stream.end, lambda: stream.attach(Link())):
        assert not stream.has_news
        change()
        assert stream.has_news
        async with asyncio.timeout(10):
            await stream.changed()


async def test_all_that_wait_for_a_change_are_woken_by_one():
    stream: ResumableStream[str, Link] = ResumableStream(filled(0))
    waits = [asyncio.ensure_future(stream.changed()) for _ in range(2)]
    await asyncio.sleep(0)
    stream.wake()
    async with asyncio.timeout(10):
        await asyncio.gather(*waits)


# The receiving end.

END = object()


@dataclass
class Message:
    seq: int
    size_bytes: int = 1

    def ByteSize(self) -> int:
        return self.size_bytes


class Connection:
    """Delivers what is put into `incoming`, and records what is acknowledged."""

    def __init__(self, *messages: object, last_seq: int = 0, **pace: Any) -> None:
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        for message in messages:
            self.incoming.put_nowait(message)
        self.acknowledged: asyncio.Queue[int] = asyncio.Queue()
        self.handled: list[int] = []
        self.may_continue = asyncio.Event()
        self.may_continue.set()
        self.receiver: StreamReceiver[Message] = StreamReceiver(
            SilenceTimer(FakeClock(), heartbeat_s=1.0), last_seq=last_seq
        )
        self.receiver.begin(
            **{"is_resumed": True, "max_messages": 0, "max_bytes": 100, "max_delay_s": 3600.0, **pace}
        )

    async def run(self) -> None:
        await self.receiver.run(self.incoming.get, self._handle, self.acknowledged.put_nowait, end=END)

    async def _handle(self, message: Message) -> None:
        await self.may_continue.wait()
        self.handled.append(message.seq)


async def test_messages_are_received_in_order_until_the_end():
    connection = Connection(Message(8), Message(9), END, last_seq=7)
    with pytest.raises(EndOfStream):
        await connection.run()
    assert (connection.handled, connection.receiver.last_seq) == ([8, 9], 9)


@pytest.mark.parametrize("seq", [1, 3], ids=["repeated", "left out"])
async def test_a_repeated_and_a_missing_message_are_found(seq):
    connection = Connection(Message(1), Message(seq))
    with pytest.raises(MessageGap, match=f"message {seq} came after 1"):
        await connection.run()
    assert (connection.handled, connection.receiver.last_seq) == ([1], 1)


async def test_a_stream_that_the_other_end_does_not_resume_begins_anew():
    connection = Connection(Message(1), END, last_seq=7, is_resumed=False)
    with pytest.raises(EndOfStream):
        await connection.run()
    assert connection.handled == [1]


async def test_a_message_counts_when_it_was_handled_whole():
    connection = Connection(Message(1), END, max_messages=1)
    connection.may_continue.clear()
    running = asyncio.ensure_future(connection.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert connection.receiver.silence.is_handling
    assert connection.acknowledged.empty()
    assert connection.receiver.last_seq == 0
    connection.may_continue.set()
    with pytest.raises(EndOfStream):
        await running
    assert connection.acknowledged.get_nowait() == 1


async def test_a_message_that_is_handled_while_the_receiver_is_closed_is_the_last():
    connection = Connection(Message(1), Message(2))
    connection.may_continue.clear()
    running = asyncio.ensure_future(connection.run())
    for _ in range(10):
        await asyncio.sleep(0)
    connection.receiver.close()
    connection.may_continue.set()
    await running
    assert (connection.handled, connection.receiver.last_seq) == ([1], 1)


@pytest.mark.parametrize(
    ("sizes", "acknowledged"),
    [([1] * 7, [3, 6]), ([60, 60, 60, 60], [2, 4]), ([1, 100, 1, 1, 1], [2, 5])],
    ids=["messages", "bytes", "either"],
)
async def test_so_many_messages_or_bytes_are_acknowledged_at_once(sizes, acknowledged):
    messages = [Message(seq, size) for seq, size in enumerate(sizes, start=1)]
    connection = Connection(*messages, END, max_messages=3, max_bytes=100)
    with pytest.raises(EndOfStream):
        await connection.run()
    assert [connection.acknowledged.get_nowait() for _ in acknowledged] == acknowledged
    assert connection.acknowledged.empty()


async def test_few_messages_are_acknowledged_after_a_while():
    connection = Connection(Message(1), Message(2), max_messages=100, max_delay_s=0.001)
    running = asyncio.ensure_future(connection.run())
    async with asyncio.timeout(10):
        while await connection.acknowledged.get() < 2:
            pass
    running.cancel()


class Sleeps:
    """Stands for `asyncio.sleep`: each call advances the clock, by more where the process is stopped."""

    def __init__(self, clock: FakeClock, before: Callable[[int], float]) -> None:
        self.num_sleeps = 0
        self._clock = clock
        self._before = before

    async def __call__(self, seconds: float) -> None:
        self.num_sleeps += 1
        self._clock.advance(seconds + self._before(self.num_sleeps))


async def silent_after(
    monkeypatch: pytest.MonkeyPatch, events: Callable[[SilenceTimer, int], float]
) -> float:
    """Seconds until the timer, with a heartbeat of 1 s, finds that its peer is silent."""
    clock = FakeClock()
    timer = SilenceTimer(clock, heartbeat_s=1.0)
    monkeypatch.setattr(asyncio, "sleep", Sleeps(clock, lambda num_sleeps: events(timer, num_sleeps)))
    with pytest.raises(PeerSilent, match="no heartbeat for 3"):
        await timer.watch()
    return clock.now()


async def test_a_peer_is_silent_after_three_heartbeats_without_a_message(monkeypatch):
    assert 3.0 < await silent_after(monkeypatch, lambda timer, num_sleeps: 0.0) < 3.1


async def test_a_message_starts_the_wait_anew(monkeypatch):
    def receive_at_2(timer: SilenceTimer, num_sleeps: int) -> float:
        if num_sleeps == 2:
            timer.received_at = 2.0
        return 0.0

    assert 5.0 < await silent_after(monkeypatch, receive_at_2) < 5.1


async def test_the_time_while_a_message_is_handled_is_no_silence(monkeypatch):
    def handle_until_10(timer: SilenceTimer, num_sleeps: int) -> float:
        timer.is_handling = num_sleeps <= 10
        return 0.0

    assert 13.0 < await silent_after(monkeypatch, handle_until_10) < 13.1


async def test_the_time_while_this_process_was_stopped_is_no_silence(monkeypatch):
    def stop_for_a_minute(timer: SilenceTimer, num_sleeps: int) -> float:
        return 60.0 if num_sleeps == 1 else 0.0

    assert 64.0 < await silent_after(monkeypatch, stop_for_a_minute) < 64.1


# Both ends, and between them a connection that breaks.

_NUM_MESSAGES = 4


class Wire:
    """A connection that breaks after so many bytes of messages, or of acknowledgements of two bytes each."""

    def __init__(self, num_bytes_down: int, num_bytes_up: int) -> None:
        self._num_bytes_down = num_bytes_down
        self._num_bytes_up = num_bytes_up
        self._delivered: asyncio.Queue[object] = asyncio.Queue()
        self._acknowledgements: list[int] = []
        self.is_broken = False

    async def write(self, message: Message) -> None:
        """What was written may still be lost, as the sender does not wait for it to arrive."""
        if self.is_broken:
            raise asyncio.InvalidStateError("the call is over")
        self._num_bytes_down -= message.size_bytes
        if self._num_bytes_down >= 0:
            self._delivered.put_nowait(message)
        else:
            self.is_broken = True
            self._delivered.put_nowait(END)

    async def read(self) -> object:
        return await self._delivered.get()

    def acknowledge(self, seq: int) -> None:
        self._num_bytes_up -= 2
        if self._num_bytes_up >= 0:
            self._acknowledgements.append(seq)
        else:
            self.is_broken = True
            self._delivered.put_nowait(END)

    def take_acknowledgements(self) -> list[int]:
        taken, self._acknowledgements = self._acknowledgements, []
        return taken


async def transferred(num_bytes_down: int, num_bytes_up: int) -> list[int]:
    """The numbers of the messages that are handled if the first connection breaks so and others do not."""
    log: ReplayLog[Message] = ReplayLog(max_bytes=1000)
    stream: ResumableStream[Message, Link] = ResumableStream(log)
    handled: list[int] = []
    last_seq, num_sent = 0, 0

    async def handle(message: Message) -> None:
        handled.append(message.seq)

    wire = Wire(num_bytes_down, num_bytes_up)
    while len(handled) < _NUM_MESSAGES:
        assert log.can_resume(last_seq)
        log.acknowledge(last_seq)
        stream.attach(link := Link(after=last_seq))
        receiver: StreamReceiver[Message] = StreamReceiver(
            SilenceTimer(FakeClock(), heartbeat_s=1.0), last_seq=last_seq
        )
        receiver.begin(is_resumed=True, max_messages=1, max_bytes=1000, max_delay_s=1.0)
        receiving = asyncio.ensure_future(receiver.run(wire.read, handle, wire.acknowledge, end=END))
        writer = EagerWriter(wire.write)
        while not wire.is_broken and len(handled) < _NUM_MESSAGES:
            message = stream.take(link)
            if message is not None:
                writer.start(message)
            elif num_sent < _NUM_MESSAGES:
                num_sent += 1
                log.append(Message(num_sent, 3), 3)
            await asyncio.sleep(0)
            for seq in wire.take_acknowledgements():
                log.acknowledge(seq)
        if wire.is_broken:
            with pytest.raises(EndOfStream):
                await receiving
        receiving.cancel()
        last_seq = receiver.last_seq
        wire = Wire(1000, 1000)
    return handled


async def test_a_connection_that_breaks_at_any_byte_of_any_message_loses_none_and_repeats_none():
    whole = list(range(1, _NUM_MESSAGES + 1))
    for num_bytes in range(3 * _NUM_MESSAGES + 1):
        assert await transferred(num_bytes, 1000) == whole, num_bytes


async def test_a_connection_that_breaks_at_any_byte_of_any_acknowledgement_loses_none_and_repeats_none():
    whole = list(range(1, _NUM_MESSAGES + 1))
    for num_bytes in range(2 * _NUM_MESSAGES + 1):
        assert await transferred(1000, num_bytes) == whole, num_bytes
