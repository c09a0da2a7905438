"""The slot between producer and reader: merging, kinds, errors first, slow readers."""

from __future__ import annotations

import asyncio

import pytest

from frontend_svc.output.collector import Collector, Ending, EndReason, OutputKind, ReaderLimit
from service_kit.errors import ResourceExhausted, Unavailable

STOP = Ending(EndReason.STOP)


def collector(
    kind: OutputKind = OutputKind.DELTA,
    *,
    interval: int = 1,
    limit: ReaderLimit | None = None,
    on_slow=lambda: None,
) -> Collector:
    return Collector(kind, stream_interval=interval, limit=limit or ReaderLimit(), on_slow=on_slow)


async def test_unread_deltas_merge():
    slot = collector()
    slot.put("ab", [1], None)
    slot.put("c", [2, 3], None)
    output = await slot.get()
    assert (output.text, output.token_ids, output.num_output_tokens, output.ending) == (
        "abc",
        [1, 2, 3],
        3,
        None,
    )


async def test_the_end_merges_with_what_is_unread():
    slot = collector()
    slot.put("a", [1], None)
    slot.put("b", [2], None)
    slot.put("c", [3], STOP)
    output = await slot.get()
    assert (output.text, output.ending) == ("abc", STOP)


async def test_deltas_are_read_once():
    slot = collector()
    slot.put("a", [1], None)
    await slot.get()
    slot.put("b", [2], STOP)
    output = await slot.get()
    assert (output.text, output.token_ids, output.num_output_tokens) == ("b", [2], 2)


async def test_cumulative_outputs_replace_each_other():
    slot = collector(OutputKind.CUMULATIVE)
    slot.put("a", [1], None)
    first = await slot.get()
    slot.put("b", [2], None)
    slot.put("c", [3], STOP)
    last = await slot.get()
    assert (first.text, first.token_ids) == ("a", [1])
    assert (last.text, last.token_ids) == ("abc", [1, 2, 3])


async def test_final_only_wakes_the_reader_once():
    slot = collector(OutputKind.FINAL_ONLY)
    reader = asyncio.ensure_future(slot.get())
    slot.put("a", [1], None)
    await asyncio.sleep(0)
    assert not reader.done()
    slot.put("b", [2], STOP)
    assert (await reader).text == "ab"


async def test_stream_interval_gives_the_first_token_then_groups_then_the_rest():
    slot, sizes = collector(interval=10), []
    for index in range(25):
        reader = asyncio.ensure_future(slot.get())
        slot.put("x", [index], STOP if index == 24 else None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if reader.done():
            sizes.append(len(reader.result().token_ids))
        reader.cancel()
    assert sizes == [1, 10, 10, 4]


async def test_an_error_overtakes_what_is_unread_and_stays():
    slot = collector()
    slot.put("a", [1], None)
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
    slot.put("日", [1, 2, 3], None)
    slot.put("日本", [4, 5], None)
    await slow.wait()
    with pytest.raises(ResourceExhausted, match="unread"):
        await slot.get()


async def test_a_reader_that_catches_up_in_time_goes_on():
    slot = collector(limit=ReaderLimit(max_tokens=1, grace_s=0.0))
    slot.put("ab", [1, 2], None)
    await slot.get()
    # The timer would fire in these turns of the loop, had reading not stopped it.
    for _ in range(3):
        await asyncio.sleep(0)
    slot.put("c", [3], STOP)
    assert (await slot.get()).text == "c"


async def test_cached_tokens_are_told_with_the_first_output():
    slot = collector()
    slot.note_cached(32)
    slot.put("a", [1], None)
    assert (await slot.get()).num_cached_tokens == 32
