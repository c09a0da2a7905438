"""An OTLP receiver over gRPC, as a collector is one: what the services export, kept as a list."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from benchmarks.rig.processes import LOOPBACK
from triptych_kit.addresses import join_address

_ERROR = trace_pb2.Status.STATUS_CODE_ERROR
_KINDS = {
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
}


@dataclass(frozen=True)
class ReceivedSpan:
    """One exported span with what its process said of itself."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    service: str
    pid: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]
    error: str | None
    kind: str
    namespace: str

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def event(self, name: str) -> dict[str, Any]:
        """The attributes of the first event of that name."""
        return next(attributes for event, attributes in self.events if event == name)


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves the collector's trace service on a port of the kernel's choice."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._server = grpc.aio.server()
        self._arrived = asyncio.Condition()

    async def start(self) -> str:
        """Returns the endpoint as OTEL_EXPORTER_OTLP_ENDPOINT wants it."""
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(join_address(LOOPBACK, 0))
        await self._server.start()
        return f"http://{join_address(LOOPBACK, port)}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Export(self, request, context):
        async with self._arrived:
            for group in request.resource_spans:
                facts = {pair.key: pair.value for pair in group.resource.attributes}
                for span in (span for scope in group.scope_spans for span in scope.spans):
                    self.spans.append(
                        ReceivedSpan(
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_span_id=span.parent_span_id.hex(),
                            service=facts["service.name"].string_value,
                            pid=facts["process.pid"].int_value,
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes=_plain(span.attributes),
                            events=tuple((event.name, _plain(event.attributes)) for event in span.events),
                            error=span.status.message if span.status.code == _ERROR else None,
                            kind=_KINDS[span.kind],
                            namespace=facts["service.namespace"].string_value,
                        )
                    )
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def trace(
        self, trace_id: str, holds: Callable[[list[ReceivedSpan]], bool], limit_s: float = 30.0
    ) -> list[ReceivedSpan]:
        """The spans of one trace, once they satisfy `holds`."""
        async with asyncio.timeout(limit_s), self._arrived:
            await self._arrived.wait_for(lambda: holds(self._of(trace_id)))
            return self._of(trace_id)

    def _of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[tuple[OtlpReceiver, dict[str, str]]]:
    """A receiver of traces, and the environment of a service that exports to it."""
    receiver = OtlpReceiver()
    endpoint = await receiver.start()
    try:
        yield receiver, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint}
    finally:
        await receiver.stop()


def _plain(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))
