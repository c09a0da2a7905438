"""The slot between producer and reader: merging, kinds, errors first, slow readers."""

from __future__ import annotations

import asyncio

import pytest

from frontend_svc.output.collector import (
    Collector,
    Ending,
    EndReason,
    OutputKind,
    OutputPiece,
    ReaderLimit,
)
from frontend_svc.output.logprobs import Logprobs
from triptych_kit.errors import ResourceExhausted, Unavailable

STOP = Ending(EndReason.STOP)


def collector(
    kind: OutputKind = OutputKind.DELTA,
    *,
    interval: int = 1,
    limit: ReaderLimit | None = None,
    on_slow=lambda: None,
) -> Collector:
    return Collector(kind, stream_interval=interval, limit=limit or ReaderLimit(), on_slow=on_slow)


async def piece_of(slot: Collector) -> OutputPiece:
    (piece,) = (await slot.get()).pieces
    return piece


async def test_unread_deltas_merge():
    slot = collector()
    slot.put(0, "ab", [1], None)
    slot.put(0, "c", [2, 3], None)
    output = await piece_of(slot)
    assert (output.text, output.token_ids, output.num_output_tokens, output.ending) == (
        "abc",
        [1, 2, 3],
        3,
        None,
    )


async def test_the_end_merges_with_what_is_unread():
    slot = collector()
    slot.put(0, "a", [1], None)
    slot.put(0, "b", [2], None)
    slot.put(0, "c", [3], STOP)
    output = await piece_of(slot)
    assert (output.text, output.ending) == ("abc", STOP)


async def test_deltas_are_read_once():
    slot = collector()
    slot.put(0, "a", [1], None)
    await slot.get()
    slot.put(0, "b", [2], STOP)
    output = await piece_of(slot)
    assert (output.text, output.token_ids, output.num_output_tokens) == ("b", [2], 2)


async def test_cumulative_outputs_replace_each_other():
    slot = collector(OutputKind.CUMULATIVE)
    slot.put(0, "a", [1], None)
    first = await piece_of(slot)
    slot.put(0, "b", [2], None)
    slot.put(0, "c", [3], STOP)
    last = await piece_of(slot)
    assert (first.text, first.token_ids) == ("a", [1])
    assert (last.text, last.token_ids) == ("abc", [1, 2, 3])


async def test_final_only_wakes_the_reader_once():
    slot = collector(OutputKind.FINAL_ONLY)
    reader = asyncio.ensure_future(slot.get())
    slot.put(0, "a", [1], None)
    await asyncio.sleep(0)
    assert not reader.done()
    slot.put(0, "b", [2], STOP)
    assert (await reader).pieces[0].text == "ab"


