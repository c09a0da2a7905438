"""Where a call may stand, and what it may look like: the same rules for every format."""

from __future__ import annotations

import json
import random

import pytest

from frontend_svc.parsers.registry import TOOL_PARSERS
from tests.frontend_svc.parsers.transcripts import TOOLS, Message, cut, is_json, joined, parse, rules, run

# How each format writes a call of a tool with arguments, which are JSON text.
WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "llama3_json": '{{"name": "{name}", "parameters": {arguments}}}',
    "mistral": '[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]',
    "mistral_args": "[TOOL_CALLS]{name}[ARGS]{arguments}",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
    "```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
    "{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
}
JSON_FORMATS = sorted(WRITTEN)
BARE = {"llama3_json": '{"name": "f", "parameters": {}}', "pythonic": "[f()]"}
MARKED = {
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "pythonic": "<|python_start|>",
}


def written(name: str, arguments: str, tool: str = "f") -> str:
    return WRITTEN[name].format(name=tool, arguments=arguments)


def read(name: str, text: str, *tools: str) -> Message:
    """The message, which is the same whether it is streamed or not, unless a call breaks."""
    whole, streamed = read_whole(name, text, *tools), read_streamed(name, text, *tools)
    assert streamed == whole
    return whole


def read_whole(name: str, text: str, *tools: str) -> Message:
    return parse(TOOL_PARSERS[name], text, tool_names=frozenset(tools or {"f"}), streams_arguments=False)


def read_streamed(name: str, text: str, *tools: str) -> Message:
    return parse(TOOL_PARSERS[name], text, tool_names=frozenset(tools or {"f"}))


def arguments_of(message: Message) -> list[object]:
    return [json.loads(arguments) for _, _, _, arguments in message.calls]


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (r'"{\"a\": 1}"', {"a": 1}),
        (r'"\n{\"s\": \"line1\\nline2 \ud800\"} "', {"s": "line1\nline2 \ud800"}),
        ("null", {}),
        ('""', {}),
        ("{}", {}),
    ],
)
def test_arguments_may_be_an_object_the_text_of_one_or_none(name, arguments, value):
    message = read(name, written(name, arguments))
    assert (message.content, message.incomplete) == ("", [])
    assert arguments_of(message) == [value]
    message.calls[0][3].encode()


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(
    "arguments",
    ["1", "true", "[]", '"x"', '" "', r'"[1]"', r'"{\"a\": 1"', r'"{} {}"', '"null"', "nul"],
)
def test_other_arguments_are_no_call(name, arguments):
    text = written(name, arguments)
    message = read(name, text)
    # The end of a message is no part of its text.
    assert message == Message(text.removesuffix("<|call|>"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("llama3_json", '{"name": "f"}'),
        ("llama3_json", '{"type": "function", "name": "f"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}]'),
        ("pythonic", "[f( )]"),
        ("deepseek", written("deepseek", "")),
        ("deepseek_v31", written("deepseek_v31", "")),
        ("gpt_oss", written("gpt_oss", "")),
        ("gpt_oss", written("gpt_oss", "").removesuffix("<|call|>")),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ],
)
def test_a_whole_call_may_have_no_arguments_at_all(name, text):
    message = read(name, text)
    assert (message.content, arguments_of(message)) == ("", [{}])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt_oss", written("gpt_oss", "").removesuffix("<|call|>")),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
        ("llama3_json", '{"name": "f"'),
        ("pythonic", "[f("),
    ],
)
def test_a_call_whose_arguments_were_cut_off_is_none(name, text):
    parser = TOOL_PARSERS[name].open(rules(tool_names=frozenset({"f"})))
    assert joined([*parser.feed(text), *parser.finish(is_cut=True)]) == Message(text)


def read_cut(name: str, text: str, **changes: object) -> Message:
    """The message of an output that was cut off, which is the same whether it is streamed or not."""
    fields = {"tool_names": frozenset({"f", "g"}), "is_cut": True, **changes}
    whole = parse(TOOL_PARSERS[name], text, streams_arguments=False, **fields)
    assert parse(TOOL_PARSERS[name], text, **fields) == whole
    return whole


