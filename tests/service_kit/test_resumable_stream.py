"""Numbered streams that outlive their links: what is kept, what is sent again, what is acknowledged."""

from __future__ import annotations

import asyncio

from service_kit.errors import Aborted
from service_kit.resumable_stream import Link, ReplayLog, ResumableStream


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
    messages = []
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
