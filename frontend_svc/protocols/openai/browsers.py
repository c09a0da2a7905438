"""Access by pages of other sites from a browser: none, unless their origin is allowed (CORS)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from frontend_svc.protocols.openai.errors import error_body, status_of
from triptych_kit.addresses import is_loopback
from triptych_kit.errors import PermissionDenied, ServiceError
from triptych_kit.http.pages import name_in

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


def for_browsers(
    app: Any, *, allowed_origins: Sequence[str], checks_hosts: bool, open_paths: Sequence[str]
) -> Any:
    """`app` behind the checks of browsers' requests.

    checks_hosts: every page of this machine's browsers could call, so they must name it as their host.
    open_paths: those without a check, which probes ask for.
    """
    guarded = _SiteCheck(app, allowed_origins, open_paths, checks_hosts=checks_hosts)
    if not allowed_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
    )


class _SiteCheck:
    """Refuses requests that a browser sends for a page of another site.

    A browser names the site in a POST, and says of a GET that it is another one. The page may be of the same
    host under a name that its site has pointed here (DNS rebinding), so on loopback, where no key is needed,
    that name must be one of loopback, or of an allowed site.
    """

    def __init__(
        self, app: Any, allowed_origins: Sequence[str], open_paths: Sequence[str], *, checks_hosts: bool
    ) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)
        self._allowed_names = {urlsplit(origin).hostname for origin in allowed_origins}
        self._checks_hosts = checks_hosts and _ANY not in self._allowed
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = Headers(scope=scope)
        error = None if scope["path"] in self._open_paths else self._refusal(headers)
        if error is None:
            await self._app(scope, receive, send)
            return
        refusal = Response(
            json.dumps(error_body(error)), status_code=status_of(error), media_type="application/json"
        )
        await refusal(scope, receive, send)

    def _refusal(self, headers: Headers) -> ServiceError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._checks_hosts and host and not self._is_own_name(name_in(host)):
            return PermissionDenied(
                f"host {host} is not served: localhost, an address of loopback or a host of "
                "--http-allowed-origin is",
                reason="HOST_NOT_SERVED",
            )
        if origin is not None:
            if self._is_served(origin, host):
                return None
        # No page sees the answer to a link that somebody follows.
        elif headers.get("sec-fetch-site") != "cross-site" or headers.get("sec-fetch-mode") == "navigate":
            return None
        return PermissionDenied(
            f"origin {origin or 'of another site'} is not served: --http-allowed-origin allows it",
            reason="ORIGIN_NOT_ALLOWED",
        )

    def _is_own_name(self, name: str) -> bool:
        return is_loopback(name) or name in self._allowed_names

    def _is_served(self, origin: str, host: str) -> bool:
        if not self._allowed.isdisjoint((origin, _ANY)):
            return True
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            return False
        return bool(netloc) and netloc.lower() == host.lower()
