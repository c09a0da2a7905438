"""The tools that a chat declares: what breaks their rules, and their form in a chat template."""

from __future__ import annotations

import pytest

from frontend_svc.parsers.declared_tools import (
    call_format,
    call_tags,
    choice_violations,
    template_form,
    tool_violations,
)
from triptych.api.v1 import chat_message_pb2
from triptych.engine.v1 import session_pb2

ADD = chat_message_pb2.Tool(
    name="add", description="adds", parameters_json_schema='{"required": ["a"]}', strict=True
)
NAME_RULE = "must be 1..64 letters, digits, dots, dashes or underscores"
OBJECT_RULE = "must be a JSON object"


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"name": "a.b-C_9"}, []),
        ({"name": "a" * 64}, []),
        ({"name": "a b"}, [f"tools[3].name is 'a b', {NAME_RULE}"]),
        ({"name": ""}, [f"tools[3].name is '', {NAME_RULE}"]),
        ({"name": "a" * 65}, [f"tools[3].name is '{'a' * 59}..., {NAME_RULE}"]),
        ({"name": "add"}, ["tools[3].name is 'add', must not be given twice"]),
        ({"name": "a", "parameters_json_schema": "{}"}, []),
        *(
            (
                {"name": "a", "parameters_json_schema": text},
                [f"tools[3].parameters_json_schema is {text!r}, {OBJECT_RULE}"],
            )
            for text in ("{", "[]", "true")
        ),
        (
            {"name": "a", "parameters_json_schema": "[" * 100_000},
            [f"tools[3].parameters_json_schema is '{'[' * 59}..., {OBJECT_RULE}"],
        ),
    ],
)
def test_a_tool_is_refused_by_field(fields, messages):
    tool = chat_message_pb2.Tool(**fields)
    assert [violation.message for violation in tool_violations("tools[3]", tool, {"add"})] == messages


@pytest.mark.parametrize(
    ("choice", "tools", "messages"),
    [
        ({"name": "add"}, [ADD], []),
        ({"name": "sub"}, [ADD], ["tool_choice.name is 'sub', must be one of the tools: add"]),
        ({"name": "sub"}, [], ["tool_choice.name is 'sub', must be one of the tools: none is given"]),
        ({"mode": "TOOL_CHOICE_MODE_REQUIRED"}, [ADD], []),
        (
            {"mode": "TOOL_CHOICE_MODE_REQUIRED"},
            [],
            ["tool_choice.mode demands a call, must come with tools"],
        ),
        ({"mode": "TOOL_CHOICE_MODE_AUTO"}, [], []),
        ({}, [], []),
    ],
)
def test_a_choice_is_refused_that_the_tools_do_not_allow(choice, tools, messages):
    request = chat_message_pb2.ChatRequest(tools=tools, tool_choice=choice)
    assert [violation.message for violation in choice_violations(request)] == messages


def test_templates_see_a_tool_as_a_function():
    function = {"name": "add", "description": "adds", "parameters": {"required": ["a"]}}
    assert template_form(ADD) == {"type": "function", "function": function}
    without_schema = template_form(chat_message_pb2.Tool(name="now"))["function"]
    assert without_schema["parameters"] == {"type": "object", "properties": {}}


def test_the_tags_of_a_tool_have_the_numbers_of_its_schema():
    numbers = "[9007199254740993, 0.12345678901234567890123]"
    schema = f'{{"properties": {{"id": {{"enum": {numbers}}}}}}}'
    tool = chat_message_pb2.Tool(name="find", parameters_json_schema=schema, strict=True)
    request = chat_message_pb2.ChatRequest(tools=[tool], tool_choice={"name": "find"})
    tags = call_tags(request, call_format(request, "hermes", session_pb2.Ready()))
    assert f'"enum": {numbers}' in tags
