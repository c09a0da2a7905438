"""What a client gets for a request, however it asks: whole, in deltas, or after its connection broke."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from tests.composition.generator import Drawn
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import ServiceError, from_rpc_error

_CALL_LIMIT_S = 120.0
# Messages that a client reads before its connection breaks.
_READ_BEFORE_BREAK = 4

_OUTPUT_FIELDS = generate_pb2.Output.DESCRIPTOR.fields_by_name

Whole = inference_pb2.GenerateUnaryResponse
Stub: TypeAlias = inference_pb2_grpc.InferenceServiceStub


@dataclass(frozen=True, slots=True)
class Refused:
    """A status, and the fields it names."""

    status: str
    fields: frozenset[str]
    text: str


Answer: TypeAlias = "Whole | Refused"


async def ask_alone(stub: Stub, request: generate_pb2.GenerateRequest) -> Answer:
    """The whole answer in one message, which cannot be resumed."""
    whole = generate_pb2.GenerateRequest()
    whole.CopyFrom(request)
    whole.ClearField("orphan_grace_ms")
    try:
        return await stub.GenerateUnary(
            inference_pb2.GenerateUnaryRequest(request=whole), timeout=_CALL_LIMIT_S
        )
    except grpc.aio.AioRpcError as error:
        return _refused(from_rpc_error(error))


async def ask(stub: Stub, request: generate_pb2.GenerateRequest, on_message: Callable[[], None]) -> Answer:
    """The whole answer from its stream, which breaks once if the request is one that outlives that."""
    messages = (
        _resumed(stub, request) if request.orphan_grace_ms else stub.Generate(request, timeout=_CALL_LIMIT_S)
    )
    whole = Whole()
    is_delta = request.sampling.output_kind in (
        sampling_pb2.OUTPUT_KIND_UNSPECIFIED, sampling_pb2.OUTPUT_KIND_DELTA
    )  # fmt: skip
    outputs = [generate_pb2.Output(output_index=index) for index in range(max(1, request.sampling.n))]
    try:
        async for message in messages:
            on_message()
            match message.WhichOneof("event"):
                case "started":
                    whole.started.CopyFrom(message.started)
                case "delta":
                    _add(outputs[message.delta.output_index], message.delta, is_delta=is_delta)
                case "finished":
                    _finish(outputs[message.finished.output_index], message.finished, whole)
    except grpc.aio.AioRpcError as error:
        return _refused(from_rpc_error(error))
    whole.outputs.extend(outputs)
    return whole


def is_expected(drawn: Drawn, seen: Answer, alone: Answer | None) -> bool:
    """Whether a request got what it gets alone, or one of its refusals with no other field named."""
    if isinstance(seen, Whole):
        return isinstance(alone, Whole) and _content_of(seen) == _content_of(alone)
    fields = {refusal.field for refusal in drawn.refusals if refusal.status == seen.status}
    return bool(seen.fields) and seen.fields <= fields


def _content_of(whole: Whole) -> bytes:
    """What must be equal, to the last bit of a log probability; not what depends on where it ran."""
    content = Whole()
    content.CopyFrom(whole)
    for name in ("request_id", "num_cached_tokens", "resume_token", "fingerprint"):
        content.started.ClearField(name)
    for name in ("num_cached_tokens", "num_draft_tokens", "num_accepted_draft_tokens"):
        content.usage.ClearField(name)
    for output in content.outputs:
        output.ClearField("stats")
    return content.SerializeToString(deterministic=True)


async def _resumed(
    stub: Stub, request: generate_pb2.GenerateRequest
) -> AsyncIterator[generate_pb2.GenerateResponse]:
    call = stub.Generate(request, timeout=_CALL_LIMIT_S)
    token, position = "", 0
    async for message in call:
        yield message
        token, position = token or message.started.resume_token, message.position
        if position == _READ_BEFORE_BREAK:
            break
    else:
        return
    call.cancel()
    resume = inference_pb2.ResumeRequest(resume_token=token, last_position=position)
    async for resumed in stub.Resume(resume, timeout=_CALL_LIMIT_S):
        yield resumed.response


def _add(output: generate_pb2.Output, delta: generate_pb2.Delta, *, is_delta: bool) -> None:
    if not is_delta:
        output.Clear()
    output.token_ids.extend(delta.token_ids)
    if delta.HasField("logprobs"):
        output.logprobs.MergeFrom(delta.logprobs)
    output.output_index, output.text = delta.output_index, output.text + delta.text


def _finish(output: generate_pb2.Output, finished: generate_pb2.Finished, whole: Whole) -> None:
    # What an answer in one message has of an output's end is named as in its stream.
    ending = {field.name: value for field, value in finished.ListFields() if field.name in _OUTPUT_FIELDS}
    output.MergeFrom(generate_pb2.Output(**ending))
    whole.usage.num_prompt_tokens = finished.usage.num_prompt_tokens
    whole.usage.num_completion_tokens += finished.usage.num_completion_tokens


def _refused(error: ServiceError) -> Refused:
    violations = getattr(error, "violations", ())
    named = error.metadata.get("fields", "").split(",")
    fields = frozenset([*(field for field, _ in violations), *filter(None, named)])
    return Refused(error.code.name, fields, error.message)