async def test_stream_interval_gives_the_first_token_then_groups_then_the_rest():
    slot, sizes = collector(interval=10), []
    for index in range(25):
        reader = asyncio.ensure_future(slot.get())
        slot.put(0, "x", [index], STOP if index == 24 else None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if reader.done():
            sizes.append(len(reader.result().pieces[0].token_ids))
        reader.cancel()
    assert sizes == [1, 10, 10, 4]


async def test_an_error_overtakes_what_is_unread_and_stays():
    slot = collector()
    slot.put(0, "a", [1], None)
    slot.fail(Unavailable("gone"))
    slot.fail(Unavailable("second"))
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            await slot.get()


async def test_an_error_wakes_a_waiting_reader():
    slot = collector()
    reader = asyncio.ensure_future(slot.get())
    await asyncio.sleep(0)
    slot.fail(Unavailable("gone"))
    with pytest.raises(Unavailable):
        await reader


@pytest.mark.parametrize(
    "limit", [ReaderLimit(max_tokens=4, grace_s=0.0), ReaderLimit(max_bytes=7, grace_s=0.0)]
)
async def test_a_reader_behind_its_limit_is_ended(limit):
    slow = asyncio.Event()
    slot = collector(limit=limit, on_slow=slow.set)
    slot.put(0, "日", [1, 2, 3], None)
    slot.put(0, "日本", [4, 5], None)
    await slow.wait()
    with pytest.raises(ResourceExhausted, match="unread"):
        await slot.get()


async def test_a_reader_that_catches_up_in_time_goes_on():
    slot = collector(limit=ReaderLimit(max_tokens=1, grace_s=0.0))
    slot.put(0, "ab", [1, 2], None)
    await slot.get()
    # The timer would fire in these turns of the loop, had reading not stopped it.
    for _ in range(3):
        await asyncio.sleep(0)
    slot.put(0, "c", [3], STOP)
    assert (await piece_of(slot)).text == "c"


async def test_cached_tokens_are_reported_with_the_first_output():
    slot = collector()
    slot.note_cached(32)
    slot.put(0, "a", [1], None)
    assert (await slot.get()).num_cached_tokens == 32


def group(kind: OutputKind, n: int, **fields) -> Collector:
    return Collector(kind, n, stream_interval=1, limit=ReaderLimit(), on_slow=lambda: None, **fields)


async def test_pieces_come_in_order_of_their_outputs_and_each_ending_once():
    slot = group(OutputKind.DELTA, 2)
    slot.put(1, "b", [2], STOP)
    slot.put(0, "a", [1], None)
    both = await slot.get()
    assert [(piece.index, piece.text, piece.ending) for piece in both.pieces] == [
        (0, "a", None),
        (1, "b", STOP),
    ]
    assert not both.is_last
    slot.put(0, "c", [3], STOP)
    last = await slot.get()
    assert [(piece.index, piece.text, piece.num_output_tokens) for piece in last.pieces] == [(0, "c", 2)]
    assert last.is_last


async def test_final_only_waits_for_all_outputs_and_gives_them_in_order():
    slot = group(OutputKind.FINAL_ONLY, 2)
    slot.put(1, "b", [2], STOP)
    reader = asyncio.ensure_future(slot.get())
    await asyncio.sleep(0)
    assert not reader.done()
    slot.put(0, "a", [1], STOP)
    output = await reader
    assert [(piece.index, piece.text) for piece in output.pieces] == [(0, "a"), (1, "b")]
    assert output.is_last


async def test_cumulative_outputs_of_a_group_keep_one_entry_each():
    slot = group(OutputKind.CUMULATIVE, 2)
    for index, text in ((0, "a"), (1, "x"), (0, "b"), (1, "y")):
        slot.put(index, text, [7], None)
    output = await slot.get()
    assert [(piece.index, piece.text, piece.token_ids) for piece in output.pieces] == [
        (0, "ab", [7, 7]),
        (1, "xy", [7, 7]),
    ]
    slot.put(0, "c", [8], STOP)
    (piece,) = (await slot.get()).pieces
    assert (piece.index, piece.text, piece.token_ids) == (0, "abc", [7, 7, 8])


async def test_logprobs_merge_and_the_last_sum_counts():
    slot = collector()
    slot.put(0, "a", [1], None, Logprobs([1], [-1.0], [1]), -1.0)
    slot.put(0, "b", [2], None, Logprobs([2], [-0.5], [3]), -1.5)
    piece = await piece_of(slot)
    assert piece.logprobs == Logprobs([1, 2], [-1.0, -0.5], [1, 3])
    assert piece.cumulative_logprob == -1.5


async def test_a_cumulative_reader_keeps_what_it_was_given():
    slot = collector(OutputKind.CUMULATIVE)
    slot.put(0, "a", [1], None, Logprobs([1], [-1.0], [1]), -1.0)
    first = await piece_of(slot)
    slot.put(0, "b", [2], None, Logprobs([2], [-0.5], [3]), -1.5)
    second = await piece_of(slot)
    assert (first.token_ids, first.logprobs) == ([1], Logprobs([1], [-1.0], [1]))
    assert second.logprobs == Logprobs([1, 2], [-1.0, -0.5], [1, 3])


async def test_where_the_first_output_is_awaited_nothing_is_emitted_before_it():
    slot = group(OutputKind.DELTA, 2, awaits_first=True)
    slot.put(1, "b", [2], None)
    reader = asyncio.ensure_future(slot.get())
    await asyncio.sleep(0)
    assert not reader.done()
    slot.put(0, "a", [1], None)
    assert [piece.text for piece in (await reader).pieces] == ["a", "b"]


async def test_four_times_the_limit_ends_a_reader_at_once():
    slow = asyncio.Event()
    slot = collector(limit=ReaderLimit(max_tokens=2, grace_s=60.0), on_slow=slow.set)
    slot.put(0, "x", [1] * 8, None)
    assert not slow.is_set()
    slot.put(0, "x", [1], None)
    assert slow.is_set()
    slot.put(0, "x", [1], STOP)
    with pytest.raises(ResourceExhausted, match="4 times 2 tokens"):
        await slot.get()


async def test_what_comes_in_one_batch_does_not_count_as_unread():
    slot = collector(interval=50, limit=ReaderLimit(max_tokens=2, grace_s=60.0))
    slot.put(0, "x", [1], None)
    await slot.get()
    for _ in range(50):
        slot.put(0, "x", [1], None)
    assert len((await piece_of(slot)).token_ids) == 50


async def test_logprobs_count_against_the_limit():
    slow = asyncio.Event()
    slot = collector(limit=ReaderLimit(max_bytes=100, grace_s=60.0), on_slow=slow.set)
    slot.put(0, "x", [1], None, Logprobs([1], [-1.0], [1]), -1.0)
    slot.put(0, "x", [1], None, Logprobs([1], [-1.0], [1]), -2.0)
    assert slow.is_set()
