"""Mistral: an array of calls behind a marker, and a marker for each call."""

from __future__ import annotations

import re

import pytest

from frontend_svc.parsers.mistral import MISTRAL, MISTRAL_ARGS
from frontend_svc.parsers.parser import ToolCallPiece
from tests.frontend_svc.parsers.transcripts import TOOLS, calls, parse, rules

WEATHER = ("get_weather", '{"city": "Brüssel [TOOL_CALLS] ]}"}')
TIME = ("get_time", "{}")
ARRAY = f'[{{"name": "get_weather", "arguments": {WEATHER[1]}}}, {{"name": "get_time", "arguments": {{}}}}]'


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        f"[TOOL_CALLS] {ARRAY}",
        f"[TOOL_CALLS]{ARRAY}\n",
        f"[TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}[TOOL_CALLS]get_time[ARGS]{{}}",
        f"[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{WEATHER[1]}\n[TOOL_CALLS] get_time[ARGS] {{}}",
        f"[TOOL_CALLS]get_weather{WEATHER[1]}[TOOL_CALLS]get_time {{}}",
    ],
)
def test_every_way_of_writing_calls_is_parsed_alike(text, is_streamed):
    message = parse(MISTRAL, text, streams_arguments=is_streamed)
    assert (message.content, message.calls) == ("", calls(WEATHER, TIME))
    assert parse(MISTRAL_ARGS, text, streams_arguments=is_streamed) == message


def test_text_before_and_after_is_content():
    message = parse(MISTRAL, f"One [moment]. [TOOL_CALLS] {ARRAY} Done.")
    assert (message.content, message.calls) == ("One [moment]. Done.", calls(WEATHER, TIME))


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [{",
        "[TOOL_CALLS]get_time",
        "[TOOL_CALLS]get_time null",
        "[TOOL_CALLS]get_time[ARGH]{}",
        "[TOOL_CALLS]get_time[ARGS][]",
        "[TOOL_CALLS]get_lost[ARGS]{}",
        '[TOOL_CALLS] [{"name": "get_lost", "arguments": {}}]',
        "[TOOL_C",
        "[TOOL_CALL] [ARGS]",
    ],
)
def test_what_is_no_call_is_content_word_for_word(text, is_streamed):
    message = parse(MISTRAL, f"a {text}", streams_arguments=is_streamed)
    assert (message.content, message.calls) == (f"a {text}", [])


def test_an_array_that_ends_in_the_middle_keeps_its_whole_calls():
    message = parse(MISTRAL, f"[TOOL_CALLS] {ARRAY[:-12]}", streams_arguments=False)
    assert message.calls == calls(WEATHER)
    assert message.content == ', {"name": "get_time", "argu'


def test_without_parallel_calls_only_the_first_is_emitted():
    message = parse(MISTRAL, f"[TOOL_CALLS] {ARRAY}", is_parallel=False)
    assert (message.content, message.calls) == ("", calls(WEATHER))


def test_ids_are_nine_letters_and_digits_and_differ():
    parser = MISTRAL.open(rules(new_id=None))
    pieces = parser.feed(f"[TOOL_CALLS] {ARRAY}") + parser.finish()
    ids = [piece.id for piece in pieces if isinstance(piece, ToolCallPiece)]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_a_forced_call_goes_on_behind_its_prefix(name):
    array = parse(MISTRAL, '{"a": 1}}]', forced_prefix=MISTRAL.forced_prefix(name))
    any_array = parse(MISTRAL, name + '", "arguments": {"a": 1}}]', forced_prefix=MISTRAL.forced_prefix(None))
    marked = parse(MISTRAL_ARGS, '{"a": 1}', forced_prefix=MISTRAL_ARGS.forced_prefix(name))
    any_marked = parse(
        MISTRAL_ARGS, f'{name}[ARGS]{{"a": 1}}', forced_prefix=MISTRAL_ARGS.forced_prefix(None)
    )
    assert array == any_array == marked == any_marked
    assert array.calls == calls((name, '{"a": 1}'))
