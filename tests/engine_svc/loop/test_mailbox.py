"""The door of the engine thread: order, limits, merging and waking."""

from __future__ import annotations

import random
import threading

import pytest

from engine_svc.cache.observer import StoredBlocks
from engine_svc.core.request import FinishReason, FirstOutput, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.mailbox import (
    Abort,
    Add,
    AllBlocksRemoved,
    Inbox,
    KVEventLog,
    Outbox,
    RemovedBlocks,
    part_of,
)
from engine_svc.loop.step_output import MAX_PIECE_BYTES, FinishedRow, StepOutput


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
    outbox.publish(make_step(1, {4: [10], 9: [20]}, first=[(0, FirstOutput(16)), (1, FirstOutput(0))]))
    outbox.publish(make_step(2, {9: [21, 22], 5: []}, finished=[FinishedRow(0, FinishReason.STOP, 22)]))
    outbox.publish(
        make_step(
            3, {5: [30], 4: [11]}, first=[(0, FirstOutput(3))], finished=[FinishedRow(1, FinishReason.ABORT)]
        )
    )
    merged = outbox.take()
    assert merged.step_number == 3
    assert rows_of(merged) == {4: [10, 11], 9: [20, 21, 22], 5: [30]}
    assert merged.first == [(0, FirstOutput(16)), (1, FirstOutput(0)), (2, FirstOutput(3))]
    assert merged.parts == [(0, [1, 1]), (1, [1, 2])]
    assert merged.finished == [FinishedRow(0, FinishReason.ABORT), FinishedRow(1, FinishReason.STOP, 22)]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_the_end_of_an_unread_turn_is_the_last_of_its_request_unless_that_fails(reason: FinishReason):
    outbox = Outbox(max_bytes=1000, wake=lambda: None)
    outbox.publish(make_step(1, {4: [10]}, finished=[FinishedRow(0, FinishReason.STOP, 10, turn_ended=True)]))
    outbox.publish(make_step(2, {9: [20], 4: []}, finished=[FinishedRow(1, reason)]))
    merged = outbox.take()
    assert merged is not None
    assert rows_of(merged) == {4: [10], 9: [20]}
    ends = {
        FinishReason.ABORT: FinishedRow(0, FinishReason.STOP, 10),
        FinishReason.ERROR: FinishedRow(0, reason),
    }
    assert merged.finished == [ends[reason]]


def test_a_thousand_unread_steps_become_one():
    outbox = Outbox(max_bytes=100_000, wake=lambda: None)
    for number in range(1000):
        outbox.publish(make_step(number, {1: [number], 2: [number + 5]}))
    assert rows_of(outbox.take()) == {1: list(range(1000)), 2: list(range(5, 1005))}


def test_steps_of_the_same_rows_between_others_lose_and_mix_nothing():
    rng = random.Random(6)
    for _ in range(50):
        outbox = Outbox(max_bytes=1_000_000, wake=lambda: None)
        expected, parts, finished, first = {}, {}, {}, {}
        handles = [3, 1, 2]
        for number in range(60):
            if rng.random() < 0.1:
                handles = rng.sample(range(8), rng.randint(0, 6))
            longest = 1 if rng.random() < 0.8 else 3
            rows = {handle: [number * 10 + place for place in range(longest)] for handle in handles}
            columns = {"finished": [], "first": [], "parts": []}
            for row, (handle, token_ids) in enumerate(rows.items()):
                expected.setdefault(handle, []).extend(token_ids)
                split = [1, longest - 1] if longest > 1 and rng.random() < 0.5 else [longest]
                parts.setdefault(handle, []).extend(split)
                if len(split) > 1:
                    columns["parts"].append((row, split))
                if rng.random() < 0.1:
                    first[handle] = FirstOutput(number)
                    columns["first"].append((row, first[handle]))
                if rng.random() < 0.1:
                    columns["finished"].append(FinishedRow(row, FinishReason.STOP, number))
                    finished[handle] = number
            outbox.publish(make_step(number, rows, **columns))
        merged = outbox.take()
        assert merged.step_number == 59
        assert rows_of(merged) == expected
        named = {handle: counts for handle, counts in parts.items() if len(counts) > 1}
        assert {merged.handles[row]: counts for row, counts in merged.parts} == named
        assert {merged.handles[row]: record for row, record in merged.first} == first
        assert {merged.handles[end.row]: end.stop_token_id for end in merged.finished} == finished


