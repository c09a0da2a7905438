"""Checks conversations of the public API and converts them to plain data for a chat template.

Knows no template.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TypeAlias

from frontend_svc.parsers.declared_tools import (
    object_violations,
    template_form,
    tool_violations,
)
from frontend_svc.text.limits import Violations
from triptych.api.v1 import chat_message_pb2, tokenizer_pb2
from triptych_kit.errors import Unimplemented
from triptych_kit.rules import MessageRules

# The two requests with a conversation.
ConversationRequest: TypeAlias = "chat_message_pb2.ChatRequest | tokenizer_pb2.ApplyChatTemplateRequest"

# Both requests keep the rules of a ChatRequest; messages are checked in slices. The sizes bound the time of
# JSON on the event loop, where a character may take 25 ns, twice that for tools and options.
_SIZES = MessageRules(
    chat_message_pb2.ChatRequest,
    apart=("messages.role", "messages.name", "messages.tool_calls", "messages.tool_call_id", "tools.name"),
)
_OF_MESSAGE = MessageRules(chat_message_pb2.ChatMessage, apart=("tool_calls",))
_OF_CALL = MessageRules(chat_message_pb2.ToolCall)
# Time that a large conversation holds the event loop at once.
_SLICE_S = 0.005
_ROLES = {
    chat_message_pb2.CHAT_ROLE_SYSTEM: "system",
    chat_message_pb2.CHAT_ROLE_DEVELOPER: "developer",
    chat_message_pb2.CHAT_ROLE_USER: "user",
    chat_message_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    chat_message_pb2.CHAT_ROLE_TOOL: "tool",
}


class _Slices:
    """Divides work on the event loop, so that streams of other requests get a turn every few milliseconds."""

    def __init__(self) -> None:
        self._ends_at = time.perf_counter() + _SLICE_S

    async def turn(self) -> None:
        """Let others run if this slice is over."""
        if time.perf_counter() > self._ends_at:
            await asyncio.sleep(0)
            self._ends_at = time.perf_counter() + _SLICE_S


async def check_conversation(
    request: ConversationRequest, violations: Violations, *, takes_templates: bool
) -> None:
    """Add violations for invalid messages, tools and template options. Raises Unimplemented for media.

    takes_templates: whether a client may send its own template.
    """
    fields = {name: getattr(request, name) for name in ("messages", "tools", "template_options")}
    too_large = _SIZES.violations_in(fields, {})
    violations.extend(too_large)
    if too_large:
        return
    slices = _Slices()
    for index, message in enumerate(request.messages):
        await _check_message(f"messages[{index}]", message, violations, slices)
    names: set[str] = set()
    for index, tool in enumerate(request.tools):
        await slices.turn()
        violations.extend(tool_violations(f"tools[{index}]", tool, names))
        names.add(tool.name)
    options = request.template_options
    if options.chat_template and not takes_templates:
        violations.add(
            "template_options.chat_template",
            options.chat_template,
            "must be unset: the frontend has no --request-templates",
        )
    if options.continue_final_message and options.add_generation_prompt:
        rule = "must be false where continue_final_message is true"
        violations.add("template_options.add_generation_prompt", True, rule)
    if options.continue_final_message:
        final = request.messages[-1]
        is_fine = bool(final.parts) and not final.tool_calls
        rule = "must be false where the last message does not end with text"
        violations.need(is_fine, "template_options.continue_final_message", True, rule)
    violations.extend(object_violations("template_options.arguments_json", options.arguments_json))


async def conversation_of(request: ConversationRequest, *, shows_tools: bool) -> dict[str, object]:
    """The input of a chat template, as the templates of Hugging Face's models expect it."""
    options = request.template_options
    arguments: dict[str, object] = json.loads(options.arguments_json) if options.arguments_json else {}
    if options.HasField("enable_thinking"):
        arguments["enable_thinking"] = options.enable_thinking
    opens_answer = not options.continue_final_message
    if options.HasField("add_generation_prompt"):
        opens_answer = options.add_generation_prompt
    slices = _Slices()
    conversation: dict[str, object] = {
        "messages": [await _message(message, slices) for message in request.messages],
        "add_generation_prompt": opens_answer,
        "continue_final_message": options.continue_final_message,
        "arguments": arguments,
    }
    if shows_tools and request.tools:
        conversation["tools"] = [template_form(tool) for tool in request.tools]
    if options.chat_template:
        conversation["chat_template"] = options.chat_template
    return conversation


async def _check_message(
    message_field: str, message: chat_message_pb2.ChatMessage, violations: Violations, slices: _Slices
) -> None:
    await slices.turn()
    if broken := _OF_MESSAGE.violations(message, {}):
        violations.extend(violation.below(message_field, message_field) for violation in broken)
    is_tool = message.role == chat_message_pb2.CHAT_ROLE_TOOL
    if is_tool and not message.tool_call_id:
        violations.add(
            f"{message_field}.tool_call_id", "", "must name the call that a tool's message answers"
        )
    if not message.parts and not message.tool_calls and not message.reasoning and not is_tool:
        violations.add(f"{message_field}.parts", [], "must not be empty in a message without calls")
    if message.tool_calls and message.role != chat_message_pb2.CHAT_ROLE_ASSISTANT:
        violations.add(
            f"{message_field}.tool_calls", len(message.tool_calls), "must be empty but for an assistant"
        )
    for index, part in enumerate(message.parts):
        await slices.turn()
        kind = part.WhichOneof("part")
        if kind is None:
            violations.add(f"{message_field}.parts[{index}]", None, "must be one of text, media")
        if kind == "media":
            raise Unimplemented(
                f"not served yet: {message_field}.parts[{index}].media",
                reason="PARAMETER_NOT_SERVED",
                metadata={"fields": f"{message_field}.parts[{index}].media"},
            )
    for index, call in enumerate(message.tool_calls):
        await slices.turn()
        field = f"{message_field}.tool_calls[{index}]"
        if broken := _OF_CALL.violations(call, {}):
            violations.extend(violation.below(field, field) for violation in broken)
        rule = "must be false: an incomplete call was not made"
        violations.need(not call.incomplete, f"{field}.incomplete", True, rule)
        violations.extend(object_violations(f"{field}.arguments_json", call.arguments_json))


async def _message(message: chat_message_pb2.ChatMessage, slices: _Slices) -> dict[str, object]:
    await slices.turn()
    texts: list[dict[str, str]] = []
    for part in message.parts:
        await slices.turn()
        texts.append({"type": "text", "text": part.text})
    content: object = texts[0]["text"] if len(texts) == 1 else texts
    shown: dict[str, object] = {"role": _ROLES[message.role], "content": content if texts else ""}
    if message.name:
        shown["name"] = message.name
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    calls: list[dict[str, object]] = []
    for call in message.tool_calls:
        await slices.turn()
        calls.append(_call(call))
    if calls:
        shown["tool_calls"] = calls
    return shown


def _call(call: chat_message_pb2.ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments_json or "{}"}
    return {"id": call.id, "type": "function", "function": function}
