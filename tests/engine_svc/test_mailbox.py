"""The door of the engine thread: order, limits, merging and waking."""

from __future__ import annotations

import threading

from engine_svc.mailbox import Abort, Add, FinishedRow, Inbox, Outbox, StepOutput
from engine_svc.request import FinishReason, Request
from engine_svc.sampling_params import SamplingParams


def make_add(request_id: str = "a") -> Add:
    request = Request(request_id, [1, 2, 3], 3, SamplingParams(max_tokens=4))
    return Add(request, Outbox(max_bytes=100, wake=lambda: None), handle=0)


def make_step(step_number: int, rows: dict[int, list[int]], **columns) -> StepOutput:
    tokens = [token for row in rows.values() for token in row]
    return StepOutput(step_number, list(rows), [len(row) for row in rows.values()], tokens, **columns)


def rows_of(step: StepOutput) -> dict[int, list[int]]:
    rows, start = {}, 0
    for handle, num_tokens in zip(step.handles, step.num_tokens, strict=True):
        rows[handle] = step.token_ids[start : start + num_tokens]
        start += num_tokens
    return rows


def test_commands_leave_the_inbox_in_order_and_once():
    inbox = Inbox(max_commands=10)
    commands = [make_add("a"), Abort("a"), make_add("b")]
    assert all(inbox.put(command) for command in commands)
    assert inbox.take() == commands
    assert inbox.take() == []


def test_a_full_inbox_refuses_adds_but_no_aborts():
    inbox = Inbox(max_commands=1)
    assert inbox.put(make_add("a"))
    assert not inbox.put(make_add("b"))
    assert inbox.put(Abort("a"))
    assert len(inbox.take()) == 2
    assert inbox.put(make_add("b"))


def test_a_command_wakes_a_parked_loop():
    inbox, woken = Inbox(max_commands=1), threading.Event()

    def park() -> None:
        inbox.wait(None)
        woken.set()

    thread = threading.Thread(target=park)
    thread.start()
    inbox.put(Abort("a"))
    assert woken.wait(5)
    thread.join()


def test_waiting_ends_with_its_timeout():
    Inbox(max_commands=1).wait(0.001)


def test_a_read_step_is_the_published_one():
    outbox = Outbox(max_bytes=1000, wake=lambda: None)
    step = make_step(7, {1: [5], 2: [6, 7]})
    outbox.publish(step)
    assert outbox.take() is step
    assert outbox.take() is None


def test_unread_steps_are_merged_row_by_row():
    outbox = Outbox(max_bytes=1000, wake=lambda: None)
    outbox.publish(make_step(1, {4: [10], 9: [20]}, first=[(0, 16), (1, 0)]))
    outbox.publish(make_step(2, {9: [21, 22], 5: []}, finished=[FinishedRow(0, FinishReason.STOP, 22)]))
    outbox.publish(
        make_step(3, {5: [30], 4: [11]}, first=[(0, 3)], finished=[FinishedRow(1, FinishReason.ABORT)])
    )
    merged = outbox.take()
    assert merged.step_number == 3
    assert rows_of(merged) == {4: [10, 11], 9: [20, 21, 22], 5: [30]}
    assert merged.first == [(0, 16), (1, 0), (2, 3)]
    assert merged.finished == [FinishedRow(0, FinishReason.ABORT), FinishedRow(1, FinishReason.STOP, 22)]


def test_a_thousand_unread_steps_become_one():
    outbox = Outbox(max_bytes=100_000, wake=lambda: None)
    for number in range(1000):
        outbox.publish(make_step(number, {1: [number], 2: [number + 5]}))
    assert rows_of(outbox.take()) == {1: list(range(1000)), 2: list(range(5, 1005))}


def test_the_reader_is_woken_once_per_look():
    wakes = []
    outbox = Outbox(max_bytes=1000, wake=lambda: wakes.append(1))
    outbox.publish(make_step(1, {1: [1]}))
    outbox.publish(make_step(2, {1: [2]}))
    assert len(wakes) == 1
    outbox.take()
    outbox.publish(make_step(3, {1: [3]}))
    assert len(wakes) == 2


def test_an_outbox_nobody_reads_overflows_at_its_size_and_says_so():
    wakes = []
    outbox = Outbox(max_bytes=400, wake=lambda: wakes.append(1))
    for number in range(1000):
        outbox.publish(make_step(number, {1: [number]}))
    assert outbox.has_overflowed
    assert len(wakes) == 2
    assert len(outbox.take().token_ids) <= 100


def test_a_closed_outbox_keeps_nothing_and_wakes_nobody():
    wakes = []
    outbox = Outbox(max_bytes=1000, wake=lambda: wakes.append(1))
    outbox.publish(make_step(1, {1: [1]}))
    outbox.close()
    outbox.publish(make_step(2, {1: [2]}))
    assert outbox.take() is None
    assert len(wakes) == 1
