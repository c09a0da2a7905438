"""Answers to GenerateRequest: as a stream, as one message, several in one stream, and resumed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

from frontend_svc.engines.adoption.takeover import Adoption
from frontend_svc.generation.answers.batch import stream_batch
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
from frontend_svc.generation.answers.resumable import ResumableStreams
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.generation import Generation, OpenRequest
from frontend_svc.output.collector import EndReason, Output, OutputKind, OutputPiece
from frontend_svc.output.logprobs import fill_logprobs
from frontend_svc.text.prompt import RequestPrompt
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych_kit.errors import InvalidArgument, ServiceError, from_status, with_fields

Response = generate_pb2.GenerateResponse

# An output with one of these finish reasons may be shorter than what the client has received of it.
_CUT_SHORT = frozenset({EndReason.ABORT, EndReason.ERROR})


class GenerateAnswers:
    """Answers to requests of any protocol. Closing a stream aborts its request."""

    def __init__(self, generation: Generation, resumable: ResumableStreams) -> None:
        self._generation = generation
        self._resumable = resumable
        self._stream_of = functools.partial(stream_generate, generation)

    def stream(self, request: generate_pb2.GenerateRequest, caller: Caller) -> AsyncGenerator[Response, None]:
        """The answer as it is generated; with an orphan grace period it outlives its call."""
        start = self._resumable.start if request.orphan_grace_ms > 0 else self._stream_of
        return start(request, caller)

    def resume(self, request: inference_pb2.ResumeRequest, caller: Caller) -> AsyncGenerator[Response, None]:
        """The rest of a stream."""
        return self._resumable.resume(request, caller)

    async def batch(
        self, requests: Sequence[generate_pb2.GenerateRequest], caller: Caller
    ) -> AsyncGenerator[inference_pb2.GenerateBatchResponse, None]:
        """The answers to several requests, each with its own error. A drain waits for the reader."""
        with self._generation.awaited():
            async with contextlib.aclosing(stream_batch(self._stream_of, requests, caller)) as messages:
                async for message in messages:
                    yield message

    async def stream_all(
        self, requests: Sequence[generate_pb2.GenerateRequest], caller: Caller, fields: Sequence[str]
    ) -> AsyncGenerator[tuple[int, Response], None]:
        """The answers to several requests as they are generated, each with its index.

        Raises the first error of any; the others are aborted. fields: the name of each prompt in errors.
        """
        async with contextlib.aclosing(stream_batch(self._stream_of, requests, caller)) as messages:
            async for message in messages:
                if message.HasField("error"):
                    error = message.error
                    failure = from_status(error.code, error.message, error.details)
                    raise with_prompt_named(failure, fields[message.item_index])
                yield message.item_index, message.response

    async def whole(
        self, request: generate_pb2.GenerateRequest, caller: Caller
    ) -> inference_pb2.GenerateUnaryResponse:
        """The whole answer."""
        if request.orphan_grace_ms:
            raise InvalidArgument(
                f"orphan_grace_ms is {request.orphan_grace_ms}, must be 0 here: one answer cannot be resumed",
                field="orphan_grace_ms",
            )
        prompt = RequestPrompt(request)
        async with self._generation.open(request, prompt, caller, OutputKind.FINAL_ONLY) as opened:
            output = await opened.next()
            return inference_pb2.GenerateUnaryResponse(
                started=started_message(opened, output, returns_ids=request.return_prompt_token_ids),
                outputs=[_output(opened, piece) for piece in output.pieces],
                usage=usage_message(opened, output, output.pieces),
            )


def with_prompt_named(error: ServiceError, field: str) -> ServiceError:
    """The same error with another name of the request's prompt."""
    return with_fields(error, lambda path: field if path in ("prompt", "token_ids") else path)


async def stream_generate(
    generation: Generation, request: generate_pb2.GenerateRequest, caller: Caller
) -> AsyncGenerator[Response, None]:
    """Started, deltas, and one finished per output, numbered from 1. Closing it aborts the request."""
    prompt, kind = RequestPrompt(request), kind_of(request.sampling)
    async with generation.open(request, prompt, caller, kind) as opened:
        output = await opened.next()
        started = started_message(opened, output, returns_ids=request.return_prompt_token_ids)
        position = 1
        yield Response(position=position, started=started)
        while True:
            for message in messages_of(opened, output, position, {}):
                position = message.position
                yield message
            if output.is_last:
                return
            output = await opened.next()


