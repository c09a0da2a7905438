"""Structural tags over a tool parser's format: calls that a grammar holds to the schemas of their tools."""

from __future__ import annotations

import json
from typing import Any

from frontend_svc.parsers.registry import tool_parser
from frontend_svc.text.model import ServedModel
from triptych.api.v1 import chat_message_pb2

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}


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


def call_tags(request: chat_message_pb2.ChatRequest, model: ServedModel) -> str:
    """The structural tags of a checked request that has some. Those of tools that are not strict are lenient.

    A demanded answer has calls and nothing else. Otherwise calls may stand in any text.
    """
    tool_format = tool_parser(model.parsers.tool)
    assert tool_format is not None and tool_format.form is not None, "checked by has_call_tags"
    form, choice, tools = tool_format.form, request.tool_choice, list(request.tools)
    is_demanded, is_named = demands_call(choice), choice.WhichOneof("choice") == "name"
    if is_named:
        tools = [tool for tool in tools if tool.name == choice.name]
    is_one = request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    kind: dict[str, Any] = {"type": "triggered_tags", "triggers": [form.trigger]}
    if is_demanded:
        kind = {"type": "tags_with_separator", "separator": form.separator}
    tags = [_tag(tool_format.forced_prefix(tool.name), tool, form.end) for tool in tools]
    ends = {"at_least_one": is_demanded, "stop_after_first": is_named or is_one}
    return json.dumps({"type": "structural_tag", "format": {**kind, "tags": tags, **ends}})


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


def _tag(begin: str, tool: chat_message_pb2.Tool, end: str) -> dict[str, Any]:
    schema = json.loads(tool.parameters_json_schema) if tool.parameters_json_schema else _NO_ARGUMENTS
    # Arguments are an object in every format.
    content: dict[str, Any] = {"type": "json_schema", "json_schema": schema | {"type": "object"}}
    if not tool.strict:
        content["lenient"] = True
    return {"type": "tag", "begin": begin, "content": content, "end": end}
