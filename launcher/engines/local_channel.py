"""A grpc.aio channel to servicers in the same event loop: generated stubs, our interceptors, no sockets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio

from launcher.engines.local_call import LocalCall, Pairs, function_of
from service_kit.interceptors import server_interceptors
from service_kit.server import Registration

# In the order of request_streaming, response_streaming.
_MAKE_HANDLER: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True)
class _CallDetails:
    """The call details that interceptors get."""

    method: str
    invocation_metadata: Pairs


class LocalServer:
    """The methods of `registrations`, behind the interceptors of all our servers."""

    def __init__(self, registrations: Sequence[Registration], *, service: str) -> None:
        self._interceptors = server_interceptors(service)
        self._handlers: dict[str, Any] = {}
        for registration in registrations:
            # Generated code needs only the two methods below of a server.
            registration.add(cast(grpc.aio.Server, self))

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Ignored: generated code passes every method to the other one as well."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of one service."""
        self._handlers |= {
            f"/{service}/{name}": _without_bytes(handler) for name, handler in handlers.items()
        }

    async def find_handler(self, method: str, metadata: Pairs) -> Any:
        """The intercepted handler of a method; one that answers UNIMPLEMENTED for an unknown method."""
        find = self._find
        for interceptor in reversed(self._interceptors):
            find = functools.partial(interceptor.intercept_service, find)
        return await find(_CallDetails(method, metadata))

    async def _find(self, details: Any) -> Any:
        return self._handlers.get(details.method)


class LocalChannel(grpc.aio.Channel):
    """A channel to a `LocalServer`. Messages are passed by reference; closing it ends every call."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._calls: set[LocalCall] = set()
        self._is_closed = False

    def unary_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        """A method with one request and one answer."""
        return functools.partial(self._open, method)

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Any:
        """A method with one request and many answers."""
        return functools.partial(self._open, method)

    def stream_unary(self, method: str, *codecs: Any, **options: Any) -> Any:
        """A method with many requests and one answer."""
        return functools.partial(self._open, method)

    def stream_stream(
        self,
        method: str,
        *codecs: Any,
        response_deserializer: Callable[[bytes], Any] | None = None,
        **options: Any,
    ) -> Any:
        """A method with many messages in both directions; answers that are bytes are parsed."""
        return functools.partial(self._open, method, parse=response_deserializer)

    async def close(self, grace: float | None = None) -> None:
        """End every call after at most `grace` seconds, and refuse new ones."""
        self._is_closed = True
        running = [asyncio.ensure_future(call.wait_closed()) for call in self._calls]
        if running and grace:
            await asyncio.wait(running, timeout=grace)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*running)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """READY, until it is closed."""
        return grpc.ChannelConnectivity.SHUTDOWN if self._is_closed else grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return if the state differs from the given one; it never changes later."""
        if last_observed_state is self.get_state():
            raise grpc.aio.UsageError("the state of a local channel changes by `close` alone")

    async def channel_ready(self) -> None:
        """There is nothing to connect to."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(
        self,
        method: str,
        request: Any = None,
        *,
        timeout: float | None = None,
        metadata: Iterable[tuple[str, str | bytes]] | None = None,
        wait_for_ready: bool | None = None,
        parse: Callable[[bytes], Any] | None = None,
    ) -> LocalCall:
        if self._is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = LocalCall(
            self._server.find_handler,
            method,
            request=request,
            metadata=tuple(metadata or ()),
            timeout_s=timeout,
            parse=parse,
        )
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call


def _without_bytes(handler: Any) -> Any:
    """The handler without serialization."""
    make = _MAKE_HANDLER[handler.request_streaming, handler.response_streaming]
    return make(function_of(handler), None, None)
