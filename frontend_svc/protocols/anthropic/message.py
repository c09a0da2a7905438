"""An answer of Anthropic's Messages API as it grows: its blocks, and the events that clients see of it."""

from __future__ import annotations

import json
from typing import Any

from frontend_svc.protocols.openai.answers import EndedOutput, reason_of, stop_of
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.common.v1 import output_pb2
from triptych_kit.errors import Cancelled

Event = dict[str, Any]

_PING: Event = {"type": "ping"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class GrowingMessage:
    """A message from its start to its end; each step returns the events of it, in order."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._blocks: list[_TextBlock | _CallBlock] = []
        self._open: _TextBlock | _CallBlock | None = None
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage: dict[str, int] = {}

    def start(self, started: generate_pb2.Started) -> list[Event]:
        self._head = {
            "id": f"msg_{started.request_id}",
            "type": "message",
            "role": "assistant",
            "model": started.model,
        }
        self._usage = _usage_of(started.num_prompt_tokens, started.num_cached_tokens, 0)
        return [{"type": "message_start", "message": self.body()}]

    def advance(self, delta: chat_message_pb2.ChatDelta) -> list[Event]:
        events: list[Event] = []
        calls, last = list(delta.tool_calls), self._open
        if calls and isinstance(last, _CallBlock) and last.call_index == calls[0].index:
            # The end of a call comes before the text behind it.
            events += self._add_call(calls.pop(0))
        if delta.reasoning:
            events += self._add_text("thinking", delta.reasoning)
        if delta.content:
            events += self._add_text("text", delta.content)
        for call in calls:
            events += self._add_call(call)
        return events

    def finish(self, output: EndedOutput, usage: output_pb2.Usage) -> list[Event]:
        """The end. Raises what `reason_of` does, and Cancelled for an output that was aborted."""
        calls = [block for block in self._blocks if isinstance(block, _CallBlock)]
        has_calls = len(calls) > 0 and not any(call.is_incomplete for call in calls)
        ended = reason_of(output, has_calls=has_calls)
        if ended not in _STOP_REASONS:
            raise Cancelled("the request was aborted")
        stop = stop_of(output.stop_match)
        is_sequence = ended == "stop" and isinstance(stop, str)
        self._stop = {
            "stop_reason": "stop_sequence" if is_sequence else _STOP_REASONS[ended],
            "stop_sequence": stop if is_sequence else None,
        }
        self._usage = _usage_of(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens)
        last = {"type": "message_delta", "delta": self._stop, "usage": self._usage}
        return [*self._close(), last, {"type": "message_stop"}]

    def body(self) -> dict[str, Any]:
        """The message as it is now."""
        content = [block.shown() for block in self._blocks]
        return {**self._head, "content": content, **self._stop, "usage": self._usage}

    def _add_text(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        block = self._open
        if not isinstance(block, _TextBlock) or block.kind != kind:
            block = _TextBlock(kind)
            events = self._begin(block)
        return [*events, self._delta(block.add(text))]

    def _add_call(self, call: chat_message_pb2.ToolCall) -> list[Event]:
        events: list[Event] = []
        block = self._open
        if not isinstance(block, _CallBlock) or block.call_index != call.index:
            block = _CallBlock(call)
            events = self._begin(block)
        return [*events, self._delta(block.add(call))]

    def _begin(self, block: _TextBlock | _CallBlock) -> list[Event]:
        """The end of the block that was open, and the beginning of the next one."""
        events = self._close()
        self._blocks.append(block)
        self._open = block
        events.append({"type": "content_block_start", **self._at(), "content_block": block.empty()})
        return [*events, _PING] if len(self._blocks) == 1 else events

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", **self._at(), "delta": delta}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        is_incomplete = isinstance(self._open, _CallBlock) and self._open.is_incomplete
        self._open = None
        mark = {"incomplete": True} if is_incomplete else {}
        return [{"type": "content_block_stop", **self._at(), **mark}]

    def _at(self) -> dict[str, int]:
        return {"index": len(self._blocks) - 1}


class _TextBlock:
    """Text of the answer, or the reasoning before it, which nothing here signs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._texts: list[str] = []

    def empty(self) -> dict[str, Any]:
        return self._block("")

    def add(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        return {"type": f"{self.kind}_delta", self.kind: text}

    def shown(self) -> dict[str, Any]:
        return self._block("".join(self._texts))

    def _block(self, text: str) -> dict[str, Any]:
        block: dict[str, Any] = {"type": self.kind, self.kind: text}
        return block | ({"signature": ""} if self.kind == "thinking" else {"citations": None})


class _CallBlock:
    """A call of a tool; its first piece has its id and name. is_incomplete: its arguments are not whole."""

    def __init__(self, call: chat_message_pb2.ToolCall) -> None:
        self.call_index = call.index
        self.is_incomplete = False
        self._head = {"type": "tool_use", "id": call.id, "name": call.name}
        self._arguments: list[str] = []

    def empty(self) -> dict[str, Any]:
        return {**self._head, "input": {}}

    def add(self, call: chat_message_pb2.ToolCall) -> dict[str, Any]:
        """The delta of a piece of the call.

        Arguments that break in their first piece are under the name that Anthropic's API has for these.
        """
        self.is_incomplete = call.incomplete
        text = call.arguments_json
        if call.incomplete and not self._arguments:
            text = json.dumps(_no_input(text))
        self._arguments.append(text)
        return {"type": "input_json_delta", "partial_json": text}

    def shown(self) -> dict[str, Any]:
        """The block of a whole answer, which had the call in one piece."""
        return {**self._head, "input": _input_of("".join(self._arguments))}


def _input_of(arguments: str) -> dict[str, Any]:
    try:
        record = json.loads(arguments or "{}")
    except ValueError:
        record = None
    return record if isinstance(record, dict) else _no_input(arguments)


def _no_input(arguments: str) -> dict[str, Any]:
    return {"INVALID_JSON": arguments}


def _usage_of(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Cached tokens are counted apart from the others of the input."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }
