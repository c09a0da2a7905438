"""The pass over a step's columns."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import pytest
from google.protobuf.message import Message

from frontend_svc.output.collector import Collector, Ending, EndReason, OutputKind, ReaderLimit
from frontend_svc.output.logprobs import LogprobColumns, LogprobReader, Logprobs
from frontend_svc.output.loss import Loss, LossKind
from frontend_svc.output.processor import OutputProcessor, StepColumns
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from tests.frontend_svc.tokenizers import byte_level_tokenizer, id_of
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import ResourceExhausted, Unavailable

TOKENIZER = byte_level_tokenizer()
A, B, C = (id_of(TOKENIZER, letter) for letter in "abc")
LENGTH = Ending(EndReason.LENGTH)


class NoteReader:
    """Reads how many logits were not finite, and reports all of them as an error."""

    extra = "nan_count"
    is_awaited = False

    def __init__(self) -> None:
        self.counts: list[int] = []

    def read(self, extra: step_pb2.StepExtra) -> None:
        self.counts.append(extra.nan_count)

    def fill(self, message: Message, output_token_ids: Sequence[int]) -> None:
        if isinstance(message, generate_pb2.Finished):
            message.error_message = str(self.counts)


class Fixture:
    """A processor with requests, and the handles of those that ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.processor = OutputProcessor(on_end=self.ended.append)

    def add_two(self, kind: OutputKind) -> Collector:
        """Outputs 0 and 1 of one prompt, by these handles."""
        collector = Collector(kind, 2, stream_interval=1, limit=ReaderLimit(), on_slow=lambda: None)
        for index in range(2):
            self.add(index, collector=collector)
        return collector

    def add(
        self,
        handle: int,
        *stops: str,
        collector: Collector | None = None,
    ) -> RequestState:
        state = RequestState(
            collector
            or Collector(OutputKind.DELTA, stream_interval=1, limit=ReaderLimit(), on_slow=lambda: None),
            Detokenizer(TOKENIZER, [], special_ids=frozenset(), skip_special_tokens=True),
            StopBuffer(stops, include=False) if stops else None,
            include_stop=False,
            min_tokens=0,
            logprobs=LogprobReader(None, has_top=True),
            readers=[NoteReader()],
            index=0 if collector is None else handle,
        )
        self.processor.register(handle, state)
        return state


def step(
    rows: dict[int, list[int]], endings: dict[int, Ending] | None = None, cached: dict[int, int] | None = None
):
    ids = [token_id for row in rows.values() for token_id in row]
    return StepColumns(list(rows), [len(row) for row in rows.values()], ids, endings or {}, cached or {})


async def test_each_row_goes_to_its_request():
    fixture = Fixture()
    first, second = fixture.add(7), fixture.add(9)
    assert fixture.processor.process(step({9: [B, C], 7: [A]}, cached={0: 16})) == []
    one, two = await first.collector.get(), await second.collector.get()
    assert (one.pieces[0].text, two.pieces[0].text, two.num_cached_tokens) == ("a", "bc", 16)


async def test_an_ended_request_is_forgotten_and_nothing_is_aborted():
    fixture = Fixture()
    state = fixture.add(7)
    assert fixture.processor.process(step({7: [A]}, endings={0: LENGTH})) == []
    assert (await state.collector.get()).pieces[0].ending == LENGTH
    assert (len(fixture.processor), fixture.ended) == (0, [7])


async def test_a_stop_string_asks_for_one_abort_and_nothing_comes_after():
    fixture = Fixture()
    state = fixture.add(7, "b")
    assert fixture.processor.process(step({7: [A, B]})) == [7]
    assert fixture.processor.process(step({7: [C]})) == []
    (output,) = (await state.collector.get()).pieces
    assert (output.text, output.token_ids) == ("a", [A, B])


async def test_a_stop_string_in_the_engines_last_step_asks_for_no_abort():
    fixture = Fixture()
    fixture.add(7, "b")
    assert fixture.processor.process(step({7: [B]}, endings={0: LENGTH})) == []


def test_rows_of_unknown_handles_are_dropped():
    fixture = Fixture()
    assert fixture.processor.process(step({3: [A]}, endings={0: LENGTH}, cached={0: 8})) == []


async def test_a_lost_engine_ends_every_request():
    fixture = Fixture()
    states = [fixture.add(handle) for handle in range(3)]
    loss = Loss("engine:1", LossKind.DEATH, "reset")
    assert fixture.processor.lose_all(loss) == [0, 1, 2]
    for state in states:
        with pytest.raises(Unavailable):
            await state.collector.get()
    assert (len(fixture.processor), len(fixture.ended)) == (0, 3)


