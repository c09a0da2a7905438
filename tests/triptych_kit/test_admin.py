from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.triptych_kit.fakes import serving
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import utility_pb2
from triptych_kit.admin import SERVICE_NAME, AdminServicer
from triptych_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    from_rpc_error,
)
from triptych_kit.limits import ADMIN
from triptych_kit.server import Lifecycle, ServiceState
from triptych_kit.telemetry.spans import SpanEvent
from triptych_kit.telemetry.traces import begin_trace, record_trace, setup_telemetry, shutdown_telemetry


@pytest.fixture
def telemetry() -> Iterator[None]:
    """Fresh telemetry of an engine; logging as it was afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    setup_telemetry("engine", instance="engine-0")
    yield
    shutdown_telemetry()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def admin(telemetry: None) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    servicer = AdminServicer(
        "engine",
        "engine-0",
        lambda: {"state": "draining", "num_running": 3, "model": "tiny"},
        lifecycle=Lifecycle(),
    )
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def test_status(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    status = await admin.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.service, status.instance, status.pid) == ("engine", "engine-0", os.getpid())
    assert status.state == admin_pb2.SERVICE_STATE_DRAINING
    assert status.version
    values = {value.key: value.text or value.number for value in status.values}
    assert list(values) == sorted(values)
    assert values.pop("num_tasks") > 0
    assert values == {"model": "tiny", "num_running": 3.0}


async def test_the_newest_trace(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    for number in range(2):
        context = begin_trace("request")
        spans = [
            context.root("request", 10, 40, {"number": number}, [SpanEvent("first_token", 30)]),
            context.child(0, "tokenize", 20, 30),
        ]
        record_trace(context, partial(list, spans))
    answer = await admin.GetTrace(admin_pb2.GetTraceRequest())
    request, tokenize = answer.spans
    assert (request.name, tokenize.name) == ("request", "tokenize")
    assert tokenize.parent_span_id == request.span_id
    assert [(one.key, one.value) for one in request.attributes] == [("number", "1")]
    assert request.events[0].name == "first_token"
    assert request.start_unix_ns <= tokenize.start_unix_ns <= tokenize.end_unix_ns <= request.end_unix_ns
    assert (request.pid, request.ok, request.service) == (os.getpid(), True, "engine")
    named = await admin.GetTrace(admin_pb2.GetTraceRequest(trace_id=request.trace_id))
    assert named == answer


async def test_an_unknown_trace_has_no_spans(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    assert not (await admin.GetTrace(admin_pb2.GetTraceRequest())).spans
    assert not (await admin.GetTrace(admin_pb2.GetTraceRequest(trace_id="0" * 32))).spans


async def test_log_levels(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    answer = await admin.SetLogLevel(admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_ERROR))
    assert answer.previous_level == admin_pb2.LOG_LEVEL_INFO
    assert logging.getLogger().level == logging.ERROR
    request = admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_DEBUG, logger="tests.admin")
    assert (await admin.SetLogLevel(request)).previous_level == admin_pb2.LOG_LEVEL_ERROR
    assert logging.getLogger("tests.admin").level == logging.DEBUG


async def test_an_unspecified_level_is_refused(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.SetLogLevel(admin_pb2.SetLogLevelRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    levels = "LOG_LEVEL_DEBUG, LOG_LEVEL_INFO, LOG_LEVEL_WARNING, LOG_LEVEL_ERROR"
    assert from_rpc_error(caught.value).message == f"level is 0, it takes one of {levels}"


async def test_the_rest_is_unimplemented(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.ListPins(admin_pb2.ListPinsRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_service_without_an_engine_takes_no_utility_calls(admin):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.Utility(admin_pb2.UtilityRequest())
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_service_without_a_scheduler_says_so(telemetry: None) -> None:
    servicer = AdminServicer("frontend", "frontend-0", lambda: {}, lifecycle=Lifecycle())
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        call = admin_pb2_grpc.AdminServiceStub(channel).WatchScheduler(admin_pb2.WatchSchedulerRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "a frontend has no scheduler to watch"


async def test_adapters_are_changed_by_calls_into_the_engine(telemetry: None) -> None:
    calls: list[utility_pb2.UtilityCall] = []
    adapter = utility_pb2.LoadedAdapter(name="cook", rank=8)

    async def serve(request: admin_pb2.UtilityRequest) -> admin_pb2.UtilityResponse:
        calls.append(request.call)
        result = utility_pb2.UtilityResult(adapters={"adapters": [adapter]})
        if request.call.HasField("remove_adapter"):
            result = utility_pb2.UtilityResult(done={})
        return admin_pb2.UtilityResponse(result=result)

    servicer = AdminServicer("engine", "engine-0", lambda: {}, lifecycle=Lifecycle(), utility=serve)
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        load = admin_pb2.LoadAdapterRequest(name="cook", path="/a", replace=True)
        assert (await stub.LoadAdapter(load)).adapter == adapter
        assert (await stub.PinAdapter(admin_pb2.PinAdapterRequest(name="cook"))).adapter == adapter
        assert (await stub.UnpinAdapter(admin_pb2.UnpinAdapterRequest(name="cook"))).adapter == adapter
        listed = await stub.ListAdapters(admin_pb2.ListAdaptersRequest())
        await stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="cook"))
    assert list(listed.adapters) == [adapter]
    assert calls == [
        utility_pb2.UtilityCall(add_adapter={"name": "cook", "path": "/a", "replace": True}),
        utility_pb2.UtilityCall(pin_adapter={"name": "cook"}),
        utility_pb2.UtilityCall(unpin_adapter={"name": "cook"}),
        utility_pb2.UtilityCall(list_adapters={}),
        utility_pb2.UtilityCall(remove_adapter={"name": "cook"}),
    ]


async def test_pins_are_calls_into_the_engine(telemetry: None) -> None:
    calls: list[utility_pb2.UtilityCall] = []
    fields = {"pin_id": "pin-1", "num_blocks": 3, "remaining_ms": 500, "job_id": "a", "tenant": "t"}

    async def serve(request: admin_pb2.UtilityRequest) -> admin_pb2.UtilityResponse:
        calls.append(request.call)
        result = utility_pb2.UtilityResult(pins={"pins": [fields]})
        if request.call.HasField("release_pins"):
            result = utility_pb2.UtilityResult(num_released_blocks=3)
        return admin_pb2.UtilityResponse(result=result)

    servicer = AdminServicer("engine", "engine-0", lambda: {}, lifecycle=Lifecycle(), utility=serve)
    asked = {"token_ids": [5, 6], "ttl_s": 9.5, "job_id": "a", "cache_salt": "s", "tenant": "t"}
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        pin = admin_pb2.PinInfo(**fields)
        assert (await stub.Pin(admin_pb2.PinRequest(**asked))).pin == pin
        assert list((await stub.ListPins(admin_pb2.ListPinsRequest())).pins) == [pin]
        for target in {"pin_id": "pin-1"}, {"job_id": "a"}:
            assert (await stub.Release(admin_pb2.ReleaseRequest(**target))).num_blocks == 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Pin(admin_pb2.PinRequest(token_ids=[5], adapter="cook"))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert calls == [
        utility_pb2.UtilityCall(pin_blocks=asked),
        utility_pb2.UtilityCall(list_pins={}),
        utility_pb2.UtilityCall(release_pins={"pin_id": "pin-1"}),
        utility_pb2.UtilityCall(release_pins={"job_id": "a"}),
    ]


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("pin_blocks.ttl_s is nan, must be 0 to 86400", field="pin_blocks.ttl_s"),
        ResourceExhausted("pin_blocks.ttl_s is too long", metadata={"fields": "pin_blocks.ttl_s"}),
    ],
)
async def test_an_error_names_the_field_of_the_rpc(telemetry: None, error: ServiceError) -> None:
    async def serve(request: admin_pb2.UtilityRequest) -> admin_pb2.UtilityResponse:
        raise error

    servicer = AdminServicer("engine", "engine-0", lambda: {}, lifecycle=Lifecycle(), utility=serve)
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Pin(admin_pb2.PinRequest(token_ids=[5]))
    seen = from_rpc_error(caught.value)
    assert seen.code is error.code
    assert seen.message == error.message.removeprefix("pin_blocks.")
    fields = seen.violations[0][0] if isinstance(seen, InvalidArgument) else seen.metadata["fields"]
    assert fields == "ttl_s"


async def test_utility_calls_go_to_the_servicer_that_serves_them(telemetry: None) -> None:
    async def serve(request: admin_pb2.UtilityRequest) -> admin_pb2.UtilityResponse:
        if not request.call.call_id:
            raise FailedPrecondition("no call_id")
        response = admin_pb2.UtilityResponse()
        response.result.call_id = request.call.call_id
        return response

    servicer = AdminServicer("engine", "engine-0", lambda: {}, lifecycle=Lifecycle(), utility=serve)
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.UtilityRequest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Utility(request)
        request.call.call_id = 9
        answer = await stub.Utility(request)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert answer.result.call_id == 9


async def last_of(call: grpc.aio.UnaryStreamCall) -> admin_pb2.DrainResponse:
    answers: list[admin_pb2.DrainResponse] = []
    # Not `async for`, as the test has read some already.
    while isinstance(answer := await call.read(), admin_pb2.DrainResponse):
        answers.append(answer)
    return answers[-1]


async def test_drain_streams_its_progress_until_it_is_over_and_a_second_caller_follows_it(telemetry: None):
    num_left = 2
    lifecycle = Lifecycle(lambda: num_left)
    lifecycle.move_to(ServiceState.SERVING)
    servicer = AdminServicer("engine", "engine-0", lambda: {}, lifecycle=lifecycle)
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        first = stub.Drain(admin_pb2.DrainRequest(deadline_ms=1500, keep_running=True), timeout=30)
        assert (await first.read()).num_in_flight == 2
        assert (lifecycle.drain_deadline_s, lifecycle.keeps_running) == (1.5, True)
        second = stub.Drain(admin_pb2.DrainRequest(), timeout=30)
        lifecycle.move_to(ServiceState.DRAINING)
        num_left = 1
        assert (await first.read()).num_in_flight == 1
        num_left = 0
        lifecycle.note_drained()
        last = await last_of(first)
        assert await last_of(second) == last
    assert (last.num_in_flight, last.state) == (0, admin_pb2.SERVICE_STATE_DRAINING)
    assert (lifecycle.drain_deadline_s, lifecycle.keeps_running) == (1.5, True)


async def test_a_drain_without_a_limit_goes_on_without_its_caller(telemetry: None):
    lifecycle = Lifecycle()
    lifecycle.move_to(ServiceState.SERVING)
    servicer = AdminServicer("engine", "engine-0", lambda: {}, lifecycle=lifecycle)
    async with serving([servicer.registration()], ADMIN) as (_, channel):
        call = admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=30)
        await call.read()
        call.cancel()
        await lifecycle.until_ordered()
    assert (lifecycle.drain_deadline_s, lifecycle.keeps_running) == (None, False)


async def test_the_level_of_the_audit_log_is_not_changed(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    request = admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_ERROR, logger="triptych.audit")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.SetLogLevel(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert logging.getLogger("triptych.audit").isEnabledFor(logging.INFO)
