from __future__ import annotations

import asyncio
from functools import partial

import grpc
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from launcher.engines.local_channel import LocalChannel, LocalServer
from service_kit.errors import InvalidArgument, ResourceExhausted, from_rpc_error
from service_kit.server import Registration
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc

NAME = "triptych.api.v1.InferenceService"


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Does what the request's prompt says."""

    def __init__(self) -> None:
        self.num_written = 0
        self.cancelled = asyncio.Event()
        self.metadata: tuple = ()

    async def GenerateUnary(self, request, context):
        self.metadata = context.invocation_metadata()
        what = request.request.prompt
        if what == "refuse":
            raise InvalidArgument("top_p is 2", field="sampling.top_p")
        if what == "full":
            raise ResourceExhausted("full", retry_after_ms=250)
        if what == "break":
            raise KeyError("secret")
        if what == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return inference_pb2.GenerateUnaryResponse(started=generate_pb2.Started(request_id=what))

    async def Generate(self, request, context):
        try:
            for position in range(1, int(request.prompt) + 1):
                self.num_written += 1
                yield generate_pb2.GenerateResponse(position=position)
        finally:
            self.cancelled.set()

    async def GenerateSession(self, request_iterator, context):
        async for request in request_iterator:
            event = generate_pb2.GenerateResponse(
                started=generate_pb2.Started(request_id=request.start.prompt)
            )
            yield inference_pb2.GenerateSessionResponse(response=event)


class Rig:
    """A servicer and stubs of it, without a socket between."""

    def __init__(self) -> None:
        self.servicer = FakeInference()
        add = partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, self.servicer)
        self.channel = LocalChannel(LocalServer([Registration(NAME, add)], service="test"))
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def ask(self, what: str, **options):
        request = inference_pb2.GenerateUnaryRequest(request=generate_pb2.GenerateRequest(prompt=what))
        return self.stub.GenerateUnary(request, **options)


async def test_a_method_with_one_answer_returns_it_and_its_status() -> None:
    call = Rig().ask("hello")
    assert (await call).started.request_id == "hello"
    assert await call.code() is grpc.StatusCode.OK


async def test_headers_go_both_ways() -> None:
    rig = Rig()
    call = rig.ask("hello", metadata=(("x-request-id", "mine"),))
    await call
    assert rig.servicer.metadata == (("x-request-id", "mine"),)
    assert dict(await call.initial_metadata())["x-request-id"] == "mine"


async def test_a_refusal_keeps_its_details() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await Rig().ask("refuse")
    error = from_rpc_error(raised.value)
    assert isinstance(error, InvalidArgument)
    assert error.violations == [("sampling.top_p", "top_p is 2")]


async def test_a_refusal_has_a_retry_delay() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await Rig().ask("full")
    assert from_rpc_error(raised.value).retry_after_ms == 250


async def test_a_bug_in_a_handler_is_an_incident_without_its_words() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await Rig().ask("break")
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (raised.value.details() or "")


async def test_a_method_that_is_not_served_is_unimplemented() -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(LocalChannel(LocalServer([], service="test")))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.GenerateUnary(inference_pb2.GenerateUnaryRequest())
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_deadline_ends_call_and_handler() -> None:
    rig = Rig()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.ask("hang", timeout=0.01)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert rig.servicer.cancelled.is_set()


async def test_giving_up_an_answer_cancels_the_handler() -> None:
    rig = Rig()
    waiting = asyncio.ensure_future(_answer(rig.ask("hang")))
    await _turns()
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.wait_for(rig.servicer.cancelled.wait(), 10)


async def test_a_call_cancelled_before_its_first_step_has_ended() -> None:
    call = Rig().ask("hello")
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def test_a_stream_is_read_to_its_end() -> None:
    rig = Rig()
    call = rig.stub.Generate(generate_pb2.GenerateRequest(prompt="100"))
    assert [response.position async for response in call] == list(range(1, 101))


async def test_a_writer_waits_for_a_reader_that_does_not_read() -> None:
    rig = Rig()
    call = rig.stub.Generate(generate_pb2.GenerateRequest(prompt="1000"))
    await call.read()
    await _turns(200)
    assert rig.servicer.num_written < 50
    call.cancel()
    await asyncio.wait_for(rig.servicer.cancelled.wait(), 10)


async def test_messages_go_both_ways_until_the_client_is_done() -> None:
    call = Rig().stub.GenerateSession()
    received = []
    for text in ("a", "b"):
        start = generate_pb2.GenerateRequest(prompt=text)
        await call.write(inference_pb2.GenerateSessionRequest(start=start))
        received.append((await call.read()).response.started.request_id)
    await call.done_writing()
    assert await call.read() is EOF
    assert received == ["a", "b"]
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(inference_pb2.GenerateSessionRequest())


async def test_closing_the_channel_ends_its_calls_and_takes_no_more() -> None:
    rig = Rig()
    call = rig.ask("hang")
    await _turns()
    await rig.channel.close()
    assert rig.servicer.cancelled.is_set()
    assert await call.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.aio.UsageError):
        rig.ask("hello")


async def _answer(call):
    return await call


async def _turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)
