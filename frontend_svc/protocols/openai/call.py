"""The common part of all routes: guarded calls, bodies with limits, answers, event streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope, Send

from frontend_svc.generation.caller import Caller
from frontend_svc.generation.tenants import Rate
from frontend_svc.protocols.openai.bodies import BodyT, IgnoredFields, encode
from frontend_svc.protocols.openai.body_reader import BodyReader
from frontend_svc.protocols.openai.errors import error_body, error_headers, status_of
from frontend_svc.protocols.openai.field_names import as_it_is
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych_kit.addresses import join_address
from triptych_kit.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    ServiceError,
    Unimplemented,
    with_fields,
)
from triptych_kit.security.identity import Identity, current_identity

logger = logging.getLogger(__name__)

PROBES = ("/health", "/ping", "/ready")
DONE = b"data: [DONE]\n\n"
_IGNORED_HEADER = "x-triptych-ignored-fields"
_RANK_HEADER = "x-data-parallel-rank"
_RANK = re.compile("[0-9]{1,18}")
_MAX_IGNORED = 64  # names in the header
_MAX_NAME_CHARS = 128

_T = TypeVar("_T")
Handler = Callable[[Request], Awaitable[Response]]
Ranked = generate_pb2.GenerateRequest | chat_message_pb2.ChatRequest


def event_of(content: dict[str, Any], event_id: str = "") -> bytes:
    event = b"data: " + encode(content) + b"\n\n"
    return b"id: " + event_id.encode() + b"\n" + event if event_id else event


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an API writes errors, as bodies and as events of a stream, and a stream's heartbeat.

    id_header: its own name of the header `x-request-id` in answers.
    """

    error_body: Callable[[ServiceError], dict[str, Any]]
    error_event: Callable[[dict[str, Any]], bytes]
    heartbeat: bytes
    id_header: str = ""


# Readers of events pass over a comment.
OPENAI = Dialect(error_body, event_of, heartbeat=b": heartbeat\n\n")


def guarded(handler: Handler, dialect_of: Callable[[Scope], Dialect]) -> Handler:
    """Gives errors the shape and the fields of the API; logs the call."""

    async def handle(request: Request) -> Response:
        dialect = dialect_of(request.scope)
        request.state.dialect, request.state.name_of = dialect, as_it_is
        began_at = time.monotonic()
        try:
            response = await handler(request)
        except ServiceError as error:
            response = refusal(with_fields(error, request.state.name_of), dialect)
        except ClientDisconnect:
            response = refusal(Cancelled("the client has disconnected"), dialect)
        except Exception:  # noqa: BLE001  Whatever it is, the client gets an incident.
            response = refusal(_incident(), dialect)
        response.headers.update(_rate_headers(request.app.state.rates_of(current_identity())))
        is_quiet = request.url.path in PROBES
        logger.log(
            logging.DEBUG if is_quiet else logging.INFO,
            "call",
            extra={
                "method": f"{request.method} {request.url.path}",
                "code": str(response.status_code),
                "duration_ms": round((time.monotonic() - began_at) * 1000, 1),
                "client": request.client.host if request.client is not None else "",
            },
        )
        return response

    return handle


def _rate_headers(rates: Mapping[str, Rate]) -> dict[str, str]:
    return {
        f"x-ratelimit-{kind}-{name}": value
        for name, rate in rates.items()
        for kind, value in (
            ("limit", str(rate.limit)),
            ("remaining", str(rate.left)),
            ("reset", f"{math.ceil(rate.reset_s)}s"),
        )
    }


async def body_of(request: Request, kind: type[BodyT]) -> tuple[BodyT, IgnoredFields]:
    reader: BodyReader = request.app.state.bodies
    identity = current_identity()
    return await reader.read(request, kind, account_of(identity, request.scope), identity.weight)


def account_of(identity: Identity, scope: Scope) -> str:
    """Whose share of the listener a request uses: the account of its caller, without one its address."""
    if identity.account:
        return identity.account
    return f"client {scope['client'][0]}" if scope.get("client") else ""


def caller_of(request: Request) -> Caller:
    return Caller(
        request_id=request.state.request_id,
        traceparent=request.headers.get("traceparent", ""),
        tracestate=request.headers.get("tracestate", ""),
        remaining_s=lambda: None,
        identity=current_identity(),
        server=_address_in(request),
    )


def choose_rank(request: Request, api_requests: Iterable[Ranked]) -> None:
    """Send requests to the rank that vLLM's header names. Errors about the rank name the header."""
    rank = request.headers.get(_RANK_HEADER)
    if rank is None:
        return
    if not _RANK.fullmatch(rank):
        raise InvalidArgument(f"{_RANK_HEADER} is {rank!r:.40}, must be a number", field=_RANK_HEADER)
    for each in api_requests:
        each.data_parallel_rank = int(rank)
    name_of = request.state.name_of
    request.state.name_of = lambda path: _RANK_HEADER if path == "data_parallel_rank" else name_of(path)


