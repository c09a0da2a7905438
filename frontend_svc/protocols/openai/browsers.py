"""Access by pages of other sites from a browser: none, unless their origin is allowed (CORS)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from frontend_svc.protocols.openai.errors import error_body
from triptych_kit.addresses import is_loopback
from triptych_kit.errors import PermissionDenied

_SHOWN_HEADERS = (
    "request-id",
    "retry-after",
    "x-request-id",
    "x-trace-id",
    "x-triptych-ignored-fields",
    *(
        f"x-ratelimit-{kind}-{what}"
        for kind in ("limit", "remaining", "reset")
        for what in ("requests", "tokens")
    ),
)
_ANY = "*"


def for_browsers(app: Any, *, allowed_origins: Sequence[str], host: str) -> Any:
    """`app` behind the checks of browsers' requests. host: the address that it is served at."""
    guarded = _OriginCheck(app, allowed_origins, on_loopback=is_loopback(host))
    if not allowed_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
    )


class _OriginCheck:
    """Refuses requests of pages of other sites; a browser names the site of a page in a POST.

    A page may be of the same host under a name that its site has pointed here (DNS rebinding), so on loopback
    that name must be one of loopback.
    """

    def __init__(self, app: Any, allowed_origins: Sequence[str], *, on_loopback: bool) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)
        self._on_loopback = on_loopback

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or self._is_served(origin, headers.get("host", "")):
            await self._app(scope, receive, send)
            return
        error = PermissionDenied(
            f"origin {origin} is not served: --http-allowed-origin allows it", reason="ORIGIN_NOT_ALLOWED"
        )
        lines = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 403, "headers": lines})
        await send({"type": "http.response.body", "body": json.dumps(error_body(error)).encode()})

    def _is_served(self, origin: str, host: str) -> bool:
        if not self._allowed.isdisjoint((origin, _ANY)):
            return True
        try:
            parts = urlsplit(origin)
            is_same = bool(parts.netloc) and parts.netloc.lower() == host.lower()
            return is_same and (not self._on_loopback or is_loopback(parts.hostname or ""))
        except ValueError:
            return False
