"""Formats by name, and the choice by template."""

from __future__ import annotations

import re

import pytest

from frontend_svc.parsers.llama3_json import LLAMA3_JSON
from frontend_svc.parsers.parser import ToolCallPiece, new_call_id
from frontend_svc.parsers.pythonic import PYTHONIC
from frontend_svc.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    detect,
    reasoning_parser,
    tool_parser,
)
from tests.frontend_svc.parsers.transcripts import Message, calls, parse, rules

HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


def test_every_format_is_found_by_its_name():
    assert {name: tool_parser(name) for name in TOOL_PARSERS} == TOOL_PARSERS
    assert {name: reasoning_parser(name) for name in REASONING_PARSERS} == REASONING_PARSERS
    assert {"hermes", "llama3_json", "mistral", "pythonic", "deepseek", "gpt_oss"} <= set(TOOL_PARSERS)
    assert {"think", "gpt_oss"} <= set(REASONING_PARSERS)


def test_none_is_no_parser_and_an_unknown_name_is_refused_with_those_there_are():
    assert tool_parser("none") is None and reasoning_parser("none") is None
    with pytest.raises(ValueError, match=r"'herms'.*none, hermes"):
        tool_parser("herms")
    with pytest.raises(ValueError, match=r"'thnk'.*none, think"):
        reasoning_parser("thnk")


def test_a_name_of_vllm_is_refused_with_ours():
    with pytest.raises(ValueError, match="'llama4_pythonic', which is 'pythonic' here"):
        tool_parser("llama4_pythonic")
    with pytest.raises(ValueError, match="'deepseek_r1', which is 'think' here"):
        reasoning_parser("deepseek_r1")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, ("hermes", None)),
        (HERMES + "{% if '</think>' in content %}", ("hermes", "think")),
        ("<tool_call>\n<function=name>\n<parameter=p>", (None, None)),
        ("<tool_call>{name}\n<arg_key>", (None, None)),
        (
            '{"name": function name, "parameters": dictionary of argument name and its value}',
            ("llama3_json", None),
        ),
        ("{{ '<|python_tag|>' + code }}", ("llama3_json", None)),
        ("Respond in the format [func_name1(params_name1=params_value1)]", ("pythonic", None)),
        ("{{ '<|python_start|>' }}", ("pythonic", None)),
        ("{{ '[TOOL_CALLS] [' }}", ("mistral", None)),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}[THINK]", ("mistral_args", "mistral_think")),
        ("<｜tool▁calls▁begin｜>function\n```json\n", ("deepseek", None)),
        ("<｜tool▁calls▁begin｜>{{ '<｜Assistant｜></think>' }}", ("deepseek_v31", "think")),
        ("<|start|>assistant<|channel|>analysis", ("gpt_oss", "gpt_oss")),
        ("<|im_start|>user", (None, None)),
        ("", (None, None)),
    ],
)
def test_a_template_lists_its_formats(template, expected):
    assert detect(template, lambda _: True) == expected


@pytest.mark.parametrize("template", ["[TOOL_CALLS] [", "<|channel|>", "[THINK]"])
def test_markers_that_must_be_tokens_count_only_where_they_are(template):
    assert detect(template, lambda _: False) == (None, None)


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@pytest.mark.parametrize("tool_name", [None, "get_time"])
def test_a_forced_prefix_emits_nothing_but_perhaps_the_name(name, tool_name):
    format_ = TOOL_PARSERS[name]
    parser = format_.open(rules(), forced_prefix=format_.forced_prefix(tool_name))
    assert parser.feed("") == []
    assert parser.finish(is_cut=True) == []
    assert parser.num_calls == 0


@pytest.mark.parametrize("name", sorted({*TOOL_PARSERS} - {"mistral", "mistral_args", "pythonic"}))
def test_ids_are_24_hexadecimal_digits_unless_the_format_has_its_own(name):
    format_ = TOOL_PARSERS[name]
    parser = format_.open(rules(new_id=None), forced_prefix=format_.forced_prefix("get_time"))
    [piece] = parser.feed("{}")
    assert isinstance(piece, ToolCallPiece)
    assert re.fullmatch("call_[0-9a-f]{24}", piece.id)
    assert new_call_id() != new_call_id()


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_markers_of_a_forced_prefix_are_shown(name):
    format_ = TOOL_PARSERS[name]
    specials = re.findall(r"<\|\w+\|>|<｜[^｜]+｜>|\[[A-Z_]+\]|</?tool_call>", format_.forced_prefix("f"))
    assert set(specials) <= format_.markers
    assert format_.needs_special_tokens


ARGUMENTS = {"json": ('{"zone": "a]}"}', "{}"), "keywords": ('zone="a]}"', "")}


def written(name: str, *tools: str) -> str:
    """Calls of tools as a grammar makes them of the format's form, the first with arguments."""
    format_ = TOOL_PARSERS[name]
    form = format_.form
    kind = ARGUMENTS["keywords" if form.has_keywords else "json"]
    each = [
        f"{format_.forced_prefix(tool).removeprefix(form.begins_list)}{arguments}{form.end}"
        for tool, arguments in zip(tools, kind, strict=False)
    ]
    return f"{form.begins_list}{form.separator.join(each)}{form.ends_list}"


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_what_a_grammar_makes_of_a_form_are_calls(name):
    expected = calls(("get_time", '{"zone": "a]}"}'), ("get_weather", "{}"))
    one, both = written(name, "get_time"), written(name, "get_time", "get_weather")
    assert parse(TOOL_PARSERS[name], one).calls == expected[:1]
    for text in (both, f"Well: {both}"):
        found = parse(TOOL_PARSERS[name], text)
        # Bare calls behind prose are content by design: a grammar holds them to the schema all the same.
        if name not in ("llama3_json", "pythonic") or text == both:
            assert (found.calls, found.content.strip()) == (expected, "Well:" if text[0] == "W" else "")


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_beside_a_grammar_a_call_is_one_that_the_grammar_has_held(name):
    text = written(name, "get_time", "get_weather")
    held = parse(TOOL_PARSERS[name], text, opening=TOOL_PARSERS[name].form.trigger)
    assert held == parse(TOOL_PARSERS[name], text)
    assert len(held.calls) == 2


def test_a_list_behind_a_marker_is_content_beside_a_grammar():
    text = "<|python_start|>[get_time(zone=5)]"
    assert parse(PYTHONIC, text).calls == calls(("get_time", '{"zone": 5}'))
    assert parse(PYTHONIC, text, opening="[") == Message(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"get_time","parameters":{"zone": 5}}',
        '{"parameters": {"zone": 5}, "name": "get_time"}',
        '<|python_tag|>{"type": "function", "name": "get_time", "parameters": {"zone": 5}}',
    ],
)
def test_a_call_that_a_trigger_does_not_begin_is_content_beside_a_grammar(text):
    form = LLAMA3_JSON.form
    assert parse(LLAMA3_JSON, text).calls == calls(("get_time", '{"zone": 5}'))
    assert parse(LLAMA3_JSON, text, opening=form.trigger).calls == []
    held = '[{"name": "get_time", "parameters": {}}'
    found = parse(LLAMA3_JSON, f"{held}, {text}]", opening=form.trigger)
    assert found.calls == calls(("get_time", "{}"))


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_a_trigger_begins_each_call_of_its_format(name):
    form = TOOL_PARSERS[name].form
    assert TOOL_PARSERS[name].forced_prefix("f").startswith(form.trigger)
    assert TOOL_PARSERS[name].forced_prefix("f").startswith(form.begins_list)