async def test_no_state_is_left_after_many_requests():
    fixture = Fixture()
    for handle in range(10_000):
        fixture.add(handle)
        fixture.processor.process(step({handle: [A]}, endings={0: LENGTH}))
    assert (len(fixture.processor), len(fixture.ended)) == (0, 10_000)


async def test_86_of_two_outputs_each_ends_once_and_repeats_are_nothing():
    fixture = Fixture()
    both = fixture.add_two(OutputKind.DELTA)
    fixture.processor.process(step({0: [A], 1: [B]}, endings={1: LENGTH}))
    output = await both.get()
    assert [(piece.index, piece.text, piece.ending) for piece in output.pieces] == [
        (0, "a", None),
        (1, "b", LENGTH),
    ]
    assert not output.is_last
    # The engine's later words of the one that has ended yield nothing, and the other goes on.
    for _ in range(2):
        assert fixture.processor.process(step({1: [C]}, endings={0: LENGTH})) == []
    repeated = asyncio.ensure_future(both.get())
    await asyncio.sleep(0)
    assert not repeated.done()
    fixture.processor.process(step({0: [C]}, endings={0: LENGTH}))
    last = await repeated
    assert [(piece.index, piece.text, piece.ending) for piece in last.pieces] == [(0, "c", LENGTH)]
    assert last.is_last
    assert fixture.ended == [1, 0]


async def test_86_final_only_is_nothing_until_both_have_ended_and_then_both_in_order():
    fixture = Fixture()
    both = fixture.add_two(OutputKind.FINAL_ONLY)
    reader = asyncio.ensure_future(both.get())
    for rows, endings in (({0: [A], 1: [B]}, {}), ({1: [C]}, {0: LENGTH}), ({0: [B]}, {})):
        fixture.processor.process(step(rows, endings))
        await asyncio.sleep(0)
        assert not reader.done()
    fixture.processor.process(step({0: [C]}, endings={0: LENGTH}))
    output = await reader
    assert [(piece.index, piece.text) for piece in output.pieces] == [(0, "abc"), (1, "bc")]
    assert output.is_last


def counted(num: int) -> step_pb2.StepExtra:
    return step_pb2.StepExtra(nan_count=num)


def floats(*values: float) -> array[float]:
    return array("f", values)


def ints(*values: int) -> array[int]:
    return array("I", values)


async def test_each_row_gets_its_own_positions_of_the_logprob_columns():
    fixture, nan = Fixture(), float("nan")
    one, two = fixture.add(1), fixture.add(2)
    columns = LogprobColumns(
        floats(-1, -2, -3), ints(1, 2, 3), 2, ints(1, 2, 3, 4, 5, 0), floats(-1, -1.5, -2, -2.5, -3, nan)
    )
    fixture.processor.process(StepColumns([1, 2], [2, 1], [A, B, C], {}, {}, columns))
    (first,), (second,) = (await one.collector.get()).pieces, (await two.collector.get()).pieces
    tops = [ints(1, 2), ints(3, 4)], [floats(-1, -1.5), floats(-2, -2.5)]
    assert first.logprobs == Logprobs([A, B], [-1.0, -2.0], [1, 2], *tops)
    assert second.logprobs == Logprobs([C], [-3.0], [3], [ints(5)], [floats(-3)])
    assert (first.cumulative_logprob, second.cumulative_logprob) == (-3.0, -3.0)


async def test_an_output_with_a_token_without_logprob_has_no_sum():
    fixture, nan = Fixture(), float("nan")
    one = fixture.add(1)
    columns = LogprobColumns(floats(nan, -2), ints(0, 2))
    fixture.processor.process(StepColumns([1], [2], [A, B], {}, {}, columns))
    (piece,) = (await one.collector.get()).pieces
    assert piece.logprobs is not None and piece.logprobs.ranks == [0, 2]
    assert piece.cumulative_logprob is None


async def test_what_rows_have_beside_tokens_goes_to_its_reader_and_into_the_answer():
    fixture = Fixture()
    state, other = fixture.add(1), fixture.add(2)
    unread = step_pb2.StepExtra(pooling_output=tensor_pb2.Tensor())
    fixture.processor.process(StepColumns([1, 2], [0, 0], [], {}, {}, extras={0: [counted(3)], 1: [unread]}))
    assert (state.has_begun, other.has_begun) == (True, False)
    fixture.processor.process(StepColumns([5, 1], [0, 1], [A], {}, {}, extras={0: [unread], 1: [counted(4)]}))
    finished = generate_pb2.Finished()
    state.fill(finished)
    assert finished.error_message == "[3, 4]"


