"""Prompts, conversations and tools that `LLM` accepts, and their conversion to protos.

All inputs are checked before any is sent; errors name the input by its index.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from triptych.api.v1 import chat_message_pb2, embedding_pb2, generate_pb2
from triptych_kit.errors import InvalidArgument

# A text, its token ids, or {"prompt_token_ids": [...]}, or {"prompt": "..."}.
Prompt = str | Sequence[int] | Mapping[str, Any]
# {"role": ..., "content": ...} and, of an assistant or a tool, "reasoning", "tool_calls", "tool_call_id".
Message = Mapping[str, Any]

_T = TypeVar("_T")

_ROLES = {
    "system": chat_message_pb2.CHAT_ROLE_SYSTEM,
    "developer": chat_message_pb2.CHAT_ROLE_DEVELOPER,
    "user": chat_message_pb2.CHAT_ROLE_USER,
    "assistant": chat_message_pb2.CHAT_ROLE_ASSISTANT,
    "tool": chat_message_pb2.CHAT_ROLE_TOOL,
}
_MODES = {
    "none": chat_message_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": chat_message_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": chat_message_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_MESSAGE_KEYS = {"role", "content", "name", "reasoning", "tool_calls", "tool_call_id"}


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt as it was given: a text, or token ids."""

    text: str | None
    token_ids: tuple[int, ...] = ()


def read_prompts(prompts: Prompt | Sequence[Prompt], field: str = "prompts") -> list[GivenPrompt]:
    """Read one prompt or several. Raises InvalidArgument for the first invalid one."""
    if isinstance(prompts, (str, Mapping)):
        return [_read_prompt(prompts, f"{field}[0]")]
    if not isinstance(prompts, Sequence):
        raise _wrong(field, prompts, "a text, a list of token ids, a dictionary, or a list of those")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [_read_prompt(prompts, f"{field}[0]")]
    return [_read_prompt(prompt, f"{field}[{index}]") for index, prompt in enumerate(prompts)]


