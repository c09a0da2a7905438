from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.triptych_kit.fakes import EOF, SERVICE_NAME, FakeService, call_unary, serving
from triptych_kit.call_turns import CallTurns
from triptych_kit.clock import FakeClock
from triptych_kit.errors import FailedPrecondition, from_rpc_error
from triptych_kit.interceptors import server_interceptors
from triptych_kit.security.authenticator import Authenticator
from triptych_kit.server import Registration
from triptych_kit.telemetry.logs import bind_log_fields, log_fields
from triptych_kit.telemetry.traces import begin_trace, current_method, recent_spans, record_trace

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


async def leak(request: bytes, context: Any) -> bytes:
    raise RuntimeError("secret /etc/model/path key=hunter2")


async def leak_in_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"1"
    raise RuntimeError("secret /etc/model/path key=hunter2")


def access_lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.getMessage() == "call"]


async def test_what_escapes_is_an_incident_and_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving([FakeService(unary=leak, stream=leak_in_stream).register()]) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await call_unary(channel)
        stream = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(b"")
        assert await stream.read() == b"1"
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await stream.read()
    for caught in (unary, streamed):
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.INTERNAL
        assert "hunter2" not in str(caught.value) + str(caught.value.trailing_metadata())
        incident_id = error.metadata["incident_id"]
        assert incident_id in error.message
        logged = [record for record in caplog.records if getattr(record, "incident_id", "") == incident_id]
        assert len(logged) == 1
        assert "hunter2" in str(logged[0].exc_info)


async def test_methods_a_servicer_does_not_have_are_unimplemented() -> None:
    class Nothing(health_pb2_grpc.HealthServicer):
        """A generated base alone, under a name of its own."""

    handlers = {
        "Check": grpc.unary_unary_rpc_method_handler(Nothing().Check),
        "Watch": grpc.unary_stream_rpc_method_handler(Nothing().Watch),
    }

    def add(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.v1.Nothing", handlers),))

    async with serving([Registration("test.v1.Nothing", add)]) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await channel.unary_unary("/test.v1.Nothing/Check")(b"")
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await channel.unary_stream("/test.v1.Nothing/Watch")(b"").read()
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/test.v1.Nothing/Other")(b"")
    for caught in (unary, streamed, unknown):
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def write_and_read(call: Any) -> None:
    await call.write(b"")
    await call.done_writing()
    await call.read()


@pytest.mark.parametrize("method", ["test.v1.Nothing/Session", "test.v1.Unknown/Session"])
async def test_an_unserved_stream_says_so_to_a_client_that_still_writes(method: str) -> None:
    class Nothing:
        """Has the method in its contract alone, as generated bases have it."""

        def session(self, requests: Any, context: Any) -> None:
            raise NotImplementedError

    handlers = {"Session": grpc.stream_stream_rpc_method_handler(Nothing().session)}

    def add(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.v1.Nothing", handlers),))

    async with serving([Registration("test.v1.Nothing", add)]) as (_, channel):
        # A write that fails because the answer was quicker is INTERNAL to grpc's Python client.
        for _ in range(200):
            call = channel.stream_stream(f"/{method}")()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await write_and_read(call)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert method in from_rpc_error(caught.value).message


async def test_an_unserved_stream_does_not_wait_for_a_silent_client() -> None:
    async with serving([]) as (_, channel):
        call = channel.stream_stream("/test.v1.Unknown/Session")()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_trace_of_a_call_is_sent_before_its_answer_and_with_its_failure() -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        raise FailedPrecondition("asleep")

    async with serving([FakeService(unary=fail).register()]) as (_, channel):
        stream = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(
            b"0", metadata=(("traceparent", TRACEPARENT),)
        )
        assert dict(await stream.initial_metadata())["x-trace-id"] == TRACE_ID
        stream.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_unary(channel, metadata=(("traceparent", TRACEPARENT),))
    assert dict(caught.value.initial_metadata())["x-trace-id"] == TRACE_ID


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-b7ad6b7169203331-01"])
async def test_a_call_without_a_trace_gets_one_that_its_spans_join(traceparent: str) -> None:
    async def work(request: bytes, context: Any) -> bytes:
        context_of_work = begin_trace("work", traceparent)
        span = context_of_work.root(current_method(), 0, 1)
        record_trace(context_of_work, lambda: [span])
        return log_fields()["trace_id"].encode()

    async with serving([FakeService(unary=work).register()]) as (_, channel):
        call = channel.unary_unary(f"/{SERVICE_NAME}/Unary")(b"", metadata=(("traceparent", traceparent),))
        trace_id = (await call).decode()
        assert dict(await call.initial_metadata())["x-trace-id"] == trace_id
    assert [span.name for span in recent_spans(trace_id)] == [f"{SERVICE_NAME}/Unary"]


async def test_a_malformed_request_is_the_clients_fault() -> None:
    async with serving([]) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\x0a\xff\xff")
    assert from_rpc_error(caught.value).reason == "MALFORMED"
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_id_is_echoed_before_the_answer() -> None:
    async with serving([FakeService().register()]) as (_, channel):
        call = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(b"0", metadata=(("x-request-id", "mine-1"),))
        assert dict(await call.initial_metadata())["x-request-id"] == "mine-1"
        call.cancel()


@pytest.mark.parametrize("given", ["", "with blank", "x" * 129])
async def test_a_request_id_that_cannot_be_used_is_replaced(given: str) -> None:
    async with serving([FakeService().register()]) as (_, channel):
        call = channel.unary_unary(f"/{SERVICE_NAME}/Unary")(b"", metadata=(("x-request-id", given),))
        assert len(dict(await call.initial_metadata())["x-request-id"]) == 32
        await call


async def test_an_access_line_per_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def refuse(request: bytes, context: Any) -> bytes:
        raise FailedPrecondition("asleep", reason="ENGINE_ASLEEP")

    async with serving([FakeService(unary=refuse).register()]) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError):
            await call_unary(channel)
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
    first, second = access_lines(caplog)
    assert (first.levelname, first.method, first.code, first.reason) == (
        "INFO",
        f"/{SERVICE_NAME}/Unary",
        "FAILED_PRECONDITION",
        "ENGINE_ASLEEP",
    )
    assert first.duration_ms >= 0
    assert (second.levelname, second.code) == ("DEBUG", "OK")
    assert not hasattr(second, "reason")


async def test_calls_bind_their_ids_to_log_lines_and_not_to_each_others() -> None:
    async def show(request: bytes, context: Any) -> bytes:
        fields = dict(log_fields())
        bind_log_fields(trace_id="own")
        return f"{fields['request_id']} {fields['trace_id']}".encode()

    async with serving([FakeService(unary=show).register()]) as (_, channel):
        metadata = (("x-request-id", "a"), ("traceparent", TRACEPARENT))
        answers = [
            await call_unary(channel, metadata=metadata),
            await call_unary(channel, metadata=(("x-request-id", "b"), ("traceparent", "nonsense"))),
        ]
    assert answers[0] == f"a {TRACE_ID}".encode()
    assert answers[1].startswith(b"b ")
    assert len(answers[1]) == len("b ") + 32
    assert TRACE_ID.encode() not in answers[1]


async def test_a_handler_learns_at_once_that_its_client_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service = FakeService()
    async with serving([service.register()]) as (_, channel):
        call = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(b"1")
        assert await call.read() == b"0"
        call.cancel()
        await asyncio.wait_for(service.closed.wait(), 5)
    assert service.num_closed == 1
    assert [record.code for record in access_lines(caplog)] == ["CANCELLED"]


async def test_a_client_that_leaves_during_a_write_has_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    is_closed = asyncio.Event()

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1024 * 1024)
        finally:
            is_closed.set()

    async with serving([FakeService(stream=endless).register()]) as (_, channel):
        for _ in range(20):
            call = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(b"")
            await call.read()
            call.cancel()
            await asyncio.wait_for(is_closed.wait(), 5)
            is_closed.clear()
    assert [record.code for record in access_lines(caplog)] == ["CANCELLED"] * 20
    assert "incident" not in caplog.messages


