"""Converts a conversation's messages to the form that a chat template expects. Knows no Jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from frontend_svc.text.chat.template_facts import TemplateFacts
from frontend_svc.text.tokenize.text_files import TextRefused

# Templates of different families read a message's reasoning under different names.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def shape_messages(messages: object, facts: TemplateFacts) -> list[dict[str, object]]:
    """Copies of `messages` in the form that the template with `facts` expects. Raises TextRefused.

    Members that are None are left out. Content of text parts becomes one string, joined by line breaks,
    unless the template loops over parts. A tool call's arguments become an object or JSON text. A developer's
    message is a system message where the template does not name that role: the model does not know it.
    """
    if not isinstance(messages, list) or not messages:
        raise TextRefused("the conversation has no message, it must have at least 1")
    return [_shaped(message, index, facts) for index, message in enumerate(messages)]


def _shaped(message: object, index: int, facts: TemplateFacts) -> dict[str, object]:
    if not isinstance(message, dict):
        raise TextRefused(f"message {index} is not an object")
    shaped = {name: value for name, value in message.items() if value is not None}
    if shaped.get("role") == "developer" and not facts.names_developer:
        shaped["role"] = "system"
    reasoning = next((shaped[name] for name in _REASONING_NAMES if name in shaped), None)
    if reasoning is not None:
        shaped = {"thinking": reasoning, **shaped, "reasoning_content": reasoning}
    if "content" in shaped:
        shaped["content"] = _shaped_content(shaped["content"], index, facts)
    calls = shaped.get("tool_calls")
    if isinstance(calls, list):
        shaped["tool_calls"] = [_shaped_call(call, index, facts) for call in calls]
    return shaped


def _shaped_content(content: object, index: int, facts: TemplateFacts) -> object:
    if isinstance(content, str):
        needs_parts = facts.loops_over_content and not facts.checks_for_string
        return [{"type": "text", "text": content}] if needs_parts else content
    if not isinstance(content, list):
        raise TextRefused(f"the content of message {index} is neither a text nor a list of parts")
    texts = _texts(content)
    if texts is None:
        if not facts.loops_over_content:
            raise TextRefused(f"message {index} has more than text, which the chat template does not take")
        return content
    # One text part is equivalent to a string: which of them is sent depends on the client's library.
    if len(texts) <= 1:
        return _shaped_content("".join(texts), index, facts)
    return content if facts.loops_over_content else "\n".join(texts)


def _texts(parts: Sequence[object]) -> list[str] | None:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def _shaped_call(call: object, index: int, facts: TemplateFacts) -> object:
    if not isinstance(call, dict):
        raise TextRefused(f"a tool call of message {index} is not an object")
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _with_shaped_arguments(function, index, facts)}
    return _with_shaped_arguments(call, index, facts)


def _with_shaped_arguments(
    function: Mapping[str, object], index: int, facts: TemplateFacts
) -> dict[str, object]:
    arguments = function.get("arguments")
    if facts.takes_argument_text and isinstance(arguments, dict | list):
        return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if facts.takes_argument_text or not isinstance(arguments, str):
        return dict(function)
    try:
        # The text of a call without arguments may be empty.
        return {**function, "arguments": json.loads(arguments or "{}")}
    except (ValueError, RecursionError) as error:
        raise TextRefused(f"the arguments of a tool call of message {index} are not JSON") from error
