"""Server interceptor: the caller's identity, ids, one access log line, and errors converted to statuses.

An exception that is not a ServiceError never reaches a client: the client gets INTERNAL and an incident id,
which is logged with the traceback. Knows no service.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from triptych_kit.addresses import host_of_peer
from triptych_kit.call_turns import CallTurns
from triptych_kit.errors import (
    Internal,
    InvalidArgument,
    ServiceError,
    Unauthenticated,
    Unimplemented,
    to_status,
)
from triptych_kit.open_calls import OpenCall, OpenCalls
from triptych_kit.security.access import AUDITED, OPEN_METHODS, check_access
from triptych_kit.security.authenticator import AUTHORIZATION, Authenticator
from triptych_kit.security.identity import UNRESTRICTED, Identity, bind_identity
from triptych_kit.security.refusals import RESET
from triptych_kit.security.tls import names_in_auth_context
from triptych_kit.telemetry.logs import AUDIT_LOGGER, bind_log_fields
from triptych_kit.telemetry.traces import join_trace
from triptych_kit.wire_check import MessageLimits, WireError, check_wire

logger = logging.getLogger(__name__)
audit_logger = logging.getLogger(AUDIT_LOGGER)

REQUEST_ID_KEY = "x-request-id"
TRACE_ID_KEY = "x-trace-id"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# How long a client may take to end its stream before it gets the error that its call is refused with.
_REFUSED_GRACE_S = 0.2
# How long after a failed write the cancellation that made it fail may arrive.
_CANCEL_LAG_S = 1.0
# A client's deadline starts when it sends, so it ends the call slightly before the deadline is over here.
_DEADLINE_LEAD_S = 0.05
# Checking and parsing a smaller message takes a few milliseconds at most.
_LARGE_BYTES = 64 * 1024
_AUDITED_PREFIXES = tuple(f"/{service}/" for service in AUDITED)
_QUIET_PREFIXES = ("/grpc.health.", "/grpc.reflection.")
_METADATUM_BYTES = 200  # of a name and a value, without their characters
_MAX_UNCOLLECTED_BYTES = 4 * 1024 * 1024

Handler = Callable[[Any, Any], Any]
Decode = Callable[[bytes], Awaitable[Any]]
# Checks the serialized message of a descriptor away from the event loop. Raises ServiceError.
CheckMessage = Callable[[bytes, Descriptor, MessageLimits], Awaitable[None]]


def server_interceptors(
    service: str,
    *,
    calls: OpenCalls | None = None,
    limits: MessageLimits | None = None,
    check_large: CheckMessage | None = None,
    authenticator: Authenticator | None = None,
    note_call: Callable[[str], None] | None = None,
    note_known: Callable[[str], None] | None = None,
    turns: CallTurns | None = None,
) -> list[grpc.aio.ServerInterceptor[Any, Any]]:
    """The interceptors of all our servers.

    `service` is its name in access log lines. `calls` gets the open calls, except those of health and
    reflection. With `limits` requests are checked as bytes, those above 64 KiB by `check_large`. Without an
    `authenticator` everyone may call everything. `note_call` is called with the peer of each call, and
    `note_known` with each peer that has shown valid credentials. Calls of several accounts begin in `turns`.
    """
    calls = OpenCalls() if calls is None else calls
    decoder = functools.partial(_decoder, limits, check_large)
    authenticator = authenticator or Authenticator(None, verifies_certificates=False)
    return [_CallInterceptor(service, calls, decoder, authenticator, note_call, note_known, turns)]


@dataclass(slots=True)
class _Call:
    """One call as its access log line shows it, and the status that it is refused with."""

    service: str
    method: str
    request_id: str
    started_at: float
    identity: Identity = UNRESTRICTED
    code: str = "OK"
    reason: str = ""  # of a ServiceError
    refusal: grpc.Status | None = None
    client: str = ""  # the address of a caller without credentials
    num_unlogged: int | None = 0  # refusals of this address before, which were not logged; None: nor is this

    def refuse(self, error: ServiceError) -> None:
        """End the call with the status of `error`."""
        self.code, self.reason = error.code.name, error.reason
        self.refusal = to_status(error)


class _CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs alone
    """Wraps the handler of every method in `_guarded_handler`."""

    def __init__(
        self,
        service: str,
        calls: OpenCalls,
        decoder: Callable[[Any], Decode],
        authenticator: Authenticator,
        note_call: Callable[[str], None] | None,
        note_known: Callable[[str], None] | None,
        turns: CallTurns | None,
    ) -> None:
        self._turns = turns
        self._note_call, self._note_known = note_call, note_known
        self._service = service
        self._calls = calls
        self._quiet_calls = OpenCalls()
        self._decoder = decoder
        self._authenticator = authenticator
        self._num_uncollected_bytes = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The guarded handler of the method; for an unknown method, one that answers UNIMPLEMENTED."""
        self._collect_metadata(handler_call_details.invocation_metadata or ())
        handler = await continuation(handler_call_details)
        if handler is None:
            # Bidirectional streaming: on the wire it is compatible with every other kind of method.
            handler = grpc.stream_stream_rpc_method_handler(_unserved)
        is_quiet = handler_call_details.method.startswith(_QUIET_PREFIXES)
        calls = self._quiet_calls if is_quiet else self._calls
        return _guarded_handler(
            handler,
            self._service,
            calls,
            handler_call_details,
            self._decoder,
            self._authenticator,
            self._note_call,
            self._note_known,
            None if is_quiet else self._turns,
        )

    def _collect_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Have the metadata of calls freed before there are megabytes of it.

        grpc's own closures refer to it and to each other, until a collection, and engines collect seldom. A
        client that has not acknowledged the settings of HTTP/2 may send 16 MB with a call; in HPACK these are
        16 kB.
        """
        self._num_uncollected_bytes += sum(
            _METADATUM_BYTES + len(name) + len(value) for name, value in metadata
        )
        if self._num_uncollected_bytes > _MAX_UNCOLLECTED_BYTES:
            self._num_uncollected_bytes = 0
            # The closures are in use until the handler is found. They are young: this takes milliseconds.
            asyncio.get_running_loop().call_soon(gc.collect, 1)


def _guarded_handler(
    handler: Any,
    service: str,
    calls: OpenCalls,
    details: Any,
    decoder: Callable[[Any], Decode],
    authenticator: Authenticator,
    note_call: Callable[[str], None] | None,
    note_known: Callable[[str], None] | None,
    turns: CallTurns | None,
) -> Any:
    method: str = details.method
    metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}

    def start() -> _Call:
        return _Call(service, method, _request_id(metadata), time.monotonic())

    # A message is read when it is known who calls: until then it takes no more memory than the window of its
    # stream. On the wire a call with one request is one with a stream of them.
    is_read_late = not handler.request_streaming
    # A unary request is parsed inside the guard: grpc itself would answer UNKNOWN with the parser's message.
    decode = decoder(handler.request_deserializer)
    if handler.request_streaming:
        inner: Handler = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def run(request: Any, context: Any) -> Any:
        call = start()
        if note_call is not None:
            note_call(context.peer())
        trace_id = join_trace(metadata.get("traceparent", ""), method)
        bind_log_fields(request_id=call.request_id, trace_id=trace_id)
        async with _guard(call, context, authenticator), _awaiting_cancellation():
            # Sent at once, so that refused and unanswered calls can be found in logs and traces.
            await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id), (TRACE_ID_KEY, trace_id)))
            try:
                call.identity = _identify(authenticator, method, metadata, context)
                bind_identity(call.identity)
                if call.identity is not UNRESTRICTED:
                    if note_known is not None:
                        note_known(context.peer())
                    check_access(call.identity, method.removeprefix("/"))
            except ServiceError as error:
                if isinstance(error, Unauthenticated):
                    call.client = host_of_peer(context.peer())
                    call.num_unlogged = authenticator.refusals.note(call.client, error.reason)
                    await authenticator.refusals.wait(call.client, error.reason)
                if handler.request_streaming:
                    await _read_out(request)
                raise
            if turns is not None:
                await turns.begin(call.identity.account, call.identity.weight)
            with calls.opened() as opened:
                if is_read_late:
                    request = await _only_message(context)
                return await answer(request, context, opened)
        # grpc's call state refers to the error that ends the call, and the frames of that error refer to the
        # state, until a full collection. So the error is raised outside an `except` block, by a frame that
        # has released the request.
        del request
        return await context.abort_with_status(call.refusal)

    async def answer(request: Any, context: Any, opened: OpenCall) -> Any:
        try:
            argument = _decoded(request, decode) if handler.request_streaming else await decode(request)
            result = inner(argument, context)
            if handler.response_streaming and hasattr(result, "__aiter__"):
                return await _write_all(result, context, opened)
            return await result if inspect.isawaitable(result) else result
        except NotImplementedError:
            if handler.request_streaming:
                await _read_out(request)
            raise

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming or is_read_late, handler.response_streaming]
    return make(run, None, handler.response_serializer)


def _identify(authenticator: Authenticator, method: str, metadata: dict[str, str], context: Any) -> Identity:
    """The caller's identity; unrestricted where it needs no credentials."""
    name = method.removeprefix("/")
    if not authenticator.needs_credentials or name in OPEN_METHODS:
        return UNRESTRICTED
    # Only its own user can connect to a unix socket.
    if context.peer().startswith("unix:"):
        return UNRESTRICTED
    names = names_in_auth_context(context.auth_context())
    return authenticator.identify(metadata.get(AUTHORIZATION, ""), names)