async def stream_rest(
    generation: Generation,
    adoption: Adoption,
    resume: inference_pb2.ResumeRequest,
    caller: Caller,
    on_adopted: Callable[[generate_pb2.GenerateRequest], None],
) -> AsyncGenerator[Response, None]:
    """The messages that the client of another frontend has not received. Closing it aborts the request.

    `on_adopted` is called with the request when it was adopted. Raises NotFound if no engine keeps it.
    """
    token, received = resume.resume_token, {one.output_index: one for one in resume.received}
    # Counted before any engine is asked, so that a draining frontend adopts nothing.
    with generation.counted():
        async with adoption.take_over(token, received, caller.is_left, scoped=caller.scoped) as adopted:
            on_adopted(adopted.request)
            kind = kind_of(adopted.request.sampling)
            has_all_each_time = kind is OutputKind.CUMULATIVE
            cuts = {index: Cut(one, has_all_each_time=has_all_each_time) for index, one in received.items()}
            async with generation.adopt(adopted, caller, kind) as opened:
                position, is_last = resume.last_position, False
                while not is_last:
                    output = await opened.next()
                    is_last = output.is_last
                    for message in messages_of(opened, output, position, cuts):
                        position = message.position
                        yield message


class Cut:
    """Removes what a client has received already from the repeated start of one output."""

    def __init__(self, received: inference_pb2.ReceivedOutput, *, has_all_each_time: bool) -> None:
        self.is_finished = received.is_finished
        self._received = received
        self._num_tokens = 0 if has_all_each_time else received.num_tokens
        self._num_characters = 0 if has_all_each_time else received.num_characters

    def apply(self, piece: OutputPiece) -> None:
        """Remove from `piece` what the client has received."""
        num_tokens = min(self._num_tokens, len(piece.token_ids))
        if num_tokens:
            piece.token_ids = piece.token_ids[num_tokens:]
            if piece.logprobs is not None:
                piece.logprobs = piece.logprobs.after(num_tokens)
        num_characters = min(self._num_characters, len(piece.text))
        piece.text = piece.text[num_characters:]
        self._num_tokens -= num_tokens
        self._num_characters -= num_characters

    def check_end(self) -> None:
        """The output has ended. Raises InvalidArgument if the client claims to have received more of it."""
        for name, left in (("num_tokens", self._num_tokens), ("num_characters", self._num_characters)):
            if left:
                received = getattr(self._received, name)
                raise InvalidArgument(
                    f"received.{name} of output {self._received.output_index} is {received}, "
                    f"the whole output has {received - left}",
                    field=f"received.{name}",
                )


def messages_of(
    opened: OpenRequest, output: Output, position: int, cuts: Mapping[int, Cut]
) -> Iterator[Response]:
    for piece in output.pieces:
        cut = cuts.get(piece.index)
        if cut is not None:
            if cut.is_finished:
                continue
            cut.apply(piece)
            if piece.ending is not None and piece.ending.reason not in _CUT_SHORT:
                cut.check_end()
        if piece.token_ids or piece.text:
            position += 1
            yield _delta_response(position, piece)
        if piece.ending is not None:
            position += 1
            finished = finished_message(opened, output, piece, piece.ending)
            yield Response(position=position, finished=finished)


def _delta_response(position: int, piece: OutputPiece) -> Response:
    response = Response(position=position)
    # Filled in place: a message passed to the constructor of another is copied.
    delta = response.delta
    delta.SetInParent()
    delta.output_index = piece.index
    delta.text = piece.text
    delta.token_ids.extend(piece.token_ids)
    if piece.logprobs is not None:
        fill_logprobs(delta.logprobs, piece.logprobs)
    return response


def _output(opened: OpenRequest, piece: OutputPiece) -> generate_pb2.Output:
    assert piece.ending is not None, "a final output has ended"
    whole = generate_pb2.Output(
        output_index=piece.index,
        text=piece.text,
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
