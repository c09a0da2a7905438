"""What a client gets for a request: whole, in deltas, in turns of a session, also where its stream broke."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from tests.composition.draws import Added
from tests.composition.generator import Drawn
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_kit.eager_writer import EagerWriter
from triptych_kit.errors import ServiceError, from_rpc_error

_CALL_LIMIT_S = 120.0
# Messages that a client reads before its connection breaks.
_READ_BEFORE_BREAK = 4

# Ends of turns after which a session goes on.
_GO_ON = (
    output_pb2.FINISH_REASON_STOP, output_pb2.FINISH_REASON_LENGTH, output_pb2.FINISH_REASON_REPETITION
)  # fmt: skip

_OUTPUT_FIELDS = generate_pb2.Output.DESCRIPTOR.fields_by_name

Whole = inference_pb2.GenerateUnaryResponse
Stub: TypeAlias = inference_pb2_grpc.InferenceServiceStub
Input: TypeAlias = inference_pb2.GenerateSessionRequest
SessionCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[inference_pb2.GenerateSessionRequest, inference_pb2.GenerateSessionResponse]"
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A status, and the fields it names."""

    status: str
    fields: frozenset[str]
    text: str


# Of each turn; a request that is no session has one.
Answer: TypeAlias = "list[Whole] | Refused"


async def ask_alone(stub: Stub, request: generate_pb2.GenerateRequest, added: Sequence[Added]) -> Answer:
    """The whole answers, each in one message: what Generate has for all the tokens of a session so far."""
    asked = generate_pb2.GenerateRequest()
    asked.CopyFrom(request)
    asked.ClearField("orphan_grace_ms")
    asked.return_prompt_token_ids |= bool(added)
    wholes: list[Whole] = []
    try:
        wholes.append(await _ask_whole(stub, asked))
        for one in added:
            if wholes[-1].outputs[0].reason not in _GO_ON:
                break
            asked.ClearField("truncate_prompt_tokens")
            asked.token_ids.ids[:] = [*_context_of(wholes[-1]), *one.token_ids]
            if one.append.HasField("sampling"):
                seed = asked.sampling.seed
                asked.sampling.CopyFrom(one.append.sampling)
                asked.sampling.seed = seed
            wholes.append(await _ask_whole(stub, asked))
    except grpc.aio.AioRpcError as error:
        return _refused(from_rpc_error(error))
    for whole in wholes:
        if not request.return_prompt_token_ids:
            whole.started.ClearField("prompt_token_ids")
    return wholes


async def ask(stub: Stub, drawn: Drawn, on_message: Callable[[], None]) -> Answer:
    """The whole answer from its stream, which breaks once if the request is one that outlives that."""
    request = drawn.request
    if drawn.added:
        messages = _in_turns(stub, drawn)
    elif request.orphan_grace_ms:
        messages = _resumed(stub, request)
    else:
        messages = stub.Generate(request, timeout=_CALL_LIMIT_S)
    is_delta = request.sampling.output_kind in (
        sampling_pb2.OUTPUT_KIND_UNSPECIFIED, sampling_pb2.OUTPUT_KIND_DELTA
    )  # fmt: skip
    wholes: list[Whole] = []
    try:
        async for message in messages:
            on_message()
            match message.WhichOneof("event"):
                case "started":
                    outputs = [generate_pb2.Output(output_index=i) for i in range(max(1, request.sampling.n))]
                    wholes.append(Whole(started=message.started, outputs=outputs))
                case "delta":
                    _add(wholes[-1].outputs[message.delta.output_index], message.delta, is_delta=is_delta)
                case "finished":
                    _finish(wholes[-1].outputs[message.finished.output_index], message.finished, wholes[-1])
    except grpc.aio.AioRpcError as error:
        return _refused(from_rpc_error(error))
    return wholes


def is_expected(drawn: Drawn, seen: Answer, alone: Answer | None) -> bool:
    """Whether a request got what it gets alone, or one of its refusals with no other field named."""
    if not isinstance(seen, Refused):
        return isinstance(alone, list) and list(map(_content_of, seen)) == list(map(_content_of, alone))
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


async def _ask_whole(stub: Stub, request: generate_pb2.GenerateRequest) -> Whole:
    unary = inference_pb2.GenerateUnaryRequest(request=request)
    return await stub.GenerateUnary(unary, timeout=_CALL_LIMIT_S)


def _context_of(whole: Whole) -> list[int]:
    """The tokens that the next turn of a session continues."""
    (output,) = whole.outputs
    is_by_token = output.stop_match.WhichOneof("match") in ("token_id", "eos")
    num_kept = len(output.token_ids) - is_by_token
    return [*whole.started.prompt_token_ids, *output.token_ids[:num_kept]]


async def _in_turns(stub: Stub, drawn: Drawn) -> AsyncIterator[generate_pb2.GenerateResponse]:
    """The messages of a session but a last one that says only that it is over."""
    call: SessionCall = stub.GenerateSession(timeout=_CALL_LIMIT_S)
    writer = EagerWriter(call.write)
    inputs = [Input(append=one.append) for one in drawn.added]
    await _write(call, writer, Input(start=drawn.request))
    if drawn.sends_ahead:
        await _write(call, writer, *inputs, None)
    while isinstance(message := await call.read(), inference_pb2.GenerateSessionResponse):
        if message.response.HasField("finished") and not message.response.finished.HasField("usage"):
            continue
        yield message.response
        if message.turn_ended and not drawn.sends_ahead:
            await _write(call, writer, inputs.pop(0) if inputs else None)


async def _write(call: SessionCall, writer: EagerWriter[Input], *messages: Input | None) -> None:
    """Write inputs; None is their end. Where the call is over, what is read says why."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        for message in messages:
            if message is None:
                await call.done_writing()
            else:
                writer.start(message)
                await writer.finish()


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