def _unserved(requests: Any, context: Any) -> Any:
    raise NotImplementedError


async def _only_message(context: Any) -> bytes:
    # Not by the iterator of requests, which would keep the message until a full collection.
    data: bytes = await context.read()
    if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
        raise InvalidArgument("the call has no request", reason="MALFORMED")
    return data


async def _read_out(requests: AsyncIterator[Any]) -> None:
    # If the answer arrives while the client still writes, the write fails, and grpc's Python client reports
    # an INTERNAL of its own instead of the answer.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REFUSED_GRACE_S):
            async for _ in requests:
                pass


async def _write_all(responses: AsyncGenerator[Any, None], context: Any, opened: OpenCall) -> None:
    # Writing here closes the handler's generator as soon as the client disconnects, not when it is collected.
    async with contextlib.aclosing(responses):
        async for response in responses:
            with opened.writing():
                await context.write(response)


@contextlib.asynccontextmanager
async def _awaiting_cancellation() -> AsyncGenerator[None, None]:
    """Around a call: let it be cancelled where a write has failed because its client has ended it."""
    try:
        yield
    except grpc.aio.InternalError:
        # gRPC cancels the task of such a call, but the write may fail before that.
        await asyncio.sleep(_CANCEL_LAG_S)
        raise


@contextlib.asynccontextmanager
async def _guard(call: _Call, context: Any, authenticator: Authenticator) -> AsyncGenerator[None, None]:
    """Record the code and status of an error in the block, and end the block."""
    try:
        yield
    except ServiceError as error:
        call.refuse(error)
    except NotImplementedError:
        call.refuse(Unimplemented(f"{call.method} is not served here"))
    except grpc.aio.AbortError:
        call.code = context.code().name
        raise
    except asyncio.CancelledError:
        remaining_s = context.time_remaining()
        is_late = remaining_s is not None and remaining_s <= _DEADLINE_LEAD_S
        call.code = (grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED).name
        is_unknown = authenticator.needs_credentials and call.identity is UNRESTRICTED and not call.client
        is_open = call.method.removeprefix("/") in OPEN_METHODS
        if is_unknown and not is_open and not context.peer().startswith("unix:"):
            call.client = host_of_peer(context.peer())
            call.num_unlogged = authenticator.refusals.note(call.client, RESET)
        raise
    except Exception:
        incident_id = secrets.token_hex(8)
        logger.exception("incident", extra={"incident_id": incident_id, "method": call.method})
        call.refuse(_incident(incident_id))
    finally:
        _log_access(call)


