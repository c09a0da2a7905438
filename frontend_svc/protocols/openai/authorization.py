"""Middleware that finds the caller's identity, and refuses all but probes to callers without one, and those
that have their share of the connections."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend_svc.protocols.openai.call import Dialect, account_of
from frontend_svc.protocols.openai.errors import error_headers, status_of
from frontend_svc.protocols.openai.websocket import PROTOCOLS, values_of
from triptych_kit.call_turns import CallTurns
from triptych_kit.errors import PermissionDenied, ServiceError, Unauthenticated, Unavailable
from triptych_kit.security.access import CLIENTS, check_role
from triptych_kit.security.authenticator import AUTHORIZATION, Authenticator
from triptych_kit.security.identity import UNRESTRICTED, Identity, bind_identity

logger = logging.getLogger(__name__)

# Load balancers and probes have no credentials.
OPEN_PATHS = frozenset(("/health", "/ping", "/ready"))
# The header in which clients of Anthropic's API send their key.
KEY_HEADER = "x-api-key"
# With which a browser's WebSocket, which has no headers of its own, names its key among its protocols.
KEY_PROTOCOL = "openai-insecure-api-key."
# Where the listener puts the names of the certificate of a connection.
CERTIFICATE_NAMES = "triptych.certificate_names"
# Where the listener puts the function by which a request holds its connection, until its answer is complete:
# of the caller's account and weight; raises Unavailable.
HOLD_CONNECTION = "triptych.hold_connection"


class Authorization:
    """Wraps the whole application, so that a new route is not open by mistake, nor a scope of another type.

    dialect_of: the API of a call.  own_rules: paths whose handlers find the identity themselves.
    turns: of the calls of accounts.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        dialect_of: Callable[[Scope], Dialect],
        own_rules: Collection[str] = (),
        turns: CallTurns | None = None,
    ) -> None:
        self._turns = turns
        self._app, self._authenticator, self._dialect_of = app, authenticator, dialect_of
        self._exempt = OPEN_PATHS.union(own_rules)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._exempt:
            method = f"{scope.get('method', 'GET')} {scope['path'][:256]}"
            try:
                identity = self._identify(scope, method)
                hold: Callable[[str, int], None] | None = scope.get("extensions", {}).get(HOLD_CONNECTION)
                if hold is not None:
                    hold(account_of(identity, scope), identity.weight)
            except (Unauthenticated, PermissionDenied, Unavailable) as error:
                client = scope["client"][0] if scope.get("client") else ""
                await self._note(error, method, client)
                refusal = Response(
                    msgspec.json.encode(self._dialect_of(scope).error_body(error)),
                    status_code=status_of(error),
                    media_type="application/json",
                    headers={**error_headers(error), "connection": "close"},
                )
                await refusal(scope, receive, send)
                return
            if self._turns is not None:
                await self._turns.begin(account_of(identity, scope), identity.weight)
        await self._app(scope, receive, send)

    async def _note(self, error: ServiceError, method: str, client: str) -> None:
        fields = {"method": method, "code": str(status_of(error)), "reason": error.reason, "client": client}
        num_unlogged: int | None = 0
        if isinstance(error, Unauthenticated):
            num_unlogged = self._authenticator.refusals.note(client, error.reason)
        if num_unlogged is None:
            logger.debug("call", extra=fields)
        else:
            logger.info("call", extra=fields | ({"num_unlogged": num_unlogged} if num_unlogged else {}))
        if isinstance(error, Unauthenticated):
            await self._authenticator.refusals.wait(client, error.reason)

    def _identify(self, scope: Scope, method: str) -> Identity:
        if not self._authenticator.needs_credentials:
            return UNRESTRICTED
        names: Any = scope.get("extensions", {}).get(CERTIFICATE_NAMES, [])
        headers = Headers(scope=scope)
        authorization = headers.get(AUTHORIZATION, "")
        if not authorization and (key := headers.get(KEY_HEADER) or _key_among_protocols(headers)):
            authorization = f"Bearer {key}"
        identity = self._authenticator.identify(authorization, names)
        check_role(identity, CLIENTS, method)
        bind_identity(identity)
        return identity


def _key_among_protocols(headers: Headers) -> str:
    names = values_of(headers, PROTOCOLS)
    return next((name.removeprefix(KEY_PROTOCOL) for name in names if name.startswith(KEY_PROTOCOL)), "")
