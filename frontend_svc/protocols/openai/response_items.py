"""The items of OpenAI's Responses API, and the messages of a chat that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from frontend_svc.protocols.openai.bodies import (
    Base,
    CalledFunction,
    CalledTool,
    IgnoredFields,
    Message,
    Part,
    read_part,
    text_of,
)
from frontend_svc.protocols.openai.fields import IGNORED_IN_MESSAGES
from triptych_kit.errors import InvalidArgument, Unimplemented

_TEXTS = ("input_text", "output_text", "refusal", "summary_text", "reasoning_text")

Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class ReasoningItem(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class CallItem(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = None


class CallOutputItem(Base, kw_only=True):
    ignored: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None


_KINDS: dict[str, type[MessageItem] | type[ReasoningItem] | type[CallItem] | type[CallOutputItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
}


@dataclass(frozen=True, slots=True)
class ItemMessage:
    """A message, and the field of the body with its first item."""

    message: Message
    field: str


def messages_of(
    items: str | Sequence[dict[str, Any]], ignored: IgnoredFields, field: str = "input"
) -> list[ItemMessage]:
    """The messages of an input, or of an output that becomes one.

    Reasoning, text and calls that follow each other are one message of the assistant. A call that was not
    completed is left out: its arguments cannot be read. Names of fields without an effect are added to
    `ignored`.
    """
    if isinstance(items, str):
        return [ItemMessage(Message("user", items), field)]
    messages: list[ItemMessage] = []
    for index, raw in enumerate(items):
        add_item(messages, raw, ignored, f"{field}[{index}]")
    return messages


def add_item(messages: list[ItemMessage], raw: Mapping[str, Any], ignored: IgnoredFields, at: str) -> None:
    """Add an item to the messages before it; `at` is its field of the body."""
    item = _item(raw, ignored, at)
    if isinstance(item, CallOutputItem):
        content = _text_parts(item.output, f"{at}.output")
        messages.append(ItemMessage(Message("tool", content, tool_call_id=item.call_id), at))
    elif isinstance(item, MessageItem) and item.role != "assistant":
        messages.append(ItemMessage(Message(item.role, _text_parts(item.content, f"{at}.content")), at))
    else:
        _add_to_assistant(messages, item, at)


def items_of(messages: Sequence[Message], id_of: Callable[[str, int], str]) -> list[dict[str, Any]]:
    """The items that messages of a chat were made of. id_of: the id of one by its prefix and its index."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, kind: str, **fields: Any) -> None:
        items.append({"id": id_of(prefix, len(items)), "type": kind, "status": "completed", **fields})

    for message in messages:
        if message.role == "tool":
            add(
                "fco",
                "function_call_output",
                call_id=message.tool_call_id,
                output="".join(_texts_of(message)),
            )
            continue
        if message.reasoning_content:
            parts = [{"type": "reasoning_text", "text": message.reasoning_content}]
            add("rs", "reasoning", summary=[], content=parts)
        if message.content is not None:
            add("msg", "message", role=message.role, content=_content_of(message))
        for call in message.tool_calls or ():
            function = call.function
            add("fc", "function_call", call_id=call.id, name=function.name, arguments=function.arguments)
    return items


def _content_of(message: Message) -> list[dict[str, Any]]:
    of_output: dict[str, Any] = {"annotations": [], "logprobs": []} if message.role == "assistant" else {}
    kind = "output_text" if of_output else "input_text"
    return [{"type": kind, "text": text, **of_output} for text in _texts_of(message)]


def _texts_of(message: Message) -> list[str]:
    content = message.content or ""
    return [content] if isinstance(content, str) else [part.text or "" for part in content]


def _add_to_assistant(
    messages: list[ItemMessage], item: MessageItem | ReasoningItem | CallItem, at: str
) -> None:
    last = messages[-1].message if messages and messages[-1].message.role == "assistant" else None
    if isinstance(item, CallItem):
        if item.status == "incomplete":
            return
        last = last or _new_assistant(messages, at)
        called = CalledTool(CalledFunction(item.name, item.arguments), item.call_id)
        last.tool_calls = [*(last.tool_calls or ()), called]
    elif isinstance(item, ReasoningItem):
        parts = _text_parts(item.content or item.summary or (), f"{at}.content")
        # Reasoning comes before what it leads to.
        if last is None or last.content is not None or last.tool_calls:
            last = _new_assistant(messages, at)
        last.reasoning_content = (last.reasoning_content or "") + "".join(part.text or "" for part in parts)
    else:
        if last is None or last.content is not None or last.tool_calls:
            last = _new_assistant(messages, at)
        last.content = _text_parts(item.content, f"{at}.content")


def _new_assistant(messages: list[ItemMessage], at: str) -> Message:
    messages.append(ItemMessage(Message("assistant"), at))
    return messages[-1].message


def _item(
    raw: Mapping[str, Any], ignored: IgnoredFields, at: str
) -> MessageItem | ReasoningItem | CallItem | CallOutputItem:
    kind = raw.get("type", "message")
    if not isinstance(kind, str):
        raise InvalidArgument(f"{at}.type is no text", field=f"{at}.type")
    if kind not in _KINDS:
        served = ", ".join(_KINDS)
        raise Unimplemented(
            f"{at}.type is {kind!r:.60}, which is not served; served are {served}",
            metadata={"field": f"{at}.type"},
        )
    # Clients send back items of an answer with every field that these can have.
    return read_part(
        {name: value for name, value in raw.items() if value is not None}, _KINDS[kind], ignored, at
    )


def _text_parts(content: str | Sequence[Part], at: str) -> list[Part]:
    """Parts of a chat's message."""
    if isinstance(content, str):
        return [Part("text", content)]
    texts = [text_of(part, f"{at}[{index}]", _TEXTS) for index, part in enumerate(content)]
    return [Part("text", text) for text in texts]
