"""The bodies of Anthropic's Messages API, and their translation into requests. Types alone are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from frontend_svc.protocols.openai.bodies import (
    SAME_SAMPLING,
    Base,
    IgnoredFields,
    SameSampling,
    json_text,
    read_part,
)
from frontend_svc.protocols.openai.field_names import FieldNames
from frontend_svc.protocols.openai.fields import Refusal
from frontend_svc.protocols.openai.requests import set_field
from triptych.api.v1 import chat_message_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented

_CHOICES = {
    "auto": chat_message_pb2.TOOL_CHOICE_MODE_AUTO,
    "any": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED,
    "none": chat_message_pb2.TOOL_CHOICE_MODE_NONE,
}
_ROLES = {
    "system": chat_message_pb2.CHAT_ROLE_SYSTEM,
    "user": chat_message_pb2.CHAT_ROLE_USER,
    "assistant": chat_message_pb2.CHAT_ROLE_ASSISTANT,
}
# Fields of a chat that the body has elsewhere, before the translation adds its own.
_NAMES = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_WHOLES = {
    "template_options.enable_thinking": "thinking",
    "template_options.arguments_json": "output_config.effort",
    "template_options.continue_final_message": "messages",
    "tool_choice.mode": "tool_choice.type",
}


class ToolChoice(Base, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Base, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Base, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Base, kw_only=True):
    format: OutputFormat | None = None
    effort: str | None = None


class MessagesBody(SameSampling, kw_only=True):
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier",
            "speed", "user_profile_id", "workspace_id",
        }
    )  # fmt: skip
    refused: ClassVar[Mapping[str, Refusal]] = {
        "container": Refusal("there is no execution of code"),
        "mcp_servers": Refusal("call the tools of MCP servers in the client"),
        "thread": Refusal("there are no stored threads; send all messages", ({"type": "create"},)),
    }

    messages: list[dict[str, Any]]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class Turn(Base, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CustomTool(Base, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    # About caches, and about tools that others run.
    cache_control: Any = None
    input_examples: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    eager_input_streaming: bool | None = None


class TextBlock(Base, kw_only=True):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None
    parsed_output: Any = None


class ThinkingBlock(Base, kw_only=True):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Base, kw_only=True):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Base, kw_only=True):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(Base, kw_only=True):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: Any = None


_BlockT = TypeVar("_BlockT", bound=Base)
_OF_TEXT: Mapping[str, type[TextBlock]] = {"text": TextBlock}
_OF_USER: Mapping[str, type[TextBlock | ToolResultBlock]] = {**_OF_TEXT, "tool_result": ToolResultBlock}
_OF_ASSISTANT: Mapping[str, type[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]] = {
    **_OF_TEXT,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}


@dataclass(slots=True)
class MessageRequest:
    """A chat, the names of what has no effect on it, and the fields of the body by those of the chat.

    is_eager: arguments of calls are streamed before they are known to be whole.
    """

    ignored: IgnoredFields
    chat: chat_message_pb2.ChatRequest = field(default_factory=chat_message_pb2.ChatRequest)
    names: FieldNames = field(default_factory=lambda: FieldNames(_NAMES, _WHOLES))
    is_eager: bool = False

    def add_message(self, role: chat_message_pb2.ChatRole, at: str) -> chat_message_pb2.ChatMessage:
        self.names.note_whole(f"messages[{len(self.chat.messages)}]", at)
        return self.chat.messages.add(role=role)

    def turn(self, role: chat_message_pb2.ChatRole, at: str) -> chat_message_pb2.ChatMessage:
        """The last message where it has this role, as turns of one role are one; else a new one."""
        messages = self.chat.messages
        return messages[-1] if messages and messages[-1].role == role else self.add_message(role, at)

    def add_tool(self, tool: chat_message_pb2.Tool, at: str) -> None:
        self.names.note(f"tools[{len(self.chat.tools)}]", at)
        self.names.note(f"tools[{len(self.chat.tools)}].parameters_json_schema", f"{at}.input_schema")
        self.chat.tools.append(tool)


def message_request(
    body: MessagesBody, ignored: IgnoredFields, *, reasons: Callable[[], bool]
) -> MessageRequest:
    """The chat of a body. `reasons`: whether the model's reasoning is read apart from its answer."""
    made = MessageRequest(ignored)
    made.chat.model = body.model
    sampling = made.chat.sampling
    for name in SAME_SAMPLING:
        set_field(sampling, name, getattr(body, name))
    set_field(sampling, "max_tokens", body.max_tokens)
    set_field(sampling, "stop", body.stop_sequences, "stop_sequences", made.names)
    if body.system is not None:
        message = made.add_message(chat_message_pb2.CHAT_ROLE_SYSTEM, "system")
        _add_texts(made, message, body.system, "system")
    for index, raw in enumerate(body.messages):
        _add_turn(made, raw, f"messages[{index}]")
    final = made.chat.messages[-1] if made.chat.messages else None
    is_begun = final is not None and final.role == chat_message_pb2.CHAT_ROLE_ASSISTANT
    if final is not None and is_begun and final.parts and not final.tool_calls:
        made.chat.template_options.continue_final_message = True
    _fill_tools(made, body)
    _fill_thinking(made, body, reasons)
    _fill_output(made, body)
    return made


