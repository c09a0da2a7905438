"""The route of the Realtime API, which opens sessions within limits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response

from frontend_svc.generation.answers.models import ModelAnswers
from frontend_svc.generation.drain import shutting_down
from frontend_svc.protocols.openai.call import Handler, account_of, caller_of, without_rank
from frontend_svc.protocols.openai.realtime.session import Session, SessionServices
from frontend_svc.protocols.openai.websocket import WebSocket, WebSocketResponse, upgrade_headers
from triptych_kit.errors import ResourceExhausted, Unimplemented
from triptych_kit.security.identity import current_identity
from triptych_kit.telemetry.metrics import Counts

# The protocol that browsers name beside their key.
_PROTOCOL = "realtime"
_REFUSED_PARAMETERS = {"call_id": "there are no calls", "intent": "there is no audio"}
_RETRY_AFTER_MS = 1000


class RealtimeRoutes:
    """sessions: open ones by API.  is_draining: whether new requests are refused, and so new sessions."""

    def __init__(
        self,
        models: ModelAnswers,
        services: SessionServices,
        sessions: Counts,
        *,
        is_draining: Callable[[], bool],
    ) -> None:
        self._models, self._services, self._is_draining = models, services, is_draining
        self._sessions = sessions
        self._num_open: Counter[str] = Counter()  # sessions, by account
        self.gets: dict[str, Handler] = {"/v1/realtime": without_rank(self._open)}

    async def _open(self, request: Request) -> Response:
        headers = upgrade_headers(request, _PROTOCOL)
        for name, reason in _REFUSED_PARAMETERS.items():
            if name in request.query_params:
                raise Unimplemented(f"{name} is not served: {reason}", metadata={"field": name})
        if self._is_draining():
            raise shutting_down()
        model = self._models.one(request.query_params.get("model", "")).name
        identity = current_identity()
        account = account_of(identity, request.scope)
        self._check_room(account)
        services = dataclasses.replace(self._services, account=account, weight=identity.weight)

        async def serve(websocket: WebSocket) -> None:
            with self._counted(account):
                await Session(websocket, services, model, caller_of(request)).run()

        return WebSocketResponse(headers, serve)

    def _check_room(self, account: str) -> None:
        """Raise ResourceExhausted if an account may not open another session."""
        num_open, limit = self._num_open[account], self._services.limits.max_sessions
        if num_open >= limit:
            raise ResourceExhausted(
                f"{account or 'the client'} has {num_open} sessions, the limit is {limit} "
                "(--realtime-max-sessions)",
                reason="TOO_MANY_SESSIONS",
                retry_after_ms=_RETRY_AFTER_MS,
            )

    @contextmanager
    def _counted(self, account: str) -> Iterator[None]:
        self._num_open[account] += 1
        self._sessions.add("realtime")
        try:
            yield
        finally:
            self._sessions.add("realtime", by=-1)
            self._num_open[account] -= 1
            if not self._num_open[account]:
                del self._num_open[account]
