"""Finds the messages that a chat template leaves out, and other forms in which it may show them.

Many templates show a system message in the first position alone, or know fewer roles than the API; what they
leave out, the model would not see. Knows no Jinja.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, object]

# From this length on, a text that is in the prompt is not there by chance.
_UNIQUE_CHARS = 32
_MARK = "mark5b1c0e77of"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as a template gets them. origins: of each, the index of the client's message."""

    messages: list[Message]
    origins: list[int]


def missing_messages(
    messages: Sequence[Message], prompt: str, render: Callable[[list[Message]], str]
) -> list[int]:
    """The indexes of messages of which `prompt`, rendered from them, lacks a text.

    render: renders other messages; empty if the template refuses them.
    """
    if _has_all(messages, prompt):
        return []
    # Templates change texts, so whether one is shown is asked with a text that survives that.
    marked = render([_marked(message, index) for index, message in enumerate(messages)])
    if not marked:
        return []
    return [
        index
        for index, message in enumerate(messages)
        if any(
            text.strip() and _mark(index, number) not in marked for number, text in enumerate(_texts(message))
        )
    ]


def in_other_form(conversation: Conversation, missing: Sequence[int]) -> Conversation | None:
    """A conversation of the same texts that a template may show; None if there is none.

    System messages at the beginning become one. The text of an assistant beside calls becomes a message of
    its own.
    """
    num_system = next(
        (index for index, message in enumerate(conversation.messages) if message.get("role") != "system"),
        len(conversation.messages),
    )
    merges = num_system > 1 and any(index < num_system for index in missing)
    messages: list[Message] = []
    origins: list[int] = []
    for index, (message, origin) in enumerate(zip(conversation.messages, conversation.origins, strict=True)):
        if merges and 0 < index < num_system:
            messages[0] = {**messages[0], "content": _joined(messages[0], message)}
            continue
        if index in missing and message.get("tool_calls"):
            text = {name: value for name, value in message.items() if name != "tool_calls"}
            messages.append(text)
            origins.append(origin)
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        messages.append(message)
        origins.append(origin)
    if not merges and len(messages) == len(conversation.messages):
        return None
    return Conversation(messages, origins)


def _has_all(messages: Sequence[Message], prompt: str) -> bool:
    """Whether the prompt surely has all texts: each is long, and they are there in order."""
    at = 0
    for text in (text.strip() for message in messages for text in _texts(message)):
        if not text:
            continue
        at = prompt.find(text, at) if len(text) >= _UNIQUE_CHARS else -1
        if at < 0:
            return False
        at += len(text)
    return True


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text: Any = part.get("text") if isinstance(part, dict) else part
        yield text if isinstance(text, str) else ""


def _marked(message: Message, index: int) -> Message:
    """The message with a text of its own for each of its texts; white space stays what it is."""
    content = message.get("content")
    marks = [_mark(index, number) if text.strip() else text for number, text in enumerate(_texts(message))]
    if isinstance(content, str):
        return {**message, "content": marks[0]}
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "text": mark} if isinstance(part, dict) and "text" in part else part
        for part, mark in zip(content, marks, strict=True)
    ]
    return {**message, "content": parts}


def _mark(index: int, number: int) -> str:
    return f"{_MARK}{index}part{number}end"


def _joined(first: Message, second: Message) -> object:
    contents = first.get("content") or "", second.get("content") or ""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(str(content) for content in contents if content)
    parts: list[object] = []
    for content in contents:
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return parts