def _add_turn(made: MessageRequest, raw: Mapping[str, Any], at: str) -> None:
    turn = read_part(_set_fields(raw), Turn, made.ignored, at)
    role = _ROLES[turn.role]
    if isinstance(turn.content, str):
        made.turn(role, at).parts.add(text=turn.content)
        return
    for index, raw_block in enumerate(turn.content):
        block_at = f"{at}.content[{index}]"
        if turn.role == "assistant":
            _add_to_assistant(made, _block(raw_block, _OF_ASSISTANT, made.ignored, block_at), block_at)
            continue
        block = _block(raw_block, _OF_USER if turn.role == "user" else _OF_TEXT, made.ignored, block_at)
        if isinstance(block, TextBlock):
            made.turn(role, block_at).parts.add(text=block.text)
            continue
        result = made.add_message(chat_message_pb2.CHAT_ROLE_TOOL, block_at)
        result.tool_call_id = block.tool_use_id
        _add_texts(made, result, block.content or "", f"{block_at}.content")
        if block.is_error:
            made.ignored.append(f"{block_at}.is_error")


def _add_to_assistant(
    made: MessageRequest, block: TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, at: str
) -> None:
    if isinstance(block, RedactedThinkingBlock):
        made.ignored.append(at)
        return
    message = made.turn(chat_message_pb2.CHAT_ROLE_ASSISTANT, at)
    if isinstance(block, TextBlock):
        message.parts.add(text=block.text)
    elif isinstance(block, ThinkingBlock):
        message.reasoning += block.thinking
    else:
        message.tool_calls.add(
            index=len(message.tool_calls),
            id=block.id,
            name=block.name,
            arguments_json=json.dumps(block.input),
        )


def _add_texts(
    made: MessageRequest,
    message: chat_message_pb2.ChatMessage,
    content: str | Sequence[Mapping[str, Any]],
    at: str,
) -> None:
    if isinstance(content, str):
        message.parts.add(text=content)
        return
    for index, raw in enumerate(content):
        message.parts.add(text=_block(raw, _OF_TEXT, made.ignored, f"{at}[{index}]").text)


def _fill_tools(made: MessageRequest, body: MessagesBody) -> None:
    choice = body.tool_choice
    for index, raw in enumerate(body.tools or ()):
        at = f"tools[{index}]"
        kind = raw.get("type", "custom")
        if kind == "custom":
            tool = read_part(_set_fields(raw), CustomTool, made.ignored, at)
            made.is_eager = made.is_eager or bool(tool.eager_input_streaming)
            made.add_tool(_tool_of(tool), at)
        elif choice is not None and choice.name is not None and raw.get("name") == choice.name:
            raise _not_served(f"{at}.type", kind, "custom")
        else:
            made.ignored.append(at)
    if choice is None:
        return
    if choice.type == "tool":
        made.chat.tool_choice.name = choice.name or ""
    else:
        made.chat.tool_choice.mode = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        made.chat.parallel_tool_calls = False


def _tool_of(tool: CustomTool) -> chat_message_pb2.Tool:
    return chat_message_pb2.Tool(
        name=tool.name,
        description=tool.description or "",
        parameters_json_schema=json_text(tool.input_schema),
        strict=bool(tool.strict),
    )


def _fill_thinking(made: MessageRequest, body: MessagesBody, reasons: Callable[[], bool]) -> None:
    thinking = body.thinking
    if thinking is None:
        return
    made.chat.template_options.enable_thinking = thinking.type != "disabled"
    if thinking.type == "disabled" or thinking.budget_tokens is None:
        return
    if reasons():
        name = "thinking_token_budget"
        set_field(made.chat.sampling, name, thinking.budget_tokens, "thinking.budget_tokens", made.names)
    else:
        made.ignored.append("thinking.budget_tokens")


def _fill_output(made: MessageRequest, body: MessagesBody) -> None:
    config = body.output_config or OutputConfig()
    chosen = config.format or body.output_format
    if chosen is not None:
        made.chat.sampling.structured_output.json_schema = json_text(chosen.schema)
        at = "output_format" if config.format is None else "output_config.format"
        made.names.note_whole("sampling.structured_output", f"{at}.schema")
    if config.effort is not None:
        made.chat.template_options.arguments_json = json.dumps({"reasoning_effort": config.effort})


def _block(
    raw: Mapping[str, Any], kinds: Mapping[str, type[_BlockT]], ignored: IgnoredFields, at: str
) -> _BlockT:
    kind = raw.get("type")
    if not isinstance(kind, str):
        raise InvalidArgument(f"{at}.type is missing or no text", field=f"{at}.type")
    if kind not in kinds:
        raise _not_served(f"{at}.type", kind, ", ".join(kinds))
    return read_part(_set_fields(raw), kinds[kind], ignored, at)


def _not_served(at: str, kind: object, served: str) -> Unimplemented:
    return Unimplemented(
        f"{at} is {kind!r:.60}, which is not served here; served: {served}", metadata={"field": at}
    )


def _set_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    # Clients send back blocks of an answer with every field that these can have.
    return {name: value for name, value in raw.items() if value is not None}
