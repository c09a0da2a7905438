"""A service without protos, and a server that runs it, for tests of what surrounds every call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from triptych_kit.call_turns import CallTurns
from triptych_kit.channel import open_channel
from triptych_kit.limits import INTERNAL, LimitProfile
from triptych_kit.server import Registration, Server

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
SERVICE_NAME = "test.v1.FakeService"


class FakeService:
    """Calls what a test puts in: `unary` and `stream` are handlers of raw bytes."""

    def __init__(
        self, unary: Callable[..., Any] | None = None, stream: Callable[..., Any] | None = None
    ) -> None:
        self.unary = unary or self._echo
        self.stream = stream or self._count
        self.num_closed = 0
        self.closed = asyncio.Event()

    def register(self) -> Registration:
        """The registration of the methods Unary, Stream and Bidi."""
        return Registration(SERVICE_NAME, self._add)

    def _add(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
            "Bidi": grpc.stream_stream_rpc_method_handler(self._bidi),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def _echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def _count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            for number in range(int(request)):
                yield str(number).encode()
            await asyncio.Event().wait()
        finally:
            self.num_closed += 1
            self.closed.set()

    async def _bidi(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


@contextlib.asynccontextmanager
async def serving(
    registrations: Sequence[Registration],
    profile: LimitProfile = INTERNAL,
    *,
    reflection: bool = True,
    turns: CallTurns | None = None,
) -> AsyncIterator[tuple[Server, Any]]:
    """A started server and a channel to it.

    The channel is not typed as one: the stubs of grpc ask for serializers that raw bytes do not need.
    """
    server = Server(
        listen="127.0.0.1:0",
        registrations=registrations,
        profile=profile,
        service="fake",
        reflection=reflection,
        turns=turns,
    )
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            yield server, channel
    finally:
        await server.stop(0.0)


async def call_unary(channel: Any, request: bytes = b"", **keywords: Any) -> Any:
    return await channel.unary_unary(f"/{SERVICE_NAME}/Unary")(request, **keywords)
