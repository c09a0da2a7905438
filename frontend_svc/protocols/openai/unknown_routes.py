"""The answer to a path or a method that is not served: an error that says where what is meant may be."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from frontend_svc.protocols.openai.call import Dialect, refusal
from triptych_kit.errors import InvalidArgument

# Longer paths are not compared with those that are served.
_MAX_PATH_CHARS = 128
_TEXT_ONLY = "models here read and write text"
_REALTIME = "/v1/realtime is a WebSocket with text, for which the key of all other routes is sent"
_RUN_BATCH = "`triptych run-batch` runs a file of requests"
_ROUTES = "docs/openai.md lists the routes"
_ADMIN_HTTP = "the admin HTTP listener has it (--admin-http-port)"
_OPENAI = "use /v1/chat/completions or /v1/completions"
_NO_LORA = "start with --allow-runtime-lora"
_LIKE = 0.75  # from which on a path is that of a route, with a mistake
# Of other servers or of parts of APIs that are not served, and what to use instead.
_ELSEWHERE = {
    "/abort_requests": "clients abort a request as they disconnect, or by Abort of gRPC",
    "/api": _OPENAI,
    "/docs": _ROUTES,
    "/generate": _OPENAI,
    "/inference/v1/generate": "/v1/completions takes token ids as its prompt",
    "/invocations": _OPENAI,
    "/is_sleeping": "`triptych admin ADDRESS status` shows it",
    "/metrics": _ADMIN_HTTP,
    "/openapi.json": _ROUTES,
    "/pause": "`triptych admin ADDRESS pause` does it",
    "/redoc": _ROUTES,
    "/reset_prefix_cache": "`triptych admin ADDRESS reset-prefix-cache` does it",
    "/resume": "`triptych admin ADDRESS resume` does it",
    "/scale_elastic_ep": "`triptych admin ADDRESS scale` does it",
    "/server_info": "`triptych admin ADDRESS config` prints the options",
    "/sleep": "`triptych admin ADDRESS sleep` does it",
    "/start_profile": "`triptych admin ADDRESS profile start` does it",
    "/stop_profile": "`triptych admin ADDRESS profile stop` does it",
    "/ui": _ADMIN_HTTP,
    "/v1/assistants": "use /v1/responses",
    "/v1/audio": _TEXT_ONLY,
    "/v1/batches": _RUN_BATCH,
    "/v1/conversations": "previous_response_id of /v1/responses continues a conversation",
    "/v1/files": "send what is in a file as text; for batches, " + _RUN_BATCH,
    "/v1/images": _TEXT_ONLY,
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/messages/batches": _RUN_BATCH,
    "/v1/realtime/calls": _REALTIME,
    "/v1/realtime/client_secrets": _REALTIME,
    "/v1/realtime/sessions": _REALTIME,
    "/v1/realtime/transcription_sessions": _TEXT_ONLY,
    "/v1/threads": "use /v1/responses",
    "/v1/unload_lora_adapter": _NO_LORA,
    "/v1/uploads": "send what is in a file as text",
    "/v1/videos": _TEXT_ONLY,
    "/wake_up": "`triptych admin ADDRESS wake` does it",
}


def unknown_route(dialect_of: Callable[[Scope], Dialect]) -> Callable[[Request, Exception], Response]:
    """The handler of such a request. dialect_of: the API of a call."""

    def handle(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for these"
        path, served = request.url.path, f"{request.method} {request.url.path[:_MAX_PATH_CHARS]}"
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        if methods := _methods_at(request, routes):
            named = " or ".join(method for method in methods if method != "HEAD")
            shown = InvalidArgument(f"{served} is not served: use {named}", reason="METHOD_NOT_ALLOWED")
        else:
            hint = _hint(path, [route.path for route in routes if route.path != "/"])
            shown = InvalidArgument(f"{served} is not served{hint}", reason="UNKNOWN_URL")
        response = refusal(shown, dialect_of(request.scope))
        if methods:
            response.headers["allow"] = ", ".join(methods)
        return response

    return handle


def _methods_at(request: Request, routes: Sequence[Route]) -> list[str]:
    """The methods that are served at the path of a request; HEAD with GET."""
    at_path = [route.methods or () for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for methods in at_path for method in methods})


def _hint(path: str, served: Sequence[str]) -> str:
    for known in sorted(_ELSEWHERE, key=len, reverse=True):
        if known not in served and (path == known or path.startswith(f"{known}/")):
            return f": {_ELSEWHERE[known]}"
    routes = [each for each in served if not each.startswith("/ui/")]
    near = difflib.get_close_matches(path, routes, n=1, cutoff=_LIKE) if len(path) <= _MAX_PATH_CHARS else []
    return f"; did you mean {near[0]}?" if near else ""
