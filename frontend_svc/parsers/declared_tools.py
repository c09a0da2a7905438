"""The tools that a chat declares: their check, their form for templates, and calls held to their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from frontend_svc.parsers.parser import ToolParserFormat
from frontend_svc.parsers.registry import DEMANDED_CALLS, tool_parser
from triptych.api.v1 import chat_message_pb2
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import session_pb2
from triptych_kit import exact_json
from triptych_kit.rules import Violation, rules_of, shown

_MAX_NAME_CHARS = rules_of(chat_message_pb2.Tool, "name").max_chars
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{_MAX_NAME_CHARS}}}")
# Constraints of an answer beside which tools may be called.
JSON_KINDS = ("json_schema", "json_object")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}


def tool_violations(
    field: str, tool: chat_message_pb2.Tool, earlier_names: Collection[str]
) -> Iterator[Violation]:
    """The violations of one declared tool. field: its path, such as `tools[3]`."""
    name, schema = tool.name, tool.parameters_json_schema
    if _NAME.fullmatch(name) is None:
        rule = f"must be 1..{_MAX_NAME_CHARS} letters, digits, dots, dashes or underscores"
        yield _violation(f"{field}.name", name, rule)
    if name in earlier_names:
        yield _violation(f"{field}.name", name, "must not be given twice")
    yield from object_violations(f"{field}.parameters_json_schema", schema)


def choice_violations(request: chat_message_pb2.ChatRequest) -> Iterator[Violation]:
    """The violations of a tool choice that the declared tools do not allow."""
    choice = request.tool_choice
    if choice.WhichOneof("choice") == "name":
        names = [tool.name for tool in request.tools]
        if choice.name not in names:
            rule = f"must be one of the tools: {', '.join(names) or 'none is given'}"
            yield _violation("tool_choice.name", choice.name, rule)
    elif demands_call(choice) and not request.tools:
        field = "tool_choice.mode"
        yield Violation(field, field, "demands a call, must come with tools")


def object_violations(field: str, text: str) -> Iterator[Violation]:
    """The violation of a text that is set and no JSON object."""
    if not text:
        return
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        yield _violation(field, text, "must be a JSON object")


def template_form(tool: chat_message_pb2.Tool) -> dict[str, object]:
    """A checked tool as chat templates expect it."""
    schema = tool.parameters_json_schema
    parameters = json.loads(schema) if schema else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def call_format(
    request: chat_message_pb2.ChatRequest, parser: str, ready: session_pb2.Ready
) -> ToolParserFormat | None:
    """The format in which an answer has calls, if it may have some. parser: the name of the model's own.

    ready: the announcement of the model's engine.
    """
    own = tool_parser(parser)
    is_held = demands_call(request.tool_choice) and len(ready.structured_output_backends) > 0
    return DEMANDED_CALLS if own is None and is_held else own


def call_trigger(
    request: chat_message_pb2.ChatRequest, tool_format: ToolParserFormat | None, ready: session_pb2.Ready
) -> str:
    """The beginning of calls that a grammar holds to the schemas of their tools; empty where none does.

    tool_format: of the model's calls. ready: the announcement of its engine.
    """
    if tool_format is None or not ready.structured_output_backends:
        return ""
    is_held = (
        demands_call(request.tool_choice) or has_strict_tools(request) or has_schema_beside_calls(request)
    )
    return tool_format.form.trigger if is_held else ""


def call_tags(request: chat_message_pb2.ChatRequest, tool_format: ToolParserFormat | None) -> str:
    """The structural tags of a checked request with a `call_trigger`. Tools that are not strict are lenient.

    A demanded answer has calls and nothing else. Otherwise calls may stand in any text, or where the text has
    a schema or the format has no such text, in its place.
    """
    assert tool_format is not None, "checked by call_trigger"
    form, choice, tools = tool_format.form, request.tool_choice, list(request.tools)
    is_demanded, is_named = demands_call(choice), choice.WhichOneof("choice") == "name"
    if is_named:
        tools = [tool for tool in tools if tool.name == choice.name]
    is_one = request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    has_schema = not is_demanded and has_schema_beside_calls(request)
    is_all = is_demanded or has_schema or bool(form.text)
    kind: dict[str, Any] = {"type": "triggered_tags", "triggers": [form.trigger]}
    if is_all:
        kind = {"type": "tags_with_separator", "separator": form.separator}
        # Older engines do not know the texts around a list.
        kind |= {"begin": form.begins_list, "end": form.ends_list} if form.begins_list else {}
    tags = [_tag(tool_format, tool) for tool in tools]
    ends = {"at_least_one": is_all, "stop_after_first": is_named or is_one}
    calls: dict[str, Any] = {**kind, "tags": tags, **ends}
    if is_all and not is_demanded:
        text: dict[str, Any] = {"type": "regex", "pattern": form.text}
        if has_schema:
            text = _text_of_schema(request.sampling.structured_output)
        if form.answer:
            text = {"type": "tag", "begin": form.answer, "content": text, "end": ""}
        calls = {"type": "or", "elements": [calls, text]}
        if form.preface is not None:
            begin, end = form.preface
            content = {"type": "regex", "pattern": form.text}
            calls["preface"] = {"type": "tag", "begin": begin, "content": content, "end": end}
    return exact_json.dumps({"type": "structural_tag", "format": calls})


def has_schema_beside_calls(request: chat_message_pb2.ChatRequest) -> bool:
    """Whether the model may call a tool, and what it writes otherwise is JSON in a schema."""
    kind = request.sampling.structured_output.WhichOneof("constraint")
    return bool(request.tools) and not forbids_calls(request.tool_choice) and kind in JSON_KINDS


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


def _text_of_schema(constraint: sampling_pb2.StructuredOutput) -> dict[str, Any]:
    schema = exact_json.loads(constraint.json_schema) if constraint.json_schema else {"type": "object"}
    content = {"type": "json_schema", "json_schema": schema}
    return content | {"lenient": True} if constraint.lenient else content


def _tag(tool_format: ToolParserFormat, tool: chat_message_pb2.Tool) -> dict[str, Any]:
    form = tool_format.form
    text = tool.parameters_json_schema
    schema = exact_json.loads(text) if text else _NO_ARGUMENTS
    # Arguments are an object in every format.
    kind = "keyword_arguments" if form.has_keywords else "json_schema"
    content: dict[str, Any] = {"type": kind, "json_schema": schema | {"type": "object"}}
    if not tool.strict:
        content["lenient"] = True
    begin = tool_format.forced_prefix(tool.name).removeprefix(form.begins_list)
    return {"type": "tag", "begin": begin, "content": content, "end": form.end}


def _violation(field: str, value: str, rule: str) -> Violation:
    return Violation(field, field, f"is {shown(value)}, {rule}")
