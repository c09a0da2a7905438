"""Messages of one Generate stream, for a call, a batch item or a resumable stream.

`stream_rest` produces the remaining messages of a stream that began at another frontend.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

from frontend_svc.api.messages import finished_message, started_message
from frontend_svc.engines.adoption.takeover import Adoption
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.generation import Generation, OpenRequest
from frontend_svc.output.collector import EndReason, Output, OutputKind, OutputPiece
from frontend_svc.output.logprobs import fill_logprobs
from frontend_svc.text.prompt import RequestPrompt
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument

Response = generate_pb2.GenerateResponse

# An output with one of these finish reasons may be shorter than what the client has received of it.
_CUT_SHORT = frozenset({EndReason.ABORT, EndReason.ERROR})

_KINDS = {
    sampling_pb2.OUTPUT_KIND_CUMULATIVE: OutputKind.CUMULATIVE,
    sampling_pb2.OUTPUT_KIND_FINAL_ONLY: OutputKind.FINAL_ONLY,
}


def kind_of(sampling: sampling_pb2.SamplingParams) -> OutputKind:
    return _KINDS.get(sampling.output_kind, OutputKind.DELTA)


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
            for message in _messages(opened, output, position, {}):
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
                    for message in _messages(opened, output, position, cuts):
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


def _messages(
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