CUT_ARGUMENTS = '{"city": "Paris", "days": [1, '


@pytest.mark.parametrize("num_chars", range(1, len(CUT_ARGUMENTS) + 1))
@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_call_in_which_an_output_was_cut_off_is_incomplete(name, num_chars):
    begun = CUT_ARGUMENTS[:num_chars]
    text = written(name, "@").split("@")[0] + begun
    message = read_cut(name, text)
    assert [each[2:] for each in message.calls] == [("f", begun)]
    assert (message.content, message.incomplete) == ("", [0])


@pytest.mark.parametrize(
    ("text", "whole", "cut_off"),
    [
        ("[f(a", [], "{"),
        ("[f(a=1, b='", [], '{"a": 1'),
        ("[f(a=1, b=[1, 2], c={'x': ", [], '{"a": 1, "b": [1, 2]'),
        ("[f(a=1)", [("f", '{"a": 1}')], None),
        ("[f(a=1), ", [("f", '{"a": 1}')], None),
        ("[f(a=1), g(", [("f", '{"a": 1}')], None),
        ("[f(a='),('), g(b=true, c=2", [("f", '{"a": "),("}')], '{"b": true'),
    ],
)
def test_a_list_that_was_cut_off_has_its_whole_calls_and_arguments(text, whole, cut_off):
    message = read_cut("pythonic", text)
    expected = [*whole, *([] if cut_off is None else [("g" if whole else "f", cut_off)])]
    assert [each[2:] for each in message.calls] == expected
    assert message.incomplete == ([] if cut_off is None else [len(whole)])
    assert message.content == ""


@pytest.mark.parametrize("text", ["[f(a=1), h(b=2, c=", "[f(a=x, b=1), g(", "[f(1, b=", "[f()(a=", "[h(a="])
def test_a_list_of_anything_but_calls_is_content_where_it_was_cut_off(text):
    assert read_cut("pythonic", text) == Message(text)


@pytest.mark.parametrize("name", [*JSON_FORMATS, "pythonic"])
def test_an_output_cut_off_anywhere_behind_a_call_has_nothing_else(name):
    arguments = '{"a": "b"}'
    two = "[f(a='b'), f(a='b')]" if name == "pythonic" else written(name, arguments) * 2
    two = "; ".join([written(name, arguments)] * 2) if name == "llama3_json" else two
    whole = read(name, two).calls
    assert len(whole) == 2
    first = two.index("f(a='b')" if name == "pythonic" else arguments) + len(arguments)
    for end in range(first, len(two)):
        message = read_cut(name, two[:end])
        alone = read_cut(name, two[:end], is_parallel=False)
        assert (message.content, alone.content, alone.calls) == ("", "", message.calls[:1])
        # Arguments alone are no call yet, and no client can read those of one that is incomplete.
        is_whole = alone.incomplete == []
        assert is_whole or end == first
        assert alone.calls[0][:3] == whole[0][:3]
        assert alone.calls[0][3] == (whole[0][3] if is_whole else whole[0][3].removesuffix("}"))


@pytest.mark.parametrize("name", [*JSON_FORMATS, "pythonic"])
def test_the_beginning_of_a_demanded_call_is_no_content(name):
    text = "[f(a='b')]" if name == "pythonic" else written(name, '{"a": "b"}')
    for end in range(1, len(text)):
        message = read_cut(name, text[:end], is_demanded=True)
        assert message.content == ""
        assert [each[2] for each in message.calls] in ([], ["f"])
    prose = read_cut(name, "No call: <")
    assert prose == Message("No call: <")


@pytest.mark.parametrize("tool", ["get-it", "a.b-c_d", "2d", "class", "-", "x" * 64])
@pytest.mark.parametrize("name", [*JSON_FORMATS, "pythonic"])
def test_every_name_that_a_request_may_declare_is_recognised(name, tool):
    text = f"[{tool}(b=2)]" if name == "pythonic" else written(name, '{"b": 2}', tool)
    message = read(name, text, tool)
    assert [(each[2], json.loads(each[3])) for each in message.calls] == [(tool, {"b": 2})]
    assert message.content == ""


