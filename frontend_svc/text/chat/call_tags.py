"""Structural tags over a tool parser's format: calls that a grammar holds to the schemas of their tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from frontend_svc.parsers.registry import tool_parser
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import chat_message_pb2
from triptych_kit.grammars.structural_tags import StructuralTags, Tag

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallTags:
    """is_lenient: for each tag, whether its tool is not strict."""

    document: str
    is_lenient: tuple[bool, ...]


def has_call_tags(request: chat_message_pb2.ChatRequest, model: ServedModel) -> bool:
    """Whether a call is demanded or a tool is strict, and the model's engines and format have grammars."""
    return bool(call_trigger(request, model))


def call_trigger(request: chat_message_pb2.ChatRequest, model: ServedModel) -> str:
    """The beginning of calls that a grammar holds to the schemas of their tools; empty: there is none."""
    tool_format = tool_parser(model.parsers.tool)
    if tool_format is None or tool_format.form is None or not model.ready.structured_output_backends:
        return ""
    is_held = demands_call(request.tool_choice) or has_strict_tools(request)
    return tool_format.form.trigger if is_held else ""


def call_tags(request: chat_message_pb2.ChatRequest, model: ServedModel) -> CallTags:
    """The tags of a checked request that has some.

    A demanded answer has calls and nothing else. Otherwise calls may stand in any text.
    """
    tool_format = tool_parser(model.parsers.tool)
    assert tool_format is not None and tool_format.form is not None, "checked by has_call_tags"
    form, choice, tools = tool_format.form, request.tool_choice, list(request.tools)
    is_demanded, is_named = demands_call(choice), choice.WhichOneof("choice") == "name"
    if is_named:
        tools = [tool for tool in tools if tool.name == choice.name]
    is_one = request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    tags = StructuralTags(
        () if is_demanded else (form.trigger,),
        tuple(Tag(tool_format.forced_prefix(tool.name), _schema(tool), form.end) for tool in tools),
        separator=form.separator if is_demanded else "",
        at_least_one=is_demanded,
        stop_after_first=is_named or is_one,
    )
    return CallTags(json.dumps(tags.document()), tuple(not tool.strict for tool in tools))


def has_strict_tools(request: chat_message_pb2.ChatRequest) -> bool:
    """Whether the model may call a tool whose arguments must follow the schema."""
    return not forbids_calls(request.tool_choice) and any(tool.strict for tool in request.tools)


def demands_call(choice: chat_message_pb2.ToolChoice) -> bool:
    if choice.WhichOneof("choice") == "name":
        return True
    return choice.mode == chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED


def forbids_calls(choice: chat_message_pb2.ToolChoice) -> bool:
    is_mode = choice.WhichOneof("choice") == "mode"
    return is_mode and choice.mode == chat_message_pb2.TOOL_CHOICE_MODE_NONE


def _schema(tool: chat_message_pb2.Tool) -> dict[str, Any]:
    if not tool.parameters_json_schema:
        return _NO_ARGUMENTS
    schema: dict[str, Any] = json.loads(tool.parameters_json_schema)
    # Arguments are an object in every format.
    return schema | {"type": "object"}
