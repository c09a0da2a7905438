"""How large a conversation may be: what there is too much of is not looked at, entry by entry."""

from __future__ import annotations

import pytest

from frontend_svc.text.chat import conversation
from frontend_svc.text.chat.conversation import check_conversation
from frontend_svc.text.limits import Violations
from service_kit.errors import InvalidArgument
from triptych.api.v1 import chat_message_pb2

ROLE = chat_message_pb2.CHAT_ROLE_ASSISTANT
CHARS, JSON_CHARS = conversation.MAX_CHARS, conversation.MAX_JSON_CHARS
NOTHING = chat_message_pb2.ChatMessage()


def said(**fields) -> dict[str, object]:
    return {"messages": [{"role": ROLE, **fields}]}


def object_of(num_chars: int) -> str:
    return '{"a":"' + "x" * (num_chars - 8) + '"}'


def breaches(**fields) -> list[tuple[str, str]]:
    violations = Violations()
    check_conversation(chat_message_pb2.ChatRequest(**fields), violations, takes_templates=False)
    try:
        violations.raise_if_any()
    except InvalidArgument as error:
        return error.violations
    return []


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        # Each entry would be a breach of its own.
        ({"messages": [NOTHING] * 4097}, "messages", "has 4097 messages, must have 1..4096"),
        ({"messages": [NOTHING], "tools": [{}] * 129}, "tools", "has 129 tools, must have at most 128"),
        (said(parts=[{}] * 16_385), "messages", "has 16385 parts, must have at most 16384"),
        (said(tool_calls=[{}] * 16_385), "messages", "has 16385 tool calls, must have at most 16384"),
        (said(parts=[{"text": "x" * (CHARS + 1)}]), "messages", f"has {CHARS + 1} characters, must"),
        (said(reasoning="x" * (CHARS + 1)), "messages", f"has {CHARS + 1} characters, must"),
        (
            said(tool_calls=[{"arguments_json": "["}] * 2 + [{"arguments_json": "x" * 2**20}]),
            "messages",
            f"has {2**20 + 2} characters of JSON, must have at most {2**20}",
        ),
        (
            said() | {"tools": [{"parameters_json_schema": "x" * JSON_CHARS}] * 2},
            "tools",
            f"has {2 * JSON_CHARS} characters of JSON, must have at most {JSON_CHARS}",
        ),
        (
            said() | {"template_options": {"arguments_json": "[" * (JSON_CHARS + 1)}},
            "template_options.arguments_json",
            f"has {JSON_CHARS + 1} characters, must have at most {JSON_CHARS}",
        ),
    ],
)
def test_what_is_too_large_is_told_once(fields, field, told):
    [(found, description)] = breaches(**fields)
    assert found == field
    assert told in description


def test_all_of_the_largest_sizes_is_fine():
    text = object_of(JSON_CHARS)
    request = said(
        parts=[{"text": "x"}] * 16_384,
        tool_calls=[{"name": "a", "arguments_json": object_of(2**20)}],
        reasoning="x" * (CHARS - 2**20 - 16_384),
    )
    tools = [{"name": "a", "parameters_json_schema": text}]
    assert breaches(**request, tools=tools, template_options={"arguments_json": text}) == []
