"""AdminService of every process: status, spans, log level, drain. The only module here with stubs."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import grpc.aio

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import utility_pb2
from triptych_kit.errors import (
    InvalidArgument,
    NotFound,
    ServiceError,
    Unavailable,
    Unimplemented,
    with_fields,
)
from triptych_kit.field_checks import check_enum, unserved
from triptych_kit.server import Lifecycle, Registration
from triptych_kit.telemetry.logs import AUDIT_LOGGER, set_log_level
from triptych_kit.telemetry.spans import SpanRecord, Value
from triptych_kit.telemetry.traces import recent_spans
from triptych_kit.version import installed_version

SERVICE_NAME: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_LEVELS = {
    admin_pb2.LOG_LEVEL_DEBUG: logging.DEBUG,
    admin_pb2.LOG_LEVEL_INFO: logging.INFO,
    admin_pb2.LOG_LEVEL_WARNING: logging.WARNING,
    admin_pb2.LOG_LEVEL_ERROR: logging.ERROR,
}
_STATES = {
    "starting": admin_pb2.SERVICE_STATE_STARTING,
    "serving": admin_pb2.SERVICE_STATE_SERVING,
    "draining": admin_pb2.SERVICE_STATE_DRAINING,
    "stopped": admin_pb2.SERVICE_STATE_STOPPED,
}


class QuarantineEntry(Protocol):
    """A prompt in quarantine; see `QuarantinedPrompt`."""

    incident_id: str
    account: str
    model: str
    num_tokens: int
    left_s: float


class Quarantine(Protocol):
    """The prompts that a frontend refuses because they have crashed engines."""

    def entries(self) -> Sequence[QuarantineEntry]: ...

    def clear(self, incident_id: str) -> int:
        """Forget an incident, all if it is empty; returns how many prompts it were. Raises OSError."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves GetStatus, GetTrace, SetLogLevel and Drain, and what it is given a handler for.

    The rest of AdminService is UNIMPLEMENTED. `status` returns the service's own facts and counters; its key
    `state` is one of starting, serving, draining and stopped, and defaults to serving. `utility` and `watch`
    handle calls into an engine process, `quarantine` is a frontend's.
    """

    def __init__(
        self,
        service: str,
        instance: str,
        status: Callable[[], Mapping[str, str | int | float]],
        *,
        lifecycle: Lifecycle,
        utility: Callable[[admin_pb2.UtilityRequest], Awaitable[admin_pb2.UtilityResponse]] | None = None,
        watch: Callable[[admin_pb2.WatchSchedulerRequest], AsyncIterator[admin_pb2.WatchSchedulerResponse]]
        | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._service = service
        self._instance = instance
        self._status = status
        self._lifecycle = lifecycle
        self._utility = utility
        self._watch = watch
        self._quarantine = quarantine
        self._started_at = time.monotonic()

    def registration(self) -> Registration:
        """The registration of this servicer; it is ready from the start."""
        return Registration(
            SERVICE_NAME,
            functools.partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, self),
            is_ready=True,
        )

    async def GetStatus(
        self,
        request: admin_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetStatusRequest, admin_pb2.GetStatusResponse],
    ) -> admin_pb2.GetStatusResponse:
        """Identity, state and counters of this process, and the number of tasks of its event loop."""
        values = {"num_tasks": len(asyncio.all_tasks()), **self._status()}
        state = _STATES[str(values.pop("state", "serving"))]
        return admin_pb2.GetStatusResponse(
            service=self._service,
            instance=self._instance,
            pid=os.getpid(),
            version=installed_version(),
            state=state,
            uptime_ms=int((time.monotonic() - self._started_at) * 1000),
            values=[_status_value(key, value) for key, value in sorted(values.items())],
        )

    async def GetTrace(
        self,
        request: admin_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[admin_pb2.GetTraceRequest, admin_pb2.GetTraceResponse],
    ) -> admin_pb2.GetTraceResponse:
        """The recent spans of one trace, or of the newest."""
        trace_id = request.trace_id
        if not trace_id:
            newest = recent_spans()[-1:]
            trace_id = newest[0].trace_id if newest else "none"
        spans = sorted(recent_spans(trace_id), key=lambda span: span.start_unix_ns)
        return admin_pb2.GetTraceResponse(spans=[_span(span, self._service) for span in spans])

    async def SetLogLevel(
        self,
        request: admin_pb2.SetLogLevelRequest,
        context: grpc.aio.ServicerContext[admin_pb2.SetLogLevelRequest, admin_pb2.SetLogLevelResponse],
    ) -> admin_pb2.SetLogLevelResponse:
        check_enum(request.level, "level", admin_pb2.LogLevel, _LEVELS)
        if request.logger == AUDIT_LOGGER:
            raise InvalidArgument(f"{AUDIT_LOGGER} logs calls of admins at every level", field="logger")
        target = logging.getLogger(request.logger or None)
        previous = target.getEffectiveLevel()
        if request.logger:
            target.setLevel(_LEVELS[request.level])
        else:
            set_log_level(logging.getLevelName(_LEVELS[request.level]))
        return admin_pb2.SetLogLevelResponse(previous_level=_nearest_level(previous))

    async def Drain(
        self,
        request: admin_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainResponse],
    ) -> AsyncIterator[admin_pb2.DrainResponse]:
        """Drain this process, or follow its drain; a caller that goes does not end it."""
        self._lifecycle.drain(request.deadline_ms / 1000 or None, keeps_running=request.keep_running)
        async for num_in_flight, state in self._lifecycle.progress():
            yield admin_pb2.DrainResponse(num_in_flight=num_in_flight, state=_STATES[state.value])

    async def Utility(
        self,
        request: admin_pb2.UtilityRequest,
        context: grpc.aio.ServicerContext[admin_pb2.UtilityRequest, admin_pb2.UtilityResponse],
    ) -> admin_pb2.UtilityResponse:
        """Make a call into the engine, if this process is one."""
        return await self._call(request.call)

    async def LoadAdapter(
        self,
        request: admin_pb2.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[admin_pb2.LoadAdapterRequest, admin_pb2.LoadAdapterResponse],
    ) -> admin_pb2.LoadAdapterResponse:
        """Load an adapter, if this process is an engine; so the next four."""
        added = utility_pb2.AddAdapterCall(name=request.name, path=request.path, replace=request.replace)
        (adapter,) = await self._adapters(utility_pb2.UtilityCall(add_adapter=added))
        return admin_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(
        self,
        request: admin_pb2.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[admin_pb2.UnloadAdapterRequest, admin_pb2.UnloadAdapterResponse],
    ) -> admin_pb2.UnloadAdapterResponse:
        removed = utility_pb2.RemoveAdapterCall(name=request.name)
        await self._adapters(utility_pb2.UtilityCall(remove_adapter=removed))
        return admin_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self,
        request: admin_pb2.ListAdaptersRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListAdaptersRequest, admin_pb2.ListAdaptersResponse],
    ) -> admin_pb2.ListAdaptersResponse:
        adapters = await self._adapters(utility_pb2.UtilityCall(list_adapters={}))
        return admin_pb2.ListAdaptersResponse(adapters=adapters)

    async def PinAdapter(
        self,
        request: admin_pb2.PinAdapterRequest,
        context: grpc.aio.ServicerContext[admin_pb2.PinAdapterRequest, admin_pb2.PinAdapterResponse],
    ) -> admin_pb2.PinAdapterResponse:
        pinned = utility_pb2.PinAdapterCall(name=request.name)
        (adapter,) = await self._adapters(utility_pb2.UtilityCall(pin_adapter=pinned))
        return admin_pb2.PinAdapterResponse(adapter=adapter)

    async def UnpinAdapter(
        self,
        request: admin_pb2.UnpinAdapterRequest,
        context: grpc.aio.ServicerContext[admin_pb2.UnpinAdapterRequest, admin_pb2.UnpinAdapterResponse],
    ) -> admin_pb2.UnpinAdapterResponse:
        unpinned = utility_pb2.UnpinAdapterCall(name=request.name)
        (adapter,) = await self._adapters(utility_pb2.UtilityCall(unpin_adapter=unpinned))
        return admin_pb2.UnpinAdapterResponse(adapter=adapter)

    async def Pin(
        self,
        request: admin_pb2.PinRequest,
        context: grpc.aio.ServicerContext[admin_pb2.PinRequest, admin_pb2.PinResponse],
    ) -> admin_pb2.PinResponse:
        """Keep blocks of an engine, if this process is one; so the next two."""
        if request.adapter:
            raise unserved("adapter")
        pinned = utility_pb2.PinBlocksCall(
            token_ids=request.token_ids,
            ttl_s=request.ttl_s,
            job_id=request.job_id,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
        )
        (pin,) = await self._pins(utility_pb2.UtilityCall(pin_blocks=pinned))
        return admin_pb2.PinResponse(pin=pin)

    async def Release(
        self,
        request: admin_pb2.ReleaseRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ReleaseRequest, admin_pb2.ReleaseResponse],
    ) -> admin_pb2.ReleaseResponse:
        released = utility_pb2.ReleasePinsCall()
        # They have the same fields.
        released.MergeFromString(request.SerializeToString())
        result = await self._ask(utility_pb2.UtilityCall(release_pins=released))
        return admin_pb2.ReleaseResponse(num_blocks=result.num_released_blocks)

    async def ListPins(
        self,
        request: admin_pb2.ListPinsRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListPinsRequest, admin_pb2.ListPinsResponse],
    ) -> admin_pb2.ListPinsResponse:
        return admin_pb2.ListPinsResponse(pins=await self._pins(utility_pb2.UtilityCall(list_pins={})))

    async def _call(self, call: utility_pb2.UtilityCall) -> admin_pb2.UtilityResponse:
        if self._utility is None:
            raise Unimplemented(f"a {self._service} has no engine to call into", reason="NO_ENGINE")
        return await self._utility(admin_pb2.UtilityRequest(call=call))

    async def _ask(self, call: utility_pb2.UtilityCall) -> utility_pb2.UtilityResult:
        """Make the call of an RPC whose request has the fields of the call: errors name those."""
        prefix = f"{call.WhichOneof('call')}."
        try:
            return (await self._call(call)).result
        except ServiceError as error:
            raise with_fields(error, lambda field: field.removeprefix(prefix)) from error

    async def _adapters(self, call: utility_pb2.UtilityCall) -> Sequence[utility_pb2.LoadedAdapter]:
        """The adapters that the engine answers a call with."""
        return (await self._ask(call)).adapters.adapters

    async def _pins(self, call: utility_pb2.UtilityCall) -> list[admin_pb2.PinInfo]:
        return [
            admin_pb2.PinInfo(
                pin_id=pin.pin_id,
                num_blocks=pin.num_blocks,
                remaining_ms=pin.remaining_ms,
                job_id=pin.job_id,
                tenant=pin.tenant,
            )
            for pin in (await self._ask(call)).pins.pins
        ]

    async def WatchScheduler(
        self,
        request: admin_pb2.WatchSchedulerRequest,
        context: grpc.aio.ServicerContext[admin_pb2.WatchSchedulerRequest, admin_pb2.WatchSchedulerResponse],
    ) -> AsyncIterator[admin_pb2.WatchSchedulerResponse]:
        """The state of the scheduler at intervals, if this process is an engine."""
        if self._watch is None:
            raise Unimplemented(f"a {self._service} has no scheduler to watch", reason="NO_ENGINE")
        async for response in self._watch(request):
            yield response

    async def ListQuarantine(
        self,
        request: admin_pb2.ListQuarantineRequest,
        context: grpc.aio.ServicerContext[admin_pb2.ListQuarantineRequest, admin_pb2.ListQuarantineResponse],
    ) -> admin_pb2.ListQuarantineResponse:
        """The prompts that are refused, if this process is a frontend."""
        prompts = [
            admin_pb2.QuarantinedPrompt(
                incident_id=entry.incident_id,
                account=entry.account,
                model=entry.model,
                num_tokens=entry.num_tokens,
                remaining_ms=int(entry.left_s * 1000),
            )
            for entry in self._given_quarantine().entries()
        ]
        return admin_pb2.ListQuarantineResponse(prompts=prompts)

    async def ClearQuarantine(
        self,
        request: admin_pb2.ClearQuarantineRequest,
        context: grpc.aio.ServicerContext[
            admin_pb2.ClearQuarantineRequest, admin_pb2.ClearQuarantineResponse
        ],
    ) -> admin_pb2.ClearQuarantineResponse:
        """Have prompts served again. Raises NotFound for an unknown incident."""
        try:
            num_cleared = self._given_quarantine().clear(request.incident_id)
        except OSError as error:
            raise Unavailable(f"the quarantine cannot be changed: {error.strerror}") from error
        if request.incident_id and not num_cleared:
            raise NotFound(
                f"there is no incident {request.incident_id!r}",
                resource_type="incident",
                resource_name=request.incident_id,
            )
        return admin_pb2.ClearQuarantineResponse(num_cleared=num_cleared)

    def _given_quarantine(self) -> Quarantine:
        if self._quarantine is None:
            raise Unimplemented(f"a {self._service} has no quarantine", reason="NO_FRONTEND")
        return self._quarantine


def _status_value(key: str, value: str | int | float) -> admin_pb2.StatusValue:
    if isinstance(value, str):
        return admin_pb2.StatusValue(key=key, text=value)
    return admin_pb2.StatusValue(key=key, number=value)


def _span(record: SpanRecord, service: str) -> admin_pb2.Span:
    return admin_pb2.Span(
        name=record.name,
        trace_id=record.trace_id,
        span_id=record.span_id,
        parent_span_id=record.parent_span_id,
        service=service,
        pid=os.getpid(),
        start_unix_ns=record.start_unix_ns,
        end_unix_ns=record.end_unix_ns,
        attributes=[
            admin_pb2.SpanAttribute(key=key, value=_text_of(value))
            for key, value in record.attributes.items()
        ],
        events=[admin_pb2.SpanEvent(name=event.name, unix_ns=event.unix_ns) for event in record.events],
        ok=record.error is None,
    )


def _text_of(value: Value) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _nearest_level(level: int) -> admin_pb2.LogLevel:
    # A level between two of ours, or below all, is reported as the next one above.
    return next((ours for ours, theirs in _LEVELS.items() if theirs >= level), admin_pb2.LOG_LEVEL_ERROR)
