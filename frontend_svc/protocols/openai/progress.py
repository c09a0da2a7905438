"""How far the client of a resumable stream has come: the id of each event, where any frontend continues."""

from __future__ import annotations

import base64
import binascii

import msgspec

from frontend_svc.protocols.openai.answers import Answer, fingerprint_of, num_characters
from frontend_svc.protocols.openai.bodies import CompletionBody, StreamOptions
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych_kit.errors import InvalidArgument

LAST_EVENT_ID = "last-event-id"
_MAX_OUTPUTS = 1024
_MAX_COUNT = 2**31
_Usage = tuple[int, int, int]  # tokens of the prompt, cached ones, tokens of outputs


class _OutputProgress(msgspec.Struct, array_like=True):
    """The part of one output that the client has."""

    num_tokens: int = 0
    num_characters: int = 0
    is_finished: bool = False
    offset: int = 0  # characters of the tokens with log probabilities


class StreamProgress(msgspec.Struct, array_like=True):
    """All that a frontend without this stream needs to write its next event as this one would.

    The resume token in it is what allows to read the stream; the rest changes the client's own events alone.
    """

    request_id: str
    position: int
    resume_token: str
    model: str
    created: int
    with_ids: bool
    with_usage: bool
    with_continuous_usage: bool
    outputs: list[_OutputProgress]
    usage_so_far: _Usage = (0, 0, 0)
    usage_total: _Usage = (0, 0, 0)
    is_over: bool = False  # the event with the usage was sent, too
    fingerprint: str | None = None

    @classmethod
    def begin(cls, started: generate_pb2.Started, body: CompletionBody, created: int) -> StreamProgress:
        options = body.stream_options or StreamOptions()
        return cls(
            started.request_id,
            1,
            started.resume_token,
            started.model,
            created,
            bool(body.return_token_ids),
            options.include_usage,
            options.continuous_usage_stats,
            [_OutputProgress() for _ in range(body.n or 1)],
            fingerprint=fingerprint_of(started),
        )

    @classmethod
    def read(cls, event_id: str) -> StreamProgress:
        """The progress in an event's id. Raises InvalidArgument."""
        try:
            content = base64.b64decode(event_id.rpartition(":")[2], altchars=b"-_", validate=True)
            progress = msgspec.msgpack.decode(content, type=cls)
            counts = [progress.position, *progress.usage_so_far, *progress.usage_total]
            counts += [
                count
                for one in progress.outputs
                for count in (one.num_tokens, one.num_characters, one.offset)
            ]
            is_valid = all(0 <= count <= _MAX_COUNT for count in counts)
            is_valid &= progress.position > 0 and 0 < len(progress.outputs) <= _MAX_OUTPUTS
        except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
            raise _not_an_id(event_id) from error
        if not is_valid:
            raise _not_an_id(event_id)
        return progress

    def event_id(self) -> str:
        content = base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode("ascii")
        return f"{self.request_id}:{self.position}:{content}"

    @property
    def is_finished(self) -> bool:
        """Whether the client has all outputs."""
        return all(output.is_finished for output in self.outputs)

    def note(self, response: generate_pb2.GenerateResponse) -> None:
        """The client gets this response in the next event."""
        self.position = response.position
        if response.WhichOneof("event") == "delta":
            output = self.outputs[response.delta.output_index]
            output.num_tokens += len(response.delta.token_ids)
            output.num_characters += len(response.delta.text)
            output.offset += num_characters(response.delta.logprobs)
        else:
            self.outputs[response.finished.output_index].is_finished = True

    def resume_request(self) -> inference_pb2.ResumeRequest:
        request = inference_pb2.ResumeRequest(resume_token=self.resume_token, last_position=self.position)
        for index, output in enumerate(self.outputs):
            if output.num_tokens or output.num_characters or output.is_finished:
                request.received.add(
                    output_index=index,
                    num_tokens=output.num_tokens,
                    num_characters=output.num_characters,
                    is_finished=output.is_finished,
                )
        return request

    def body(self) -> CompletionBody:
        """The fields of the first body that decide how events look."""
        options = StreamOptions(
            include_usage=self.with_usage, continuous_usage_stats=self.with_continuous_usage
        )
        return CompletionBody(
            prompt="", n=len(self.outputs), return_token_ids=self.with_ids, stream_options=options
        )

    def answer(self) -> Answer:
        return Answer(
            self.request_id,
            self.model,
            self.fingerprint,
            is_chat=False,
            is_chunk=True,
            created=self.created,
        )


def _not_an_id(event_id: str) -> InvalidArgument:
    what = f"{event_id[:60]!r}, which is not the id of an event of a resumable stream"
    return InvalidArgument(f"{LAST_EVENT_ID} is {what}", field=LAST_EVENT_ID)