def without_rank(handler: Handler) -> Handler:
    """A handler that refuses vLLM's header for a rank."""

    async def handle(request: Request) -> Response:
        if _RANK_HEADER in request.headers:
            raise Unimplemented(
                f"{_RANK_HEADER} is not served here: completions and chats alone have ranks",
                metadata={"field": _RANK_HEADER},
            )
        return await handler(request)

    return handle


def _address_in(request: Request) -> str:
    """The address that the connection of a request was accepted at."""
    host, port = request.scope["server"]
    return join_address(host, port)


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, _T]) -> _T:
    """The answer; cancelled when the client disconnects."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_until_disconnected(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    except BaseExceptionGroup as group:
        # Of several prompts, the first error.
        raise _first_error(group) from group
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait((answering, leaving))


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(request: Request, events: AsyncGenerator[bytes, None], ignored: list[str]) -> Response:
    """A stream of events, once there is the first: until then an error has a status of its own.

    After a heartbeat's time the stream begins without one: proxies cut an answer that is silent.
    """
    interval_s: float = request.app.state.heartbeat_s
    dialect: Dialect = request.state.dialect
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_disconnected(request, asyncio.wait((first,), timeout=interval_s or None))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.wait((first,))
        await events.aclose()
        raise
    return _EventStream(
        _with_errors(first, events, request),
        interval_s,
        dialect.heartbeat,
        {"cache-control": "no-cache", "x-accel-buffering": "no", **_ignored_header(ignored)},
    )


class _EventStream(StreamingResponse):
    """Sends events, and a heartbeat whenever there was none for `interval_s`; 0 is never."""

    def __init__(
        self, events: AsyncIterator[bytes], interval_s: float, heartbeat: bytes, headers: dict[str, str]
    ) -> None:
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._interval_s, self._heartbeat = interval_s, heartbeat
        self._sent_at = 0.0
        # A heartbeat that waits for a slow client must not be sent after the end.
        self._sending = asyncio.Lock()

    async def stream_response(self, send: Send) -> None:
        async def send_in_turn(message: Message) -> None:
            async with self._sending:
                await send(message)
            self._sent_at = time.monotonic()

        self._sent_at = time.monotonic()
        beating = asyncio.ensure_future(self._beat(send_in_turn)) if self._interval_s else None
        try:
            await super().stream_response(send_in_turn)
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.wait((beating,))

    async def _beat(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_at
            if silent_s >= self._interval_s:
                await send({"type": "http.response.body", "body": self._heartbeat, "more_body": True})
            else:
                await asyncio.sleep(self._interval_s - silent_s)


async def _with_errors(
    first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None], request: Request
) -> AsyncIterator[bytes]:
    """An error after the beginning of the stream is its last event."""
    dialect: Dialect = request.state.dialect
    try:
        async with contextlib.aclosing(events):
            yield await first
            async for event in events:
                yield event
    except ServiceError as error:
        yield dialect.error_event(dialect.error_body(with_fields(error, request.state.name_of)))
    except Exception:  # noqa: BLE001  Whatever it is, the client gets an incident.
        yield dialect.error_event(dialect.error_body(_incident()))


@contextlib.contextmanager
def faults_as_incidents(*passed: type[Exception]) -> Iterator[None]:
    """Raise what is raised in the block, other than a ServiceError and `passed`, as an incident."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ServiceError, *passed)):
            raise
        raise _incident() from error


def _incident() -> Internal:
    incident_id = secrets.token_hex(8)
    logger.exception("incident", extra={"incident_id": incident_id})
    return Internal(
        f"internal error, incident {incident_id}", reason="INCIDENT", metadata={"incident_id": incident_id}
    )


def refusal(error: ServiceError, dialect: Dialect) -> Response:
    return Response(
        encode(dialect.error_body(error)),
        status_code=status_of(error),
        media_type="application/json",
        headers=error_headers(error),
    )


def json_response(content: dict[str, Any], ignored: list[str] | None = None) -> Response:
    return Response(encode(content), media_type="application/json", headers=_ignored_header(ignored or []))


def _ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    """Names as a client chose them are quoted, and all but the first ones left out."""
    named = [quote(name[:_MAX_NAME_CHARS], safe="[]") for name in sorted(set(ignored))]
    if len(named) > _MAX_IGNORED:
        named[_MAX_IGNORED:] = ["..."]
    return {_IGNORED_HEADER: ", ".join(named)} if named else {}