async def test_merged_steps_give_the_outputs_of_single_steps():
    received = []
    for merged in (False, True):
        fixture = Fixture()
        state = fixture.add(7, "b")
        if merged:
            columns = StepColumns([7], [4], [A, B, C, A], {}, {}, parts={0: [1, 2, 1]})
            assert fixture.processor.process(columns) == [7]
        else:
            aborted = [fixture.processor.process(step({7: ids})) for ids in ([A], [B, C], [A])]
            assert aborted == [[], [7], []]
        output = await state.collector.get()
        received.append((output.pieces[0].text, output.pieces[0].token_ids, output.pieces[0].logprobs))
    assert received[0] == received[1]
    # No token after the stop string's, as if each came in a step of its own.
    assert received[0][:2] == ("a", [A, B])


async def test_the_end_of_merged_steps_belongs_to_the_last_of_them():
    fixture = Fixture()
    state = fixture.add(7)
    columns = StepColumns([7], [2], [A, B], {0: LENGTH}, {}, parts={0: [1, 1]})
    assert fixture.processor.process(columns) == []
    (piece,) = (await state.collector.get()).pieces
    assert (piece.text, piece.token_ids, piece.ending) == ("ab", [A, B], LENGTH)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7])
async def test_a_step_in_slices_gives_the_outputs_of_the_whole_step(max_rows):
    received = []
    for is_sliced in (False, True):
        fixture = Fixture()
        states = [fixture.add(handle, "b") for handle in range(5)]
        whole = StepColumns(
            array("I", [4, 3, 9, 2, 1, 0]),
            bytes([1, 2, 1, 0, 3, 0]),
            [A, A, B, C, A, A, C],
            {0: LENGTH, 5: LENGTH},
            {3: 16, 4: 8},
            LogprobColumns(
                floats(-1, -2, -3, -4, -5, -6, -7), ints(*range(1, 8)), 1, ints(*range(7)), floats(*range(7))
            ),
            {3: [counted(7)]},
            parts={4: [1, 2]},
        )
        slices = list(whole.slices(max_rows)) if is_sliced else [whole]
        assert all(len(one.handles) <= max_rows for one in slices) or not is_sliced
        aborted = [handle for one in slices for handle in fixture.processor.process(one)]
        fixture.processor.process(step({handle: [C] for handle in range(5)}))
        outputs = [await state.collector.get() for state in states]
        answers = [generate_pb2.Finished() for _ in states]
        for state, answer in zip(states, answers, strict=True):
            state.fill(answer)
        received.append((aborted, sorted(fixture.ended), outputs, answers))
    assert received[0] == received[1]
    assert received[0][0] == [3]


def test_slices_with_requests_that_begin_come_first():
    whole = step({handle: [A] * (handle % 3) for handle in range(8)})
    whole.cached = {5: 16}
    rows = [
        (handle, count)
        for one in whole.slices(2)
        for handle, count in zip(one.handles, one.num_tokens, strict=True)
    ]
    assert rows == [(5, 2), (6, 0), (7, 1), (0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]
    assert [len(one.token_ids) for one in whole.slices(2)] == [2, 1, 1, 2, 1]


def test_a_request_that_begins_waits_for_no_other_row_of_its_step():
    whole = step({1: [A], 2: [B], 3: [C]})
    whole.cached = {2: 16}
    assert [list(one.handles) for one in whole.slices(8)] == [[3], [1, 2]]


def test_a_step_of_few_rows_is_one_slice():
    whole = step({1: [A], 2: [B]})
    assert list(whole.slices(2)) == [whole]


@pytest.mark.parametrize("parts", [{}, {0: [10, 1, 1]}], ids=["one step", "merged"])
async def test_a_reader_that_is_ended_by_its_last_tokens_ends_once(parts):
    ended: list[int] = []
    processor = OutputProcessor(on_end=ended.append)
    collector = Collector(
        OutputKind.DELTA,
        stream_interval=1,
        limit=ReaderLimit(max_tokens=2),
        on_slow=lambda: processor.forget(7),
    )
    processor.register(7, RequestState(collector, None, None, include_stop=False, min_tokens=0))
    assert processor.process(step({7: [A]})) == []
    ids = [A] * 12
    assert processor.process(StepColumns([7], [12], ids, {0: LENGTH}, {}, parts=parts)) == []
    assert (len(processor), ended) == (0, [7])
    with pytest.raises(ResourceExhausted):
        await collector.get()
