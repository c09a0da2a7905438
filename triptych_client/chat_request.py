"""Builds a ChatRequest from messages and keyword arguments. Checks names, not values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, Required, TypedDict

from triptych.api.v1 import chat_message_pb2, tokenizer_pb2
from triptych_client.call_options import CallOptions, ModelOptions, build_message
from triptych_client.generate_request import PlacementOptions, SamplingOptions, split_options

Role = Literal["system", "developer", "user", "assistant", "tool"]

_TOOL_CHOICES = {
    "none": chat_message_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": chat_message_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_TEMPLATE_OPTIONS = ("chat_template", "add_generation_prompt", "continue_final_message", "enable_thinking")


class ToolCall(TypedDict, total=False):
    """A tool call of an assistant. `arguments_json` is its arguments as JSON text."""

    id: str
    name: Required[str]
    arguments_json: str


class ChatMessage(TypedDict, total=False):
    """One message of a conversation.

    `content` is a text, or a list of parts, each a text or an API message. `tool_call_id` is the call that a
    tool's message answers.
    """

    role: Required[Role]
    content: str | Sequence[str | chat_message_pb2.ChatPart]
    name: str
    reasoning: str
    tool_calls: Sequence[ToolCall]
    tool_call_id: str


class Tool(TypedDict, total=False):
    """A function the model may call. `parameters` is the JSON schema of its arguments; unset: none."""

    name: Required[str]
    description: str
    parameters: Mapping[str, object]
    strict: bool


class NamedTool(TypedDict):
    """The tool that must be called."""

    name: str


class TemplateOptions(TypedDict, total=False):
    """How the chat template renders a conversation.

    `template_arguments` are further variables of the template, as JSON-compatible values.
    """

    tools: Sequence[Tool]
    chat_template: str
    add_generation_prompt: bool
    continue_final_message: bool
    enable_thinking: bool
    template_arguments: Mapping[str, object]


class ChatOptions(SamplingOptions, PlacementOptions, TemplateOptions, CallOptions, total=False):
    """All options of a conversation."""

    tool_choice: Literal["none", "auto", "required"] | NamedTool
    parallel_tool_calls: bool
    stop_in_all_text: bool


class ApplyTemplateOptions(TemplateOptions, ModelOptions, total=False):
    """Options of a call that only renders a conversation."""


def build_chat_request(messages: Sequence[ChatMessage], options: ChatOptions) -> chat_message_pb2.ChatRequest:
    """The request for the next message. Raises TypeError for an unknown name."""
    template, rest = _template_fields(options)
    if "tool_choice" in rest:
        rest["tool_choice"] = _tool_choice(rest["tool_choice"])
    fields, sampling = split_options(rest, chat_message_pb2.ChatRequest.DESCRIPTOR.fields_by_name)
    fields |= template
    return chat_message_pb2.ChatRequest(
        messages=[_message(message) for message in messages],
        sampling=sampling,
        # mypy assumes one type for all unpacked values; protobuf checks each one.
        **fields,  # type: ignore[arg-type]
    )


def build_template_request(
    messages: Sequence[ChatMessage], options: ApplyTemplateOptions
) -> tokenizer_pb2.ApplyChatTemplateRequest:
    """The request for the rendered prompt of a conversation, with its token ids."""
    template, rest = _template_fields(options)
    fields = {"messages": [_message(message) for message in messages], "tokenize": True, **template}
    return build_message(tokenizer_pb2.ApplyChatTemplateRequest, fields, rest)


def _template_fields(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The fields of a request that affect its prompt, and the remaining options."""
    rest = dict(options)
    fields: dict[str, object] = {}
    of_template = {name: rest.pop(name) for name in _TEMPLATE_OPTIONS if name in rest}
    if "template_arguments" in rest:
        of_template["arguments_json"] = json.dumps(rest.pop("template_arguments"))
    if of_template:
        fields["template_options"] = chat_message_pb2.ChatTemplateOptions(**of_template)  # type: ignore[arg-type]
    tools = rest.pop("tools", ())
    if isinstance(tools, Sequence) and tools:
        fields["tools"] = [_tool(tool) for tool in tools]
    return fields, rest


def _message(message: ChatMessage) -> chat_message_pb2.ChatMessage:
    calls = [
        build_message(chat_message_pb2.ToolCall, {"index": index}, call)
        for index, call in enumerate(message.get("tool_calls", ()))
    ]
    content = message.get("content", ())
    parts = [content] if isinstance(content, str) else content
    fields = {
        "role": _role(message["role"]),
        "parts": [_part(part) for part in parts],
        "tool_calls": calls,
    }
    own = ("role", "content", "tool_calls")
    rest = {name: value for name, value in message.items() if name not in own}
    return build_message(chat_message_pb2.ChatMessage, fields, rest)


def _role(name: str) -> int:
    try:
        return chat_message_pb2.ChatRole.Value(f"CHAT_ROLE_{name.upper()}")
    except ValueError as error:
        raise ValueError(f"there is no role {name!r}") from error


def _part(part: str | chat_message_pb2.ChatPart) -> chat_message_pb2.ChatPart:
    return chat_message_pb2.ChatPart(text=part) if isinstance(part, str) else part


def _tool(tool: Tool) -> chat_message_pb2.Tool:
    given: dict[str, object] = dict(tool)
    fields: dict[str, object] = {}
    if "parameters" in given:
        fields["parameters_json_schema"] = json.dumps(given.pop("parameters"))
    return build_message(chat_message_pb2.Tool, fields, given)


def _tool_choice(choice: object) -> chat_message_pb2.ToolChoice:
    if isinstance(choice, Mapping):
        return build_message(chat_message_pb2.ToolChoice, {}, choice)
    if choice not in _TOOL_CHOICES:
        raise ValueError(f"tool_choice is {choice!r}, must be one of {', '.join(_TOOL_CHOICES)} or a name")
    return chat_message_pb2.ToolChoice(mode=_TOOL_CHOICES[str(choice)])
