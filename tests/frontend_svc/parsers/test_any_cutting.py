"""However a transcript is cut, inside of markers or of characters: the same message, and none of it lost."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.parsers.grammar_parser import CallGrammarParser, ToolGrammar
from frontend_svc.parsers.message import open_message
from frontend_svc.parsers.parser import ContentPiece, ToolParserFormat
from frontend_svc.parsers.reader import Reader
from frontend_svc.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from frontend_svc.parsers.writer import CallWriter
from tests.frontend_svc.parsers.transcripts import Message, cut, joined, rules, run

ALL_TOOLS = sorted(TOOL_PARSERS)
WORDS = [
    "a",
    " ",
    "\n\n",
    "é",
    "🙂",
    "<",
    "[",
    "{",
    "}",
    "]",
    ";",
    '"',
    "\\",
    "`",
    "</",
    "<|",
    "[TOOL_",
    "｜",
]
JSON_CALLS = [
    '{"name": "get_weather", "arguments": {"city": "Zürich 🙂 } \\" ]", "n": [1, {"a": -2.5e3}, null]}}',
    '{"name": "get_time", "parameters": {}}',
    '{"arguments": {"x": "<tool_call> [TOOL_CALLS]"}, "name": "math.add"}',
    '{"name": "get_lost", "arguments": {}}',
    '{"name": "get_time", "arguments": {"a": tru}}',
    '{"name": "get_time", "arguments": {"a": 1}',
]
ARGUMENTS = ['{"city": "東京", "n": [true, {}]}', "{}", '{"a": 01}', '{"a"']
FRAGMENTS = {
    "hermes": [f"<tool_call>\n{call}\n</tool_call>" for call in JSON_CALLS]
    + ["<tool_call>", "</tool_call>", "<tool"],
    "llama3_json": [*JSON_CALLS, "; ", "<|python_tag|>", "<|python"],
    "mistral": [f"[TOOL_CALLS] [{call}, {JSON_CALLS[1]}]" for call in JSON_CALLS]
    + [f"[TOOL_CALLS]get_time[ARGS]{arguments}" for arguments in ARGUMENTS]
    + ["[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]get_time[CALL_ID]abc[ARGS]{}"],
    "pythonic": [
        "[get_time()]",
        "[get_weather(city='ü] )', n=[1, {'a': None}]), get_time()]",
        "[math.add(a='''b'c''')]",
        "[get_time(x)]",
        "[get_time(",
        "<|python_start|>",
        "<|python_end|>",
        "'",
    ],
    "deepseek": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>"
        for arguments in ARGUMENTS
    ]
    + [
        f"<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for arguments in ARGUMENTS
    ]
    + ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁"],
    "gpt_oss": [
        f"<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{arguments}<|call|>"
        for arguments in ARGUMENTS
    ]
    + [
        "<|channel|>analysis<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|end|>",
        "<|return|>",
    ]
    + ["<|message|>", "<|start|>", "<|constrain|>", "<|channel|>commentary to=functions.get_lost<|message|>"],
}
FRAGMENTS["mistral_args"] = FRAGMENTS["mistral"]
FRAGMENTS["deepseek_v31"] = FRAGMENTS["deepseek"]
THOUGHTS = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "\n",
    "<th",
    "Hm.",
    "<|channel|>analysis<|message|>",
    "<|end|>",
]
PROMPTS = ["", "<think>", "[THINK]\n", "<think>\n\n</think>\n\n"]


def fragments_of(*lists: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([each for fragments in lists for each in fragments]), max_size=8).map(
        "".join
    )


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("name", ALL_TOOLS)
@pytest.mark.parametrize("is_streamed", [True, False])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data(), cuts=CUTS, is_parallel=st.booleans())
def test_cutting_never_changes_the_message(name, is_streamed, data, cuts, is_parallel):
    text = data.draw(fragments_of(FRAGMENTS[name], WORDS))
    changes = {"streams_arguments": is_streamed, "is_parallel": is_parallel}
    whole = run(TOOL_PARSERS[name].open(rules(**changes)), [text])
    assert run(TOOL_PARSERS[name].open(rules(**changes)), cut(text, cuts)) == whole
    assert run(TOOL_PARSERS[name].open(rules(**changes)), text) == whole


@pytest.mark.parametrize("name", [*sorted(REASONING_PARSERS), None])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data(), cuts=CUTS, prompt=st.sampled_from(PROMPTS))
def test_cutting_never_changes_reasoning_and_calls_together(name, data, cuts, prompt):
    text = data.draw(fragments_of(THOUGHTS, FRAGMENTS["hermes"], WORDS))
    reasoning = None if name is None else REASONING_PARSERS[name]

    def message(chunks: list[str]) -> Message:
        return run(open_message(TOOL_PARSERS["hermes"], reasoning, prompt=prompt, rules=rules()), chunks)

    assert message(cut(text, cuts)) == message(list(text)) == message([text])


@pytest.mark.parametrize("name", sorted(set(ALL_TOOLS) - {"gpt_oss"}))
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_text_without_a_call_is_content_to_the_last_character(name, data):
    text = data.draw(fragments_of(FRAGMENTS[name], WORDS))
    message = run(TOOL_PARSERS[name].open(rules(tool_names=frozenset({"no_such"}))), text)
    assert message == Message(text)


@pytest.mark.parametrize("name", ALL_TOOLS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_emitted_content_only_grows(name, data):
    text = data.draw(fragments_of(FRAGMENTS[name], WORDS))
    parser, emitted, pieces = TOOL_PARSERS[name].open(rules()), Message(), []
    for char in text:
        if not (added := parser.feed(char)):
            continue
        pieces += added
        grown = joined(pieces)
        assert grown.content.startswith(emitted.content) and len(grown.calls) >= len(emitted.calls)
        emitted = grown


@pytest.mark.parametrize("name", ALL_TOOLS)
def test_plain_text_is_emitted_at_once(name):
    parser = TOOL_PARSERS[name].open(rules())
    for word in ("Paris", " is", " a", " city"):
        assert parser.feed(word) == [ContentPiece(word)]


LONG = {
    "hermes": '<tool_call>{"name": "get_time", "arguments": {"a": "',
    "llama3_json": '{"name": "get_time", "parameters": {"a": "',
    "mistral": '[TOOL_CALLS] [{"name": "get_time", "arguments": {"a": "',
    "mistral_args": '[TOOL_CALLS]get_time[ARGS]{"a": "',
    "pythonic": "[get_time(a='",
    "deepseek": '<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"a": "',
    "deepseek_v31": '<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"a": "',
    "gpt_oss": '<|channel|>commentary to=functions.get_time<|message|>{"a": "',
}
FILLINGS = ["x", "\n", "<", "[", "{", "\\u00e9", "<tool_", '{"a":', "<|channel|>"]


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("start", ["", "call"])
@pytest.mark.parametrize("name", ALL_TOOLS)
def test_unread_text_never_piles_up(name, start, filling):
    text = (LONG[name] if start else "") + filling * 300
    for is_streamed in (True, False):
        parser, reader = counted(TOOL_PARSERS[name], is_streamed=is_streamed)
        for char in text:
            parser.feed(char)
            assert len(reader.text) <= 64
        parser.finish()


def counted(format_: ToolParserFormat, *, is_streamed: bool) -> tuple[CallGrammarParser, Reader]:
    """A parser of a format, and the reader that it reads with."""
    assert isinstance(format_, ToolGrammar)
    reader = Reader()
    calls = CallWriter(reader, rules(streams_arguments=is_streamed), format_.new_id, trims_space=True)
    return CallGrammarParser(reader, format_.grammar(reader, calls), calls), reader


def num_function_calls(name: str, text: str) -> int:
    """How many functions run while `text` is fed character by character."""
    parser, count = TOOL_PARSERS[name].open(rules(streams_arguments=False)), 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        for char in text:
            parser.feed(char)
        parser.finish()
    finally:
        sys.setprofile(previous)
    return count


@pytest.mark.parametrize("filling", ["x", "\n", '[{"'])
@pytest.mark.parametrize("start", ["", "call"])
@pytest.mark.parametrize("name", ALL_TOOLS)
def test_four_times_the_text_is_four_times_the_work(name, start, filling):
    text = (LONG[name] if start else "") + filling * 100
    longer = (LONG[name] if start else "") + filling * 400
    assert num_function_calls(name, longer) <= 4.2 * num_function_calls(name, text)


@pytest.mark.parametrize("name", ALL_TOOLS)
def test_twenty_thousand_characters_one_by_one_come_out_whole(name):
    start = LONG[name]
    end = "')]" if name == "pythonic" else '"}}]'
    length = 20_000
    message = run(TOOL_PARSERS[name].open(rules()), start + "x" * length + end)
    [(_, _, called, arguments)] = message.calls
    assert called == "get_time"
    assert arguments.replace(" ", "") == '{"a":"' + "x" * length + '"}'