async def test_a_deadline_ends_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    service = FakeService()
    async with serving([service.register()]) as (_, channel):
        # The deadline comes after the first message, also where it is the connection that takes its time.
        await channel.channel_ready()
        call = channel.unary_stream(f"/{SERVICE_NAME}/Stream")(b"1", timeout=1.0)
        assert await call.read() == b"0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        await asyncio.wait_for(service.closed.wait(), 5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(access_lines(caplog)) == 1


class EndedContext:
    """Of a call whose client has ended it so many seconds before its deadline; None for one without."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s

    async def read(self) -> bytes:
        return b""

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Not seen by any client."""


@pytest.mark.parametrize(
    ("remaining_s", "code"),
    [
        (-1.0, "DEADLINE_EXCEEDED"),
        # A client counts from when it sent, the server from when that arrived.
        (0.02, "DEADLINE_EXCEEDED"),
        (5.0, "CANCELLED"),
        (None, "CANCELLED"),
    ],
)
async def test_a_call_that_its_client_ends_at_the_deadline_was_too_late_and_any_other_cancelled(
    remaining_s: float | None, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def cancelled(request: bytes, context: Any) -> bytes:
        raise asyncio.CancelledError

    async def find(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(cancelled)

    details = SimpleNamespace(method=f"/{SERVICE_NAME}/Unary", invocation_metadata=())
    (interceptor,) = server_interceptors("fake")
    handler: Any = await interceptor.intercept_service(find, details)
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_unary(None, EndedContext(remaining_s))
    assert [record.code for record in access_lines(caplog)] == [code]


async def test_a_call_that_is_reset_before_its_key_is_known_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    class ResetContext(EndedContext):
        def peer(self) -> str:
            return "ipv4:192.0.2.1:5000"

        async def send_initial_metadata(self, metadata: Any) -> None:
            raise asyncio.CancelledError

    async def find(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    authenticator = Authenticator(None, verifies_certificates=True)
    details = SimpleNamespace(method=f"/{SERVICE_NAME}/Unary", invocation_metadata=())
    (interceptor,) = server_interceptors("fake", authenticator=authenticator)
    for _ in range(3):
        handler: Any = await interceptor.intercept_service(find, details)
        with pytest.raises(asyncio.CancelledError):
            await handler.stream_unary(None, ResetContext(None))
    assert authenticator.refusals.by_reason == {"RESET": 3}
    assert [record.client for record in access_lines(caplog)] == ["192.0.2.1"]


async def test_calls_begin_in_turns_and_probes_do_not_wait() -> None:
    accounts: list[str] = []

    class Turns(CallTurns):
        async def begin(self, account: str, weight: int) -> None:
            accounts.append(account)

    async def unary(request: bytes, context: Any) -> bytes:
        return request

    async with serving([FakeService(unary=unary).register()], turns=Turns(FakeClock())) as (_, channel):
        await call_unary(channel)
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert accounts == [""]


async def test_streams_in_both_directions_pass_through() -> None:
    async with serving([FakeService().register()]) as (_, channel):
        call = channel.stream_stream(f"/{SERVICE_NAME}/Bidi")()
        for message in (b"a", b"b"):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK
