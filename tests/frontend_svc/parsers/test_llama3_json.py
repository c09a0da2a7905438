"""Llama 3: bare JSON calls, with and without the tag."""

from __future__ import annotations

import pytest

from frontend_svc.parsers.llama3_json import LLAMA3_JSON
from tests.frontend_svc.parsers.transcripts import calls, parse

ONE = '{"name": "get_weather", "parameters": {"city": "S\\u00e3o \\"Paulo\\"; {}"}}'
WEATHER = ("get_weather", '{"city": "S\\u00e3o \\"Paulo\\"; {}"}')
TIME = ("get_time", "{}")


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        ONE,
        f"<|python_tag|>{ONE}",
        f"\n<|python_tag|> {ONE}\n",
        ONE.replace("parameters", "arguments"),
        '{"type": "function", ' + ONE[1:],
    ],
)
def test_one_call_is_emitted_and_nothing_remains(text, is_streamed):
    message = parse(LLAMA3_JSON, text, streams_arguments=is_streamed)
    assert (message.content, message.calls) == ("", calls(WEATHER))


@pytest.mark.parametrize("separator", ["; ", ";", "\n;\n", "\n", "<|python_tag|>", "; <|python_tag|>"])
def test_several_calls_are_emitted_in_order(separator):
    message = parse(LLAMA3_JSON, f'{ONE}{separator}{{"name": "get_time", "parameters": {{}}}}')
    assert (message.content, message.calls) == ("", calls(WEATHER, TIME))


def test_text_behind_a_call_is_content_and_so_is_every_call_behind_it():
    message = parse(LLAMA3_JSON, f"{ONE}; done; {ONE}!")
    assert (message.content, message.calls) == (f"; done; {ONE}!", calls(WEATHER))
    assert parse(LLAMA3_JSON, f"{ONE}\n\nDone.").content == "\n\nDone."


@pytest.mark.parametrize("between", ["", " ", ", ", ";;", ";\n;"])
def test_only_a_semicolon_or_a_line_break_separates_calls(between):
    message = parse(LLAMA3_JSON, ONE + between + ONE)
    assert (message.content, message.calls) == (between + ONE, calls(WEATHER))


def test_behind_the_tag_a_call_may_stand_anywhere():
    message = parse(LLAMA3_JSON, f"Looking {{it}} up: <|python_tag|>{ONE}; {ONE} So. <|python_tag|> {ONE}")
    assert (message.content, message.calls) == ("Looking {it} up: So.", calls(WEATHER, WEATHER, WEATHER))


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "born": 1815}',
        '{"name": "get_time", "zone": {}, "parameters": {}}',
        '{"result": {"temperature": [1, 2]}} ',
        '<|python_tag|>brave_search.call(query="x")',
        "<|python_tag|>",
        "<|python_t",
        '{"name": "get_ti',
        "{",
        '{"a \\" b": 1}',
        '{"' + "k" * 1000 + '": 1}',
    ],
)
def test_what_is_no_call_is_content_word_for_word(text, is_streamed):
    message = parse(LLAMA3_JSON, f"{text};", streams_arguments=is_streamed)
    assert (message.content, message.calls) == (f"{text};", [])


def test_an_incomplete_call_is_content_when_arguments_are_not_streamed():
    for end in range(1, len(ONE)):
        message = parse(LLAMA3_JSON, ONE[:end], streams_arguments=False)
        assert (message.content, message.calls) == (ONE[:end], [])


def test_without_parallel_calls_only_the_first_is_emitted():
    message = parse(LLAMA3_JSON, f"{ONE}; {ONE}; {ONE}", is_parallel=False)
    assert (message.content, message.calls) == ("", calls(WEATHER))


def test_a_forced_call_goes_on_behind_its_prefix():
    rest = ONE.split('"parameters": ')[1]
    named = parse(LLAMA3_JSON, rest, forced_prefix=LLAMA3_JSON.forced_prefix("get_weather"))
    unnamed = parse(LLAMA3_JSON, ONE[len('{"name": "') :], forced_prefix=LLAMA3_JSON.forced_prefix(None))
    assert named.calls == unnamed.calls == calls(WEATHER)