@pytest.mark.parametrize("before", ["I call it: ", "Write ```", "a\n\n", "- ", "[1] ", "{x} ", '"'])
@pytest.mark.parametrize("name", sorted(BARE))
def test_a_call_without_a_marker_is_none_behind_text(name, before):
    text = f"{before}{BARE[name]}``` to call it."
    assert read(name, text) == Message(text)


@pytest.mark.parametrize("name", sorted(BARE))
def test_white_space_before_the_first_call_is_no_text(name):
    message = read(name, f"\n {BARE[name]}\n")
    assert (message.content, arguments_of(message)) == ("", [{}])


@pytest.mark.parametrize("name", sorted(BARE))
def test_a_message_that_began_in_the_prompt_begins_with_no_call(name):
    message = parse(TOOL_PARSERS[name], BARE[name], tool_names=frozenset({"f"}), is_continued=True)
    assert message == Message(BARE[name])


@pytest.mark.parametrize("name", sorted(MARKED))
def test_a_marker_in_prose_is_no_call_and_one_before_a_call_is(name):
    prose = f"The marker {MARKED[name]} opens f, as in {MARKED[name]} then {{}} or [].\n"
    call = BARE["pythonic"] if name == "pythonic" else BARE["llama3_json"]
    message = read(name, f"{prose}{MARKED[name]}{call}")
    assert (message.content, arguments_of(message)) == (prose.rstrip(), [{}])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "g", "arguments": {"x": "<tool_call>{}"}}</tool_call>'),
        ("hermes", '<tool_call>{"plan": {"name": "f", "arguments": {}}}</tool_call>'),
        ("hermes", '<tool_call>[[{"name": "f", "arguments": {}}]]</tool_call>'),
        ("llama3_json", '{"plan": {"name": "f", "parameters": {}}}'),
        ("llama3_json", '{"plan": [{"name": "f", "parameters": {}}]}; {"name": "f", "parameters": {}}'),
        ("llama3_json", '[{"plan": 1}, {"name": "f", "parameters": {}}]'),
        ("llama3_json", '[1, {"name": "f", "parameters": {}}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "g", "arguments": {"x": "[TOOL_CALLS]f[ARGS]{}"}}]'),
        ("mistral", '[TOOL_CALLS] {"x": "[TOOL_CALLS]f[ARGS]{}"}'),
        ("mistral_args", '[TOOL_CALLS]g[ARGS]{"x": "[TOOL_CALLS]f[ARGS]{}"}'),
        ("deepseek", written("deepseek", '{"x": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"}', "g")),
        ("deepseek_v31", written("deepseek_v31", '{"x": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"}', "g")),
        (
            "gpt_oss",
            '<|channel|>commentary to=functions.g<|message|>{"x": "<|message|>'
            '<|channel|>c to=functions.f<|message|>{}"}',
        ),
        ("pythonic", "[g(x='<|python_start|>[f()]')]"),
        ("pythonic", "[f(x='<|python_start|>[f()]', 1)]"),
        ("pythonic", "[g(), f()]"),
    ],
)
def test_an_object_that_is_no_call_is_content_whole(name, text):
    assert read(name, text) == Message(text)


@pytest.mark.parametrize("marker", ["", "<|python_tag|>", "<tool_call>", "[TOOL_CALLS]"])
@pytest.mark.parametrize(
    "spelling",
    [
        "[{call}]",
        "[ {call} , {call} ]",
        '{{"type": "function", "function": {call}}}',
        '{{"id": "c1", "index": 0, "function": {call}, "type": "function"}}',
        '[{{"type": "function", "function": {call}}}, {call}]',
        '{{"tool_calls": [{call}, {{"function": {call}}}]}}',
    ],
)
@pytest.mark.parametrize(
    "call", ['{"name": "f", "arguments": {"a": 1}}', r'{"name": "f", "arguments": "{\"a\": 1}"}']
)
def test_other_spellings_of_whole_calls_leave_nothing_behind(spelling, call, marker):
    name = next((each for each, mark in MARKED.items() if mark == marker), "llama3_json")
    text = marker + spelling.format(call=call) + ("</tool_call>" if name == "hermes" else "")
    message = read(name, text)
    assert (message.content, message.incomplete) == ("", [])
    assert arguments_of(message) == [{"a": 1}] * spelling.count("{call}")


