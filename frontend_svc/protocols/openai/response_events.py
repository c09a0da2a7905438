"""An answer of OpenAI's Responses API as it grows: its items, and the events that clients see of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from enum import Enum
from typing import Any

from frontend_svc.protocols.openai.answers import EndedOutput, prompt_of, reason_of
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.common.v1 import output_pb2
from triptych_kit.errors import InvalidArgument, InvalidTransition, ResourceExhausted, ServiceError

Event = dict[str, Any]


class ResponseStatus(Enum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    CANCELLED = "cancelled"
    FAILED = "failed"


_ENDS = {
    "stop": ResponseStatus.COMPLETED,
    "length": ResponseStatus.INCOMPLETE,
    "abort": ResponseStatus.CANCELLED,
}
_FINAL = frozenset({*_ENDS.values(), ResponseStatus.FAILED})
_TRANSITIONS: dict[ResponseStatus, frozenset[ResponseStatus]] = {
    ResponseStatus.IN_PROGRESS: _FINAL,
    **dict.fromkeys(_FINAL, frozenset[ResponseStatus]()),
}
# OpenAI has no event for one that was cancelled; its status says so.
_END_EVENTS = {
    ResponseStatus.COMPLETED: "response.completed",
    ResponseStatus.INCOMPLETE: "response.incomplete",
    ResponseStatus.CANCELLED: "response.incomplete",
    ResponseStatus.FAILED: "response.failed",
}
_ERROR_CODES: dict[type[ServiceError], str] = {
    ResourceExhausted: "rate_limit_exceeded",
    InvalidArgument: "invalid_prompt",
}
LAST_EVENTS = frozenset(_END_EVENTS.values())


class GrowingResponse:
    """A response from its start to its end; each step returns the events of it, in order.

    echo: what the body of a response repeats of its request.
    """

    def __init__(self, response_id: str, echo: Mapping[str, Any], *, with_ids: bool) -> None:
        self.id = response_id
        self.status = ResponseStatus.IN_PROGRESS
        self._echo = echo
        self._model = str(echo["model"])
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._items: list[_TextItem | _CallItem] = []
        self._open: _TextItem | _CallItem | None = None
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, str] | None = None
        self._incomplete_reason: str | None = None
        self._token_ids: list[int] | None = [] if with_ids else None
        self._of_prompt: dict[str, Any] = {}
        self._num_events = 0

    def start(self, started: generate_pb2.Started) -> list[Event]:
        self._model, self._of_prompt = started.model, prompt_of(started)
        body = self.body()
        return [self._event(name, response=body) for name in ("response.created", "response.in_progress")]

    def advance(self, delta: chat_message_pb2.ChatDelta) -> list[Event]:
        events: list[Event] = []
        if self._token_ids is not None:
            self._token_ids += delta.token_ids
        calls, last = list(delta.tool_calls), self._open
        if calls and isinstance(last, _CallItem) and last.call_index == calls[0].index:
            # The end of a call comes before the text behind it.
            events += self._add_call(calls.pop(0))
        if delta.reasoning:
            events += self._add_text("reasoning", delta.reasoning)
        if delta.content:
            events += self._add_text("message", delta.content)
        for call in calls:
            events += self._add_call(call)
        return events

    def finish(self, output: EndedOutput, usage: output_pb2.Usage) -> list[Event]:
        """The end of the output. Raises what `reason_of` does."""
        ended = status = _ENDS[reason_of(output)]
        if status is ResponseStatus.INCOMPLETE:
            self._incomplete_reason = "max_output_tokens"
        elif status is ResponseStatus.COMPLETED and any(item.is_broken for item in self._items):
            status, self._incomplete_reason = ResponseStatus.INCOMPLETE, "incomplete_call"
        self._usage = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            # Reasoning is not counted apart from the rest.
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }
        is_whole = ended is ResponseStatus.COMPLETED
        return [*self._close("completed" if is_whole else "incomplete"), self._end(status)]

    def fail(self, error: ServiceError) -> list[Event]:
        """The end by an error after the start."""
        codes = [code for kind, code in _ERROR_CODES.items() if isinstance(error, kind)]
        self._error = {"code": codes[0] if codes else "server_error", "message": error.message}
        return [*self._close("incomplete"), self._end(ResponseStatus.FAILED)]

    def cancel(self) -> list[Event]:
        """The end of one that was not begun."""
        return [self._end(ResponseStatus.CANCELLED)]

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        reason = self._incomplete_reason
        shown = {
            **self._echo,
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status.value,
            "model": self._model,
            "error": self._error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": [item.shown() for item in self._items],
            "usage": self._usage,
            **self._of_prompt,
        }
        return shown if self._token_ids is None else shown | {"token_ids": list(self._token_ids)}

    def _add_text(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        item = self._open
        if not isinstance(item, _TextItem) or item.kind != kind:
            item = _TextItem(kind, len(self._items))
            events += self._begin(item)
        return [*events, *self._events(item.add(text))]

    def _add_call(self, call: chat_message_pb2.ToolCall) -> list[Event]:
        events: list[Event] = []
        item = self._open
        if not isinstance(item, _CallItem) or item.call_index != call.index:
            item = _CallItem(call, len(self._items))
            events += self._begin(item)
        if call.arguments_json:
            events += self._events(item.add(call.arguments_json))
        if not call.incomplete:
            return events
        item.is_broken = True
        return events + self._close("incomplete")

    def _begin(self, item: _TextItem | _CallItem) -> list[Event]:
        """The end of the item that was open, and the beginning of the next one."""
        events = self._close("completed")
        self._items.append(item)
        self._open = item
        return events + self._events(item.begin())

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        return self._events(item.end(status))

    def _end(self, status: ResponseStatus) -> Event:
        self._move_to(status)
        if status is ResponseStatus.COMPLETED:
            self._completed_at = int(time.time())
        return self._event(_END_EVENTS[status], response=self.body())

    def _move_to(self, status: ResponseStatus) -> None:
        if status not in _TRANSITIONS[self.status]:
            raise InvalidTransition(f"response {self.id}: {self.status} to {status}")
        self.status = status

    def _events(self, named: list[tuple[str, Event]]) -> list[Event]:
        return [self._event(name, **fields) for name, fields in named]

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}


class _TextItem:
    """A message or reasoning, which has one part."""

    is_broken = False

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        is_message = kind == "message"
        self._id = f"{'msg' if is_message else 'rs'}_{secrets.token_hex(16)}"
        self._part_kind = "output_text" if is_message else "reasoning_text"
        self._at: Event = {"item_id": self._id, "output_index": index}
        self._texts: list[str] = []
        self._status = "in_progress"

    def begin(self) -> list[tuple[str, Event]]:
        return [
            ("response.output_item.added", {"output_index": self._at["output_index"], "item": self.shown()}),
            ("response.content_part.added", {**self._in_part(), "part": self._part("")}),
        ]

    def add(self, text: str) -> list[tuple[str, Event]]:
        self._texts.append(text)
        return [(f"response.{self._part_kind}.delta", {**self._in_part(), "delta": text, **self._logprobs()})]

    def end(self, status: str) -> list[tuple[str, Event]]:
        self._status = status
        text = "".join(self._texts)
        return [
            (f"response.{self._part_kind}.done", {**self._in_part(), "text": text, **self._logprobs()}),
            ("response.content_part.done", {**self._in_part(), "part": self._part(text)}),
            ("response.output_item.done", {"output_index": self._at["output_index"], "item": self.shown()}),
        ]

    def shown(self) -> dict[str, Any]:
        content = [self._part("".join(self._texts))] if self._texts else []
        shown: dict[str, Any] = {
            "id": self._id,
            "type": self.kind,
            "status": self._status,
            "content": content,
        }
        if self.kind == "message":
            return shown | {"role": "assistant"}
        # Models here do not summarize their reasoning.
        return {**shown, "summary": []}

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._part_kind, "text": text}
        return part | ({"annotations": [], "logprobs": []} if self.kind == "message" else {})

    def _in_part(self) -> Event:
        return {**self._at, "content_index": 0}

    def _logprobs(self) -> Event:
        return {"logprobs": []} if self.kind == "message" else {}


class _CallItem:
    """A call of a function; its first piece has its id and name. is_broken: its arguments are not whole."""

    def __init__(self, call: chat_message_pb2.ToolCall, index: int) -> None:
        self.call_index = call.index
        self.is_broken = False
        self._id = f"fc_{secrets.token_hex(16)}"
        self._call_id, self._name = call.id, call.name
        self._at: Event = {"item_id": self._id, "output_index": index}
        self._arguments: list[str] = []
        self._status = "in_progress"

    def begin(self) -> list[tuple[str, Event]]:
        return [
            ("response.output_item.added", {"output_index": self._at["output_index"], "item": self.shown()})
        ]

    def add(self, text: str) -> list[tuple[str, Event]]:
        self._arguments.append(text)
        return [("response.function_call_arguments.delta", {**self._at, "delta": text})]

    def end(self, status: str) -> list[tuple[str, Event]]:
        self._status = status
        item_done = {"output_index": self._at["output_index"], "item": self.shown()}
        if self.is_broken:
            # Clients run calls whose arguments are done.
            return [("response.output_item.done", item_done)]
        done = {**self._at, "name": self._name, "arguments": "".join(self._arguments)}
        return [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", item_done),
        ]

    def shown(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }
