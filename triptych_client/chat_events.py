"""Results of conversations as plain data: events, or complete answers. Knows no channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.api.v1 import chat_message_pb2, chat_pb2
from triptych_client.chat_request import ChatMessage
from triptych_client.events import (
    Finished,
    Logprobs,
    Started,
    Usage,
    read_finished,
    read_started,
    read_usage,
    reason_of,
    stop_match_of,
)
from triptych_client.logprobs import read_logprobs


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A tool call, or a piece of one; then only the first piece has `id` and `name`.

    `index` orders the calls of one answer, and `arguments_json` is JSON text once all pieces are joined,
    unless the last of them is `incomplete`: such a call broke, and must not be run.
    """

    index: int
    id: str
    name: str
    arguments_json: str
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """New output of one answer: content, reasoning, pieces of tool calls."""

    output_index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCallPiece, ...]
    token_ids: tuple[int, ...]
    logprobs: Logprobs


ChatEvent = Started | ChatDelta | Finished


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """One complete answer. The fields are those of ChatDelta and Finished."""

    output_index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCallPiece, ...]
    token_ids: tuple[int, ...]
    logprobs: Logprobs
    reason: str
    stop_match: int | str | None
    cumulative_logprob: float | None
    error_message: str = ""
    is_incomplete: bool = False  # of a constraint
    error_fields: tuple[str, ...] = ()

    def as_message(self) -> ChatMessage:
        """The message to append to the conversation."""
        return assistant_message(self.text, self.reasoning, self.tool_calls)


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The complete response to one conversation."""

    started: Started
    outputs: tuple[ChatOutput, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.outputs[0].text


def assistant_message(text: str, reasoning: str, tool_calls: Sequence[ToolCallPiece]) -> ChatMessage:
    """An assistant's message."""
    message = ChatMessage(role="assistant")
    if text:
        message["content"] = text
    if reasoning:
        message["reasoning"] = reasoning
    if tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments_json": call.arguments_json}
            for call in tool_calls
            if not call.incomplete
        ]
    return message


def to_chat_event(response: chat_message_pb2.ChatResponse) -> ChatEvent | None:
    """The event of one message of a stream; None for a kind of a newer API."""
    match response.WhichOneof("event"):
        case "started":
            return read_started(response.started)
        case "delta":
            delta = response.delta
            return ChatDelta(
                delta.output_index,
                delta.content,
                delta.reasoning,
                _calls(delta.tool_calls),
                tuple(delta.token_ids),
                read_logprobs(delta.logprobs) if delta.HasField("logprobs") else None,
            )
        case "finished":
            return read_finished(response.finished)
        case _:
            return None


def to_chat_completion(response: chat_pb2.ChatUnaryResponse) -> ChatCompletion:
    """All answers to one conversation."""
    return ChatCompletion(
        read_started(response.started),
        tuple(_output(output) for output in response.outputs),
        read_usage(response.usage),
    )


def _output(output: chat_message_pb2.ChatOutput) -> ChatOutput:
    return ChatOutput(
        output.output_index,
        "".join(part.text for part in output.message.parts),
        output.message.reasoning,
        _calls(output.message.tool_calls),
        tuple(output.token_ids),
        read_logprobs(output.logprobs) if output.HasField("logprobs") else None,
        reason_of(output.reason),
        stop_match_of(output.stop_match),
        output.cumulative_logprob if output.HasField("cumulative_logprob") else None,
        output.error_message,
        output.is_incomplete,
        tuple(output.error_fields),
    )


def _calls(calls: Sequence[chat_message_pb2.ToolCall]) -> tuple[ToolCallPiece, ...]:
    return tuple(
        ToolCallPiece(call.index, call.id, call.name, call.arguments_json, call.incomplete) for call in calls
    )