def test_text_behind_a_whole_call_of_an_array_is_content():
    call = BARE["llama3_json"]
    for rest in (', {"name": "g"}]', ", oops]", " x]"):
        message = read("llama3_json", f"[{call}{rest} {call}")
        assert (message.content, arguments_of(message)) == (f"{rest} {call}", [{}])


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(
    "broken",
    ['{"s": "line1\nline2"}', '{"a": 1,}', '{"a": oops}', "{'a': 1}", '{"a": "\\x"}', '{"a": 1', '{"a": "'],
)
def test_a_call_that_breaks_is_content_or_marked_and_loses_nothing(name, broken):
    text = written(name, broken).removesuffix("<|call|>")
    assert read_whole(name, text) == Message(text)
    message = read_streamed(name, text)
    [(_, _, called, arguments)] = message.calls
    assert (called, message.incomplete) == ("f", [0])
    assert text.endswith(arguments + message.content)


def test_a_call_that_breaks_behind_its_arguments_is_marked_and_they_are_no_json():
    text = '{"name": "f", "parameters": {"a": {}}, "oops": {"name": "f", "parameters": {}}}'
    message = read_streamed("llama3_json", text)
    assert (message.incomplete, message.calls[0][3]) == ([0], '{"a": {}')
    assert message.content == '}, "oops": {"name": "f", "parameters": {}}}'
    assert read_whole("llama3_json", text) == Message(text)


BODIES = ['{"a": "b"}', "null", '{"a": tru', '"{}"']
PARTS = [
    "Text. ",
    "\n",
    " ",
    "; ",
    ", ",
    "[",
    "]",
    "{",
    "}",
    '"',
    "\\",
    "```",
    "</tool_call>",
    "<|python_tag|>",
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|python_start|>",
    "<|python_end|>",
    "<|call|>",
    "<|channel|>final<|message|>",
    "<｜tool▁calls▁end｜>",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "parameters": {"a": [1, "}"]}}',
    '{"name": "f"}',
    r'{"name": "f", "arguments": "{\"a\": 1}"}',
    '{"name": "g", "arguments": {"x": "[TOOL_CALLS]f[ARGS]{}"}}',
    '{"function": {"name": "f", "arguments": null}}',
    "[f(a=1)]",
    "[f(a='x, ]'), f()]",
    "[g(), f()]",
    "[f(a=x)]",
    *(written(name, arguments) for name in JSON_FORMATS for arguments in BODIES),
]


@pytest.mark.parametrize("name", [*JSON_FORMATS, "pythonic"])
def test_streamed_and_whole_answers_agree_however_they_are_cut(name):
    draw = random.Random(f"calls {name}")
    for _ in range(150):
        text = "".join(draw.choices(PARTS, k=draw.randint(1, 6)))
        chunks = cut(text, [draw.randrange(10_000) for _ in range(draw.randint(0, 12))])
        whole = run(TOOL_PARSERS[name].open(rules(tool_names=TOOLS | {"f"}, streams_arguments=False)), [text])
        streamed = run(TOOL_PARSERS[name].open(rules(tool_names=TOOLS | {"f"})), chunks)
        assert not whole.incomplete and len(arguments_of(whole)) == len(whole.calls)
        kept = [call[2:] for call in streamed.calls if call[0] not in streamed.incomplete]
        assert not any(is_json(streamed.calls[index][3]) for index in streamed.incomplete), (text, chunks)
        assert kept == [call[2:] for call in whole.calls], (text, chunks)
        if not streamed.incomplete:
            assert (streamed.content, streamed.reasoning) == (whole.content, whole.reasoning), (text, chunks)
