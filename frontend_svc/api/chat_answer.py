"""One answer of a chat as messages: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from frontend_svc.api.messages import (
    logprobs_message,
    reason_value,
    stats_message,
    stop_match_message,
)
from frontend_svc.generation.generation import OpenRequest
from frontend_svc.output.collector import OutputPiece
from frontend_svc.parsers.parser import ContentPiece, Piece, ReasoningPiece, ToolCallPiece
from triptych.api.v1 import chat_message_pb2
from triptych.common.v1 import output_pb2


class ChatAnswer:
    """Turns the pieces of one output into deltas; with `is_cumulative` each includes all before it."""

    def __init__(self, index: int, *, is_cumulative: bool) -> None:
        self._index = index
        self._is_cumulative = is_cumulative
        self._whole = chat_message_pb2.ChatDelta(output_index=index)

    def advance(self, piece: OutputPiece) -> chat_message_pb2.ChatDelta | None:
        """The delta of `piece`, or everything so far; None if there is nothing new."""
        delta = chat_message_pb2.ChatDelta(
            output_index=self._index,
            token_ids=piece.token_ids,
            logprobs=logprobs_message(piece.logprobs),
        )
        _write(delta, piece.parts)
        if not (piece.parts or piece.token_ids):
            return None
        if not self._is_cumulative:
            return delta
        _append(self._whole, delta)
        # A copy: a message that was sent must not change.
        shown = chat_message_pb2.ChatDelta()
        shown.CopyFrom(self._whole)
        return shown


def whole_answer(opened: OpenRequest, piece: OutputPiece) -> chat_message_pb2.ChatOutput:
    """A complete output as a message."""
    assert piece.ending is not None, "a final output has ended"
    delta = chat_message_pb2.ChatDelta()
    _write(delta, piece.parts)
    message = chat_message_pb2.ChatMessage(
        role=chat_message_pb2.CHAT_ROLE_ASSISTANT, reasoning=delta.reasoning, tool_calls=delta.tool_calls
    )
    if delta.content:
        message.parts.add(text=delta.content)
    whole = chat_message_pb2.ChatOutput(
        output_index=piece.index,
        message=message,
        token_ids=piece.token_ids,
        logprobs=logprobs_message(piece.logprobs),
        reason=reason_value(piece.ending),
        stop_match=stop_match_message(piece.ending),
        cumulative_logprob=piece.cumulative_logprob,
        error_message=piece.ending.message,
        stats=stats_message(opened, piece.index),
    )
    opened.fill(whole, piece.index)
    return whole


def _write(delta: chat_message_pb2.ChatDelta, parts: Sequence[Piece]) -> None:
    delta.content = "".join(part.text for part in parts if isinstance(part, ContentPiece))
    delta.reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPiece))
    for part in parts:
        if isinstance(part, ToolCallPiece):
            call = chat_message_pb2.ToolCall(
                index=part.index,
                id=part.id,
                name=part.name,
                arguments_json=part.arguments_json,
                incomplete=part.is_incomplete,
            )
            _add_call(delta, call)


def _add_call(delta: chat_message_pb2.ChatDelta, call: chat_message_pb2.ToolCall) -> None:
    if delta.tool_calls and delta.tool_calls[-1].index == call.index:
        last = delta.tool_calls[-1]
        last.arguments_json += call.arguments_json
        last.incomplete |= call.incomplete
    else:
        delta.tool_calls.append(call)


def _append(whole: chat_message_pb2.ChatDelta, delta: chat_message_pb2.ChatDelta) -> None:
    whole.content += delta.content
    whole.reasoning += delta.reasoning
    whole.token_ids.extend(delta.token_ids)
    for call in delta.tool_calls:
        _add_call(whole, call)
    if delta.HasField("logprobs"):
        _append_logprobs(whole.logprobs, delta.logprobs)


def _append_logprobs(whole: output_pb2.Logprobs, more: output_pb2.Logprobs) -> None:
    # Merging concatenates repeated fields, and a Logprobs has nothing else.
    whole.MergeFrom(more)
