"""Hermes and Qwen: calls between tags."""

from __future__ import annotations

import json

import pytest

from frontend_svc.parsers.hermes import HERMES
from frontend_svc.parsers.parser import ContentPiece, ToolCallPiece
from tests.frontend_svc.parsers.transcripts import calls, joined, parse, rules

ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
WEATHER = ("get_weather", '{"city": "Paris", "days": 3}')
TIME = ("get_time", "{}")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_calls_are_emitted_in_order_and_nothing_remains(is_streamed):
    message = parse(HERMES, TWO, streams_arguments=is_streamed)
    assert message.calls == calls(WEATHER, TIME)
    assert message.content == ""


def test_text_before_and_after_is_content_without_the_space_beside_calls():
    message = parse(HERMES, f"Let me look.\n\n{TWO}\n\nThat was it.\n")
    assert message.content == "Let me look.\n\nThat was it.\n"
    assert message.calls == calls(WEATHER, TIME)


def test_arguments_are_emitted_as_they_come():
    parser = HERMES.open(rules())
    assert parser.feed('<tool_call>\n{"name": "get_weather", "argu') == []
    assert parser.feed('ments": {"ci') == [ToolCallPiece(0, "c0", "get_weather", '{"ci')]
    assert parser.feed('ty": "Par') == [ToolCallPiece(0, "", "", 'ty": "Par')]
    assert parser.num_calls == 0
    assert parser.feed('is"}}\n</tool_call>') == [ToolCallPiece(0, "", "", 'is"}')]
    assert parser.num_calls == 1
    assert parser.finish() == []


def test_whole_calls_are_emitted_at_once_when_arguments_are_not_streamed():
    parser = HERMES.open(rules(streams_arguments=False))
    assert parser.feed(ONE[:-14]) == []
    assert parser.feed(ONE[-14:]) == [ToolCallPiece(0, "c0", *WEATHER)]


def test_arguments_before_the_name_wait_for_it():
    text = '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>'
    assert parse(HERMES, text).calls == calls(WEATHER)


def test_a_call_without_arguments_has_none():
    assert parse(HERMES, '<tool_call>{"name": "get_time"}</tool_call>').calls == calls(TIME)


def test_other_members_are_passed_over():
    text = '<tool_call>{"id": [1, {"x": null}], "name": "get_time", "arguments": {}, "n": -1.5e3}</tool_call>'
    message = parse(HERMES, text)
    assert (message.content, message.calls) == ("", calls(TIME))


def test_braces_quotes_and_tags_inside_of_strings_are_arguments():
    arguments = json.dumps({"city": 'a } { " \\ </tool_call> <tool_call> é', "deep": {"er": [{"": "}"}]}})
    message = parse(HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>')
    assert message.calls == calls(("get_weather", arguments))
    assert message.content == ""


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unheard_of", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": "none"}\n</tool_call>',
        "<tool_call>\nget_time()\n</tool_call>",
        "<tool_call>",
        '<tool_call>\n{"name": "get_ti',
        "The tag <tool_call> opens, </tool_call> closes, <tool_ is none.\n",
        "a < b and <tool> or {} \n ",
    ],
)
def test_what_is_no_call_is_content_word_for_word(text, is_streamed):
    message = parse(HERMES, f"So: {text}", streams_arguments=is_streamed)
    assert message.content == f"So: {text}"
    assert message.calls == []


@pytest.mark.parametrize(
    "text", [ONE[:-24], '<tool_call>{"name": "get_time", "arguments": {"a": nope}}</tool_call>']
)
def test_a_call_with_broken_arguments_is_content_when_arguments_are_not_streamed(text):
    message = parse(HERMES, text, streams_arguments=False)
    assert (message.content, message.calls) == (text, [])


def test_the_rest_of_a_call_that_breaks_after_it_was_emitted_is_content():
    text = '<tool_call>{"name": "get_time", "arguments": {"a": oops}}</tool_call>'
    parser = HERMES.open(rules())
    message = joined(parser.feed(text) + parser.finish())
    assert message.calls == calls(("get_time", '{"a": '))
    assert message.incomplete == [0]
    assert message.content == "oops}}</tool_call>"
    assert parser.num_calls == 0


def test_a_call_is_found_right_behind_a_broken_one():
    message = parse(HERMES, f"<tool_call>{{{ONE}")
    assert (message.content, message.calls) == ("<tool_call>{", calls(WEATHER))


def test_the_closing_tag_never_leaks_behind_a_whole_call():
    assert parse(HERMES, ONE.replace("}}", "}}}")).content == "}"
    assert parse(HERMES, ONE.removesuffix("</tool_call>") + ONE).calls == calls(WEATHER, WEATHER)
    assert parse(HERMES, ONE.removesuffix("\n</tool_call>")).content == ""


def test_several_calls_between_one_pair_of_tags_are_taken():
    text = '<tool_call>\n{"name": "get_time"}\n{"name": "get_time"}\n</tool_call>'
    message = parse(HERMES, text)
    assert (message.content, message.calls) == ("", calls(TIME, TIME))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_without_parallel_calls_only_the_first_is_emitted(is_streamed):
    message = parse(HERMES, f"a\n{TWO}\n{ONE}\nb", is_parallel=False, streams_arguments=is_streamed)
    assert (message.content, message.calls) == ("a\nb", calls(WEATHER))


def test_a_call_that_broke_is_not_the_one_that_is_kept():
    broken = '<tool_call>{"name": "get_time", "arguments": {oops}}</tool_call>'
    message = parse(HERMES, broken + ONE + ONE, is_parallel=False)
    assert message.content == "oops}}</tool_call>"
    assert (message.calls, message.incomplete) == (calls(("get_time", "{"), WEATHER), [0])


def test_a_beginning_of_a_tag_is_held_back_and_released():
    parser = HERMES.open(rules())
    assert parser.feed("x <tool_") == [ContentPiece("x")]
    assert parser.feed("s>") == [ContentPiece(" <tool_s>")]
    assert parser.feed("<tool_call") == []
    assert parser.finish() == [ContentPiece("<tool_call")]


def test_a_forced_call_goes_on_behind_its_prefix():
    named, any_tool = HERMES.forced_prefix("get_weather"), HERMES.forced_prefix(None)
    rest = '{"city": "Paris", "days": 3}}\n</tool_call>'
    assert parse(HERMES, rest, forced_prefix=named).calls == calls(WEATHER)
    assert parse(HERMES, f'get_weather", "arguments": {rest}', forced_prefix=any_tool).calls == calls(WEATHER)


def test_a_forced_call_that_is_none_gives_back_only_what_the_model_wrote():
    message = parse(HERMES, "I cannot.", forced_prefix=HERMES.forced_prefix("get_time"))
    assert (message.content, message.calls) == ("I cannot.", [])


def test_arguments_deeper_than_any_client_reads_are_no_call():
    deep = '{"a": ' + "[" * 200 + "]" * 200 + "}"
    text = f'<tool_call>{{"name": "get_time", "arguments": {deep}}}</tool_call>'
    message = parse(HERMES, text, streams_arguments=False)
    assert (message.content, message.calls) == (text, [])