def _incident(incident_id: str) -> Internal:
    message = f"internal error, incident {incident_id}"
    return Internal(message, reason="INCIDENT", metadata={"incident_id": incident_id})


def _log_access(call: _Call) -> None:
    is_quiet = call.method.startswith(_QUIET_PREFIXES) or call.num_unlogged is None
    level = logging.DEBUG if is_quiet else logging.INFO
    duration_ms = round((time.monotonic() - call.started_at) * 1000, 1)
    reason = {"reason": call.reason} if call.reason else {}
    identity = {"identity": call.identity.name} if call.identity.name else {}
    client = {"client": call.client} if call.client else {}
    unlogged = {"num_unlogged": call.num_unlogged} if call.num_unlogged else {}
    fields = {"method": call.method, "code": call.code, **reason, **identity, **client, **unlogged}
    fields["duration_ms"] = duration_ms
    if call.method.startswith(_AUDITED_PREFIXES) and not is_quiet:
        audit_logger.info("admin call", extra=fields)
    else:
        logger.log(level, "call", extra=fields)


def _decoder(
    limits: MessageLimits | None, check_large: CheckMessage | None, deserialize: Callable[[bytes], Any] | None
) -> Decode:
    descriptor = None if limits is None else _descriptor_of(deserialize)

    async def decode(data: bytes) -> Any:
        if deserialize is None:
            return data
        is_small = len(data) <= _LARGE_BYTES
        if limits is not None and descriptor is not None and not is_small:
            await (check_large or _check_here)(data, descriptor, limits)
        began_at = time.perf_counter()
        try:
            message = deserialize(data)
        except DecodeError as error:
            raise InvalidArgument(
                "the request is not a valid protobuf message", reason="MALFORMED"
            ) from error
        if not is_small:
            # Parsing 16 MiB of text takes some 20 ms, as its handler's first look at it does. Streams beside
            # it need several turns of the event loop to catch up in between.
            await asyncio.sleep(time.perf_counter() - began_at)
        # A message that is written as it was read has lost nothing. This is so for nearly every request, and
        # takes a tenth of the time.
        if limits is not None and descriptor is not None and is_small and message.SerializeToString() != data:
            await _check_here(data, descriptor, limits)
        return message

    return decode


async def _check_here(data: bytes, descriptor: Descriptor, limits: MessageLimits) -> None:
    try:
        check_wire(data, descriptor, limits)
    except WireError as error:
        raise InvalidArgument(str(error), reason=error.reason, violations=error.violations) from error


async def _decoded(requests: AsyncIterator[bytes], decode: Decode) -> AsyncGenerator[Any, None]:
    async for data in requests:
        yield await decode(data)


def _descriptor_of(deserialize: Callable[[bytes], Any] | None) -> Descriptor | None:
    # Generated code registers `FromString` of a message class.
    owner = deserialize.__self__ if isinstance(deserialize, BuiltinFunctionType) else None
    if not isinstance(owner, type) or not issubclass(owner, Message):
        return None
    descriptor = owner.DESCRIPTOR
    return descriptor if isinstance(descriptor, Descriptor) else None


def _request_id(metadata: dict[str, str]) -> str:
    request_id = metadata.get(REQUEST_ID_KEY, "")
    return request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16)
