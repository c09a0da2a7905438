"""Stop strings of a message: searched in its content, or in all of its text where asked for."""

from __future__ import annotations

import random

import pytest

from frontend_svc.output.collector import Ending, EndReason
from frontend_svc.output.output_text import OutputText
from frontend_svc.parsers.message import open_message
from frontend_svc.parsers.parser import CallRules, Piece
from frontend_svc.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from tests.frontend_svc.parsers.transcripts import Message, joined
from tests.frontend_svc.tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
CALL = '<tool_call>{"name": "f", "arguments": {"q": "Question:"}}</tool_call>'
ENDED = Ending(EndReason.LENGTH)


def text_of(
    *stops: str,
    parser: str = "hermes",
    include: bool = False,
    min_tokens: int = 0,
    is_everywhere: bool = False,
    is_streamed: bool = True,
) -> OutputText:
    rules = CallRules(frozenset({"f"}), streams_arguments=is_streamed, new_id=lambda: "c")
    return OutputText(
        Detokenizer(TOKENIZER, [], special_ids=frozenset(), skip_special_tokens=True),
        StopBuffer(stops, include=include),
        open_message(TOOL_PARSERS[parser], REASONING_PARSERS["think"], prompt="", rules=rules),
        stops_in_content=not is_everywhere,
        include_stop=include,
        min_tokens=min_tokens,
    )


def run(text: OutputText, ids: list[int], cuts: list[int]) -> tuple[Message, str | None]:
    pieces: list[Piece] = []
    ends = sorted({*cuts, len(ids)})
    for start, end in zip([0, *ends], ends, strict=False):
        _, new, stop = text.advance(ids[start:end], start, ENDED if end == len(ids) else None)
        pieces += new
        if stop is not None:
            return joined(pieces), stop
    return joined(pieces), None


def found(output: str, *stops: str, **options) -> tuple[Message, str | None]:
    """The message and the stop string, which are the same however the tokens come."""
    ids = TOKENIZER.encode(output).ids
    whole = run(text_of(*stops, **options), ids, [])
    draw = random.Random(output)
    for cuts in (list(range(len(ids))), [draw.randrange(len(ids) + 1) for _ in range(3)]):
        assert run(text_of(*stops, **options), ids, cuts) == whole
    return whole


@pytest.mark.parametrize("is_streamed", [True, False])
def test_reasoning_is_not_searched(is_streamed):
    output = "<think>Question: hm</think>Answer: 4 Question: next"
    message, stop = found(output, "Question:", is_streamed=is_streamed)
    assert (message, stop) == (Message("Answer: 4 ", "Question: hm"), "Question:")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_calls_are_not_searched(is_streamed):
    message, stop = found(f"I look. {CALL} So: Question: x", "Question:", is_streamed=is_streamed)
    assert (message.content, stop) == ("I look. So: ", "Question:")
    assert [arguments for _, _, _, arguments in message.calls] == ['{"q": "Question:"}']


def test_the_text_of_a_call_that_is_none_is_content_and_is_searched():
    message, stop = found('<tool_call>{"name": "g", "arguments": "Question:"}</tool_call>', "Question:")
    assert (message, stop) == (Message('<tool_call>{"name": "g", "arguments": "'), "Question:")


def test_a_stop_string_does_not_extend_over_a_call():
    message, stop = found(f"ab{CALL}cd", "bc", "abcd")
    assert (message.content, len(message.calls), stop) == ("abcd", 1, None)


def test_the_beginning_of_a_stop_string_is_kept_where_the_output_ends():
    message, stop = found("<think>a</think>b Quest", "Question:")
    assert (message, stop) == (Message("b Quest", "a"), None)


def test_a_stop_string_may_be_part_of_the_content():
    message, stop = found("<think>a END</think>b END c", "END", include=True)
    assert (message, stop) == (Message("b END", "a END"), "END")


def test_all_text_is_searched_where_asked_for():
    output = "<think>Question: hm</think>Answer"
    assert found(output, "Question:", is_everywhere=True) == (Message(), "Question:")
    message, stop = found(f"So: {CALL}", "Question:", is_everywhere=True)
    assert (message.incomplete, stop) == ([0], "Question:")


def test_the_first_tokens_cannot_complete_a_stop_string():
    output = "<think>a</think>b x x"
    num_tokens = len(TOKENIZER.encode("<think>a</think>b x").ids)
    assert found(output, "x", min_tokens=num_tokens) == (Message("b x ", "a"), "x")
    assert found(output, "x") == (Message("b ", "a"), "x")
