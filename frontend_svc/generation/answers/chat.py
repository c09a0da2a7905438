"""Answers to ChatRequest: the next message of a conversation, as a stream and whole."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from frontend_svc.generation.answers.messages import (
    finished_message,
    kind_of,
    logprobs_message,
    reason_value,
    started_message,
    stats_message,
    stop_match_message,
    usage_message,
)
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.generation import Generation, OpenRequest
from frontend_svc.output.collector import OutputKind, OutputPiece
from frontend_svc.parsers.parser import ContentPiece, Piece, ReasoningPiece, ToolCallPiece
from frontend_svc.text.chat.prompt import ChatPrompt
from triptych.api.v1 import chat_message_pb2, chat_pb2
from triptych.common.v1 import output_pb2


class ChatAnswers:
    """Renders conversations and generates answers to requests of any protocol.

    `takes_templates`: whether a request may contain a chat template.
    """

    def __init__(self, generation: Generation, *, takes_templates: bool) -> None:
        self._generation = generation
        self._takes_templates = takes_templates

    async def whole(
        self, request: chat_message_pb2.ChatRequest, caller: Caller
    ) -> chat_pb2.ChatUnaryResponse:
        """The whole answer."""
        async with self._open(request, caller, OutputKind.FINAL_ONLY) as opened:
            output = await opened.next()
            return chat_pb2.ChatUnaryResponse(
                started=started_message(opened, output, returns_ids=request.return_prompt_token_ids),
                outputs=[_whole_output(opened, piece) for piece in output.pieces],
                usage=usage_message(opened, output, output.pieces),
            )

    async def stream(
        self, request: chat_message_pb2.ChatRequest, caller: Caller, *, streams_arguments: bool = True
    ) -> AsyncGenerator[chat_message_pb2.ChatResponse, None]:
        """The answer as it is generated. Closing it aborts the request.

        streams_arguments: whether calls are emitted before they are known to be whole.
        """
        kind = kind_of(request.sampling)
        is_cumulative = kind is OutputKind.CUMULATIVE
        # Cumulative answers are assembled here, from parts.
        kind = OutputKind.DELTA if is_cumulative else kind
        async with self._open(request, caller, kind, streams_arguments=streams_arguments) as opened:
            outputs: dict[int, _ChatOutput] = {}
            output = await opened.next()
            started = started_message(opened, output, returns_ids=request.return_prompt_token_ids)
            position = 1
            yield chat_message_pb2.ChatResponse(position=position, started=started)
            while True:
                for piece in output.pieces:
                    written = outputs.get(piece.index)
                    if written is None:
                        written = outputs[piece.index] = _ChatOutput(piece.index, is_cumulative=is_cumulative)
                    delta = written.advance(piece)
                    if delta is not None:
                        position += 1
                        yield chat_message_pb2.ChatResponse(position=position, delta=delta)
                    if piece.ending is not None:
                        position += 1
                        finished = finished_message(opened, output, piece, piece.ending)
                        yield chat_message_pb2.ChatResponse(position=position, finished=finished)
                if output.is_last:
                    return
                output = await opened.next()

    @contextlib.asynccontextmanager
    async def _open(
        self,
        request: chat_message_pb2.ChatRequest,
        caller: Caller,
        kind: OutputKind,
        *,
        streams_arguments: bool = True,
    ) -> AsyncIterator[OpenRequest]:
        model = self._generation.model(request.model)
        prompt = ChatPrompt(
            request, model, takes_templates=self._takes_templates, streams_arguments=streams_arguments
        )
        async with self._generation.open(request, prompt, caller, kind) as opened:
            yield opened


class _ChatOutput:
    """Turns the pieces of one output into deltas; with `is_cumulative` each includes all before it."""

    def __init__(self, index: int, *, is_cumulative: bool) -> None:
        self._index = index
        self._is_cumulative = is_cumulative
        self._whole = chat_message_pb2.ChatDelta(output_index=index)

    def advance(self, piece: OutputPiece) -> chat_message_pb2.ChatDelta | None:
        """The delta of `piece`, or the sum of all deltas; None if there is nothing new."""
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


def _whole_output(opened: OpenRequest, piece: OutputPiece) -> chat_message_pb2.ChatOutput:
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
        error_fields=opened.error_fields(piece.ending),
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


def delta_of(output: chat_message_pb2.ChatOutput) -> chat_message_pb2.ChatDelta:
    """A whole output as the one delta that would have it all; without log probabilities."""
    return chat_message_pb2.ChatDelta(
        content="".join(part.text for part in output.message.parts),
        reasoning=output.message.reasoning,
        tool_calls=output.message.tool_calls,
        token_ids=output.token_ids,
    )


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
