"""A process that watches services as operators do: a collector of spans and metrics, a scraper, a page.

It listens at once; `watch` scrapes and polls until `rest`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from concurrent import futures

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.rig.lines import Line, answer_lines, send_line
from benchmarks.rig.processes import LOOPBACK
from triptych_kit.addresses import join_address
from triptych_kit.http.admin_http import read_page

_SCRAPE_S = 1.0  # 15 s are usual
_PAGE_S = 0.1
_LIMIT_S = 5.0


class _Spans(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.count = 0

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.count += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        return metrics_service_pb2.ExportMetricsServiceResponse()


class _Watching:
    def __init__(self) -> None:
        self.num_scrapes = 0
        self.num_states = 0
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, services: list[str], frontend: str) -> None:
        self._tasks = [asyncio.ensure_future(self._scrape(address)) for address in services]
        self._tasks.append(asyncio.ensure_future(self._poll(frontend)))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _scrape(self, address: str) -> None:
        while True:
            await read_page(address, "/metrics", limit_s=_LIMIT_S)
            self.num_scrapes += 1
            await asyncio.sleep(_SCRAPE_S)

    async def _poll(self, frontend: str) -> None:
        while True:
            await read_page(frontend, "/ui/state", limit_s=_LIMIT_S)
            self.num_states += 1
            await asyncio.sleep(_PAGE_S)


async def _serve() -> None:
    spans, watching = _Spans(), _Watching()
    collector = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(spans, collector)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(), collector)
    port = collector.add_insecure_port(join_address(LOOPBACK, 0))
    collector.start()

    async def answer(line: Line) -> Line:
        if line["do"] == "watch":
            watching.begin(line["services"], line["frontend"])
        else:
            await watching.end()
        return {
            "num_spans": spans.count,
            "num_scrapes": watching.num_scrapes,
            "num_states": watching.num_states,
        }

    send_line({"endpoint": f"http://{join_address(LOOPBACK, port)}"})
    await answer_lines(answer)
    collector.stop(None)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
