"""Counts and times of HTTP calls by route, also under the names that vLLM's dashboards read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych_kit.telemetry.metrics import Metrics

# Upper bounds in seconds.
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
# A path that is no route, or was refused before it was looked up.
_NO_ROUTE = "none"


class HTTPCalls:
    """The metrics of all calls. A stream's time is that until its last event."""

    def __init__(self, metrics: Metrics) -> None:
        self._counts = metrics.counts(
            "triptych_frontend_http_requests_total",
            "HTTP calls that ended, by route, method and class of status; probes and pages are not counted.",
            labels=("handler", "method", "status"),
            aliases=("http_requests_total",),
        )
        self._times = metrics.histogram(
            "triptych_frontend_http_request_duration_seconds",
            "Time of an HTTP call to the end of its answer.",
            _BUCKETS,
            labels=("handler", "method"),
            aliases=("http_request_duration_seconds",),
        )

    def add(self, handler: str, method: str, status: int, duration_s: float) -> None:
        method = method if method in _METHODS else "OTHER"
        self._counts.add(handler, method, f"{status // 100}xx")
        self._times.of(handler, method).observe(duration_s)


class HTTPMetrics:
    """Middleware around the routes. route_of: the path of each endpoint; "": it is not counted."""

    def __init__(self, app: ASGIApp, calls: HTTPCalls, route_of: Mapping[Any, str]) -> None:
        self._app, self._calls, self._route_of = app, calls, route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at, status = time.monotonic(), 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            route = self._route_of.get(scope.get("endpoint"), _NO_ROUTE)
            if route:
                self._calls.add(route, scope["method"], status, time.monotonic() - began_at)
