"""Conversations and keyword arguments become the API's fields, and nothing else does."""

from __future__ import annotations

import json

import pytest

from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_client.call_options import CallOptions
from triptych_client.chat_events import ToolCallPiece, assistant_message
from triptych_client.chat_request import (
    ChatMessage,
    ChatOptions,
    build_chat_request,
    build_template_request,
)

USER: ChatMessage = {"role": "user", "content": "hi"}
IMAGE = chat_message_pb2.ChatPart(media=generate_pb2.Media(mime_type="image/png", data=b"x"))


def test_messages_keep_their_role_parts_and_calls() -> None:
    messages: list[ChatMessage] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": ["see ", IMAGE], "name": "ann"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [{"id": "1", "name": "f"}, {"name": "g"}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    system, user, assistant, tool = build_chat_request(messages, {}).messages
    assert (system.role, system.parts[0].text) == (chat_message_pb2.CHAT_ROLE_SYSTEM, "be brief")
    assert (list(user.parts), user.name) == ([chat_message_pb2.ChatPart(text="see "), IMAGE], "ann")
    assert [(call.index, call.id, call.name) for call in assistant.tool_calls] == [
        (0, "1", "f"),
        (1, "", "g"),
    ]
    assert (assistant.reasoning, len(assistant.parts)) == ("hm", 0)
    assert (tool.tool_call_id, len(tool.parts)) == ("1", 1)


def test_options_go_where_the_api_has_them() -> None:
    request = build_chat_request(
        [USER],
        {
            "model": "m",
            "temperature": 0.0,
            "n": 2,
            "stop": "x",
            "parallel_tool_calls": False,
            "enable_thinking": False,
            "template_arguments": {"depth": 2},
            "tools": [{"name": "f", "parameters": {"type": "object"}, "strict": True}],
            "tool_choice": {"name": "f"},
            "timeout_s": 3.0,
        },
    )
    assert request.sampling == sampling_pb2.SamplingParams(temperature=0.0, n=2, stop=["x"])
    assert (request.model, request.HasField("parallel_tool_calls")) == ("m", True)
    assert request.template_options.HasField("enable_thinking")
    assert json.loads(request.template_options.arguments_json) == {"depth": 2}
    assert json.loads(request.tools[0].parameters_json_schema) == {"type": "object"}
    assert request.tools[0].strict
    assert request.tool_choice.name == "f"


@pytest.mark.parametrize("mode", ["none", "auto", "required"])
def test_a_tool_choice_is_a_word_or_a_name(mode: str) -> None:
    request = build_chat_request([USER], {"tool_choice": mode})  # type: ignore[typeddict-item]
    assert request.tool_choice.mode == chat_message_pb2.ToolChoiceMode.Value(
        f"TOOL_CHOICE_MODE_{mode.upper()}"
    )


def test_what_the_api_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="orphan_grace_ms"):
        build_chat_request([USER], {"orphan_grace_ms": 5})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="mood"):
        build_chat_request([{"role": "user", "mood": "good"}], {})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ValueError, match="'robot'"):
        build_chat_request([{"role": "robot"}], {})  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="'any'"):
        build_chat_request([USER], {"tool_choice": "any"})  # type: ignore[typeddict-item]


def test_every_option_of_the_api_is_declared() -> None:
    fields = {
        *chat_message_pb2.ChatRequest.DESCRIPTOR.fields_by_name,
        *sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
        *chat_message_pb2.ChatTemplateOptions.DESCRIPTOR.fields_by_name,
        "template_arguments",
    } - {"messages", "sampling", "template_options", "arguments_json"}
    assert ChatOptions.__annotations__.keys() - CallOptions.__annotations__.keys() == fields


def test_a_rendered_conversation_comes_with_its_tokens() -> None:
    request = build_template_request([USER], {"model": "m", "add_generation_prompt": False})
    assert (request.model, request.tokenize, len(request.messages)) == ("m", True, 1)
    assert request.template_options.HasField("add_generation_prompt")


def test_an_answer_is_the_next_message_of_its_conversation() -> None:
    calls = [ToolCallPiece(0, "1", "f", "{}")]
    message = assistant_message("", "", calls)
    assert message == {
        "role": "assistant",
        "tool_calls": [{"id": "1", "name": "f", "arguments_json": "{}"}],
    }
    assert assistant_message("a", "b", []) == {"role": "assistant", "content": "a", "reasoning": "b"}
