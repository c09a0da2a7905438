"""Middleware around all others: every answer, refusals of theirs included, has the ids of its call."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend_svc.protocols.openai.call import Dialect
from triptych.api.v1 import generate_pb2
from triptych_kit.rules import rules_of
from triptych_kit.telemetry.logs import bind_log_fields
from triptych_kit.telemetry.traces import join_trace

_MAX_ID_CHARS = rules_of(generate_pb2.GenerateRequest, "request_id").max_chars
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{_MAX_ID_CHARS}}}")


class CallIds:
    """Binds the ids of request and trace, the caller's or new ones, and names them in the answer.

    dialect_of: the API of a call.
    """

    def __init__(self, app: ASGIApp, dialect_of: Callable[[Scope], Dialect]) -> None:
        self._app, self._dialect_of = app, dialect_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own_id = headers.get("x-request-id", "")
        request_id = own_id if _REQUEST_ID.fullmatch(own_id) else secrets.token_hex(16)
        trace_id = join_trace(headers.get("traceparent", ""), "")
        bind_log_fields(request_id=request_id, trace_id=trace_id)
        named = {"x-request-id": request_id, "x-trace-id": trace_id}
        if id_header := self._dialect_of(scope).id_header:
            named[id_header] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(named)
            await send(message)

        state = {**scope.get("state", {}), "request_id": request_id}
        await self._app({**scope, "state": state}, receive, send_named)