def check_ids(token_ids: Sequence[int], field: str, *, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidArgument for a prompt that the model would refuse."""
    if not token_ids:
        raise InvalidArgument(f"{field} has no tokens, it needs at least 1", field=field)
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise InvalidArgument(
            f"{field} has the token id {outside[0]}, must be in 0..{vocab_size - 1}", field=field
        )
    if len(token_ids) >= max_model_len:
        raise InvalidArgument(
            f"{field} has {len(token_ids)} tokens, the model takes {max_model_len - 1}", field=field
        )


def pooling_input(prompt: GivenPrompt) -> embedding_pb2.PoolingInput:
    if prompt.text is not None:
        return embedding_pb2.PoolingInput(prompt=prompt.text)
    return embedding_pb2.PoolingInput(token_ids=generate_pb2.TokenIds(ids=prompt.token_ids))


def per_prompt(value: _T | Sequence[_T | None] | None, num_prompts: int, default: _T, field: str) -> list[_T]:
    """`value` for each prompt: one for all, or a list with one each."""
    if value is None:
        return [default] * num_prompts
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidArgument(f"{field} has {len(value)} entries for {num_prompts} prompts", field=field)
    return [default if one is None else one for one in value]


def read_conversations(
    conversations: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[chat_message_pb2.ChatMessage]]:
    """Read one conversation or several."""
    if not isinstance(conversations, Sequence) or isinstance(conversations, str):
        raise _wrong("conversations", conversations, "a list of messages, or a list of such lists")
    if conversations and isinstance(conversations[0], Mapping):
        return [_read_conversation(conversations, "conversations[0]")]
    return [
        _read_conversation(conversation, f"conversations[{index}]")
        for index, conversation in enumerate(conversations)
    ]


def read_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[chat_message_pb2.Tool]:
    """Functions as {"type": "function", "function": {...}}, or the inner dictionary alone."""
    return [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def read_tool_choice(choice: str | Mapping[str, Any] | None) -> chat_message_pb2.ToolChoice | None:
    """ "none", "auto", "required", or the function that must be called."""
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in _MODES:
            raise _wrong("tool_choice", choice, f"one of {', '.join(_MODES)}, or a function")
        return chat_message_pb2.ToolChoice(mode=_MODES[choice])
    function = choice.get("function", choice)
    return chat_message_pb2.ToolChoice(name=_text(function.get("name"), "tool_choice.name"))


def _read_prompt(prompt: object, field: str) -> GivenPrompt:
    if isinstance(prompt, Mapping):
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
        if unknown or len(prompt) != 1:
            raise _wrong(field, dict(prompt), "a dictionary with prompt or prompt_token_ids alone")
        prompt = next(iter(prompt.values()))
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidArgument(f"{field} is empty", field=field)
        return GivenPrompt(prompt)
    if not isinstance(prompt, Sequence) or not all(
        isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in prompt
    ):
        raise _wrong(field, prompt, "a text or a list of token ids")
    return GivenPrompt(None, tuple(prompt))


def _read_conversation(conversation: object, field: str) -> list[chat_message_pb2.ChatMessage]:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise _wrong(field, conversation, "a list of at least one message")
    return [_read_message(message, f"{field}[{index}]") for index, message in enumerate(conversation)]


def _read_message(message: object, field: str) -> chat_message_pb2.ChatMessage:
    if isinstance(message, chat_message_pb2.ChatMessage):
        return message
    if not isinstance(message, Mapping):
        raise _wrong(field, message, "a dictionary with role and content")
    unknown = sorted(set(message) - _MESSAGE_KEYS)
    if unknown:
        raise InvalidArgument(f"{field} has the key {unknown[0]!r}, which is not known", field=field)
    role = message.get("role")
    if role not in _ROLES:
        raise _wrong(f"{field}.role", role, f"one of {', '.join(_ROLES)}")
    return chat_message_pb2.ChatMessage(
        role=_ROLES[role],
        parts=_read_parts(message.get("content"), f"{field}.content"),
        name=_text(message.get("name") or "", f"{field}.name"),
        reasoning=_text(message.get("reasoning") or "", f"{field}.reasoning"),
        tool_calls=[
            _read_tool_call(call, index, f"{field}.tool_calls[{index}]")
            for index, call in enumerate(message.get("tool_calls") or ())
        ],
        tool_call_id=_text(message.get("tool_call_id") or "", f"{field}.tool_call_id"),
    )


def _read_parts(content: object, field: str) -> list[chat_message_pb2.ChatPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [chat_message_pb2.ChatPart(text=content)]
    if not isinstance(content, Sequence):
        raise _wrong(field, content, "a text or a list of parts")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type", "text") != "text":
            raise _wrong(f"{field}[{index}]", part, 'a part {"type": "text", "text": ...}')
        parts.append(chat_message_pb2.ChatPart(text=_text(part.get("text"), f"{field}[{index}].text")))
    return parts


def _read_tool_call(call: object, index: int, field: str) -> chat_message_pb2.ToolCall:
    if not isinstance(call, Mapping):
        raise _wrong(field, call, "a dictionary with name and arguments")
    function = call.get("function", call)
    arguments = function.get("arguments", "{}")
    return chat_message_pb2.ToolCall(
        index=index,
        id=_text(call.get("id") or "", f"{field}.id"),
        name=_text(function.get("name"), f"{field}.name"),
        arguments_json=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def _read_tool(tool: object, field: str) -> chat_message_pb2.Tool:
    if isinstance(tool, chat_message_pb2.Tool):
        return tool
    if not isinstance(tool, Mapping):
        raise _wrong(field, tool, "a dictionary with name, description and parameters")
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    return chat_message_pb2.Tool(
        name=_text(function.get("name"), f"{field}.name"),
        description=_text(function.get("description") or "", f"{field}.description"),
        parameters_json_schema="" if parameters is None else json.dumps(parameters),
        strict=bool(function.get("strict", False)),
    )


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(field, value, "a text")
    return value


def _wrong(field: str, value: object, expected: str) -> InvalidArgument:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:60] + "..."
    return InvalidArgument(f"{field} is {shown}, must be {expected}", field=field)