def test_the_reader_is_woken_once_per_look():
    wakes = []
    outbox = Outbox(max_bytes=1000, wake=lambda: wakes.append(1))
    outbox.publish(make_step(1, {1: [1]}))
    outbox.publish(make_step(2, {1: [2]}))
    assert len(wakes) == 1
    outbox.take()
    outbox.publish(make_step(3, {1: [3]}))
    assert len(wakes) == 2


def test_an_unread_outbox_overflows_at_its_limit_and_reports_it():
    wakes = []
    outbox = Outbox(max_bytes=400, wake=lambda: wakes.append(1))
    for number in range(1000):
        outbox.publish(make_step(number, {1: [number]}))
    assert outbox.has_overflowed
    assert len(wakes) == 2
    assert len(outbox.take().token_ids) <= 100


def test_one_step_is_taken_however_large_it_is():
    outbox = Outbox(max_bytes=10, wake=lambda: None)
    outbox.publish(make_step(1, {1: [1] * 100}))
    assert not outbox.has_overflowed
    assert rows_of(outbox.take()) == {1: [1] * 100}
    outbox.publish(make_step(2, {1: [2] * 100}))
    outbox.publish(make_step(3, {1: [3]}))
    assert outbox.has_overflowed


def test_a_step_too_large_for_one_message_is_taken_in_pieces_before_what_comes_next():
    outbox = Outbox(max_bytes=10, wake=lambda: None)
    ids = list(range(MAX_PIECE_BYTES // 4))
    outbox.publish(make_step(1, {1: ids}))
    first = outbox.take()
    assert outbox.has_rest
    outbox.publish(make_step(2, {1: [7]}))
    second, third = outbox.take(), outbox.take()
    assert [step.step_number for step in (first, second, third)] == [1, 1, 2]
    assert first.token_ids + second.token_ids == ids
    assert not outbox.has_rest
    assert outbox.take() is None


def test_a_closed_outbox_keeps_no_piece_either():
    outbox = Outbox(max_bytes=10, wake=lambda: None)
    outbox.publish(make_step(1, {1: [1] * MAX_PIECE_BYTES}))
    outbox.take()
    outbox.close()
    assert outbox.take() is None


def test_a_closed_outbox_drops_steps_and_does_not_wake_its_reader():
    wakes = []
    outbox = Outbox(max_bytes=1000, wake=lambda: wakes.append(1))
    outbox.publish(make_step(1, {1: [1]}))
    outbox.close()
    outbox.publish(make_step(2, {1: [2]}))
    assert outbox.take() is None
    assert len(wakes) == 1


def stored(*hashes: bytes, group: int = 0) -> StoredBlocks:
    token_ids = [ord(block_hash) + place for block_hash in hashes for place in range(2)]
    return StoredBlocks(list(hashes), b"root", token_ids, 2, group)


def seqs(log: KVEventLog, reader, max_batches: int = 100) -> list[int]:
    batches = log.take(reader, max_batches)
    assert batches is not None
    return [batch.seq for batch in batches]


def test_every_reader_gets_every_batch_once_and_in_order():
    log = KVEventLog(max_batches=10, max_blocks=100)
    early, _ = log.open_with_snapshot(lambda: None)
    for index in range(3):
        log.publish([stored(bytes([index]))], 1)
    late, snapshot = log.open_with_snapshot(lambda: None)
    assert [block.block_hashes for block in snapshot] == [[b"\0"], [b"\1"], [b"\2"]]
    log.publish([stored(b"x")], 1)
    assert seqs(log, early, 2) == [1, 2]
    assert seqs(log, early, 2) == [3, 4]
    assert seqs(log, early, 2) == []
    assert seqs(log, late) == [4]


def test_a_snapshot_holds_single_blocks_with_their_own_tokens_and_parents():
    log = KVEventLog(max_batches=10, max_blocks=100)
    log.publish([stored(b"a", b"b", b"c"), stored(b"a", group=1), RemovedBlocks([b"a"], 0)], 5)
    _, snapshot = log.open_with_snapshot(lambda: None)
    assert snapshot == [
        StoredBlocks([b"b"], b"a", [98, 99], 2, 0),
        StoredBlocks([b"c"], b"b", [99, 100], 2, 0),
        StoredBlocks([b"a"], b"root", [97, 98], 2, 1),
    ]
    log.publish([AllBlocksRemoved(), stored(b"d")], 1)
    assert [block.block_hashes for block in log.open_with_snapshot(lambda: None)[1]] == [[b"d"]]


def test_a_part_of_a_run_has_the_variant_of_the_run():
    run = StoredBlocks([b"a", b"b"], b"root", [1, 2], 1, 0, "cook")
    assert part_of(run, 1, 2) == StoredBlocks([b"b"], b"a", [2], 1, 0, "cook")


def test_a_part_of_a_run_continues_the_run():
    run = stored(b"a", b"b", b"c")
    assert part_of(run, 0, 3) is run
    assert part_of(run, 0, 1) == StoredBlocks([b"a"], b"root", [97, 98], 2, 0)
    assert part_of(run, 1, 3) == StoredBlocks([b"b", b"c"], b"a", [98, 99, 99, 100], 2, 0)


def test_a_reader_goes_on_from_a_kept_batch_alone():
    log = KVEventLog(max_batches=2, max_blocks=100)
    assert log.open(1, lambda: None) is None
    reader = log.open(0, lambda: None)
    assert reader is not None
    for index in range(3):
        log.publish([stored(bytes([index]))], 1)
    assert [log.open(seq, lambda: None) is not None for seq in range(5)] == [False, True, True, True, False]
    assert seqs(log, log.open(1, lambda: None)) == [2, 3]
    assert log.has_lost(reader)
    assert log.take(reader, 10) is None


def test_what_is_kept_is_limited_by_blocks_too_but_for_the_newest():
    log = KVEventLog(max_batches=100, max_blocks=4)
    log.publish([stored(b"a", b"b", b"c")], 3)
    log.publish([stored(b"d")], 1)
    assert log.open(0, lambda: None) is not None
    log.publish([stored(b"e")], 1)
    assert log.open(0, lambda: None) is None
    log.publish([RemovedBlocks([bytes([index]) for index in b"abcde"], 0)], 5)
    assert seqs(log, log.open(3, lambda: None)) == [4]
    assert log.open(2, lambda: None) is None
    log.publish([stored(b"f")], 1)
    log.publish([stored(b"g"), stored(b"h"), stored(b"i")], 3)
    assert seqs(log, log.open(4, lambda: None)) == [5, 6]


def test_a_reader_is_woken_once_until_it_looks_and_never_after_it_is_closed():
    log = KVEventLog(max_batches=10, max_blocks=100)
    woken: list[int] = []
    reader, _ = log.open_with_snapshot(lambda: woken.append(1))
    for index in range(3):
        log.publish([stored(bytes([index]))], 1)
    assert len(woken) == 1
    log.take(reader, 1)
    log.publish([stored(b"x")], 1)
    assert len(woken) == 2
    log.take(reader, 10)
    assert log.num_readers == 1
    log.close(reader)
    log.publish([stored(b"y")], 1)
    assert (len(woken), log.num_readers) == (2, 0)
