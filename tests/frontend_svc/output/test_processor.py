"""The pass over a step's columns."""

from __future__ import annotations

import pytest

from frontend_svc.output.collector import Collector, Ending, EndReason, OutputKind, ReaderLimit
from frontend_svc.output.processor import OutputProcessor, StepColumns
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from service_kit.errors import Unavailable
from tests.frontend_svc.tokenizers import byte_level_tokenizer, id_of

TOKENIZER = byte_level_tokenizer()
A, B, C = (id_of(TOKENIZER, letter) for letter in "abc")
LENGTH = Ending(EndReason.LENGTH)


class Fixture:
    """A processor with requests, and the handles of those that ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.processor = OutputProcessor(on_end=self.ended.append)

    def add(self, handle: int, *stops: str) -> RequestState:
        state = RequestState(
            Collector(OutputKind.DELTA, stream_interval=1, limit=ReaderLimit(), on_slow=lambda: None),
            Detokenizer(TOKENIZER, [], special_ids=frozenset(), skip_special_tokens=True),
            StopBuffer(stops, include=False) if stops else None,
            include_stop=False,
            min_tokens=0,
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
    assert (one.text, two.text, two.num_cached_tokens) == ("a", "bc", 16)


async def test_an_ended_request_is_forgotten_and_nothing_is_aborted():
    fixture = Fixture()
    state = fixture.add(7)
    assert fixture.processor.process(step({7: [A]}, endings={0: LENGTH})) == []
    assert (await state.collector.get()).ending == LENGTH
    assert (len(fixture.processor), fixture.ended) == (0, [7])


async def test_a_stop_string_asks_for_one_abort_and_nothing_comes_after():
    fixture = Fixture()
    state = fixture.add(7, "b")
    assert fixture.processor.process(step({7: [A, B]})) == [7]
    assert fixture.processor.process(step({7: [C]})) == []
    output = await state.collector.get()
    assert (output.text, output.token_ids) == ("a", [A, B])


async def test_a_stop_string_in_the_engines_last_step_asks_for_no_abort():
    fixture = Fixture()
    fixture.add(7, "b")
    assert fixture.processor.process(step({7: [B]}, endings={0: LENGTH})) == []


def test_rows_of_unknown_handles_are_dropped():
    fixture = Fixture()
    assert fixture.processor.process(step({3: [A]}, endings={0: LENGTH}, cached={0: 8})) == []


async def test_fail_all_ends_every_request():
    fixture = Fixture()
    states = [fixture.add(handle) for handle in range(3)]
    assert fixture.processor.fail_all(Unavailable("engine lost")) == 3
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
