"""How one engine is reached: its streams of messages, and calls beside them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc.aio

from frontend_svc.engines.connection.stream import EngineStream
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.channel import CHANNEL_OPTIONS, NO_CREDENTIALS, ChannelCredentials, secured_channel
from triptych_kit.clock import Clock

# Steps that wait in the engine are merged, and those on the way are not. The window that gRPC chooses itself
# becomes megabytes: to a frontend that lacks CPU time the steps of seconds are on the way. Clients get old
# outputs, and routing counts requests that have ended. These are 800 rows; a larger message widens it.
_WINDOW = (("grpc.http2.lookahead_bytes", 8192), ("grpc.http2.bdp_probe", 0))


class MessageStream(Protocol):
    """One stream of a session; see `EngineStream`."""

    @property
    def last_seq(self) -> int: ...

    async def open(
        self, hello: session_pb2.Hello, *, limit_s: float | None = None
    ) -> session_pb2.HelloAck: ...

    def send(self, message: engine_pb2.ConnectRequest) -> None: ...

    async def receive(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None: ...

    def close(self, goodbye: engine_pb2.Goodbye) -> None: ...

    def cancel(self) -> None: ...


class EngineTransport(Protocol):
    """Opens streams to one engine, until `close`."""

    @property
    def stub(self) -> engine_pb2_grpc.EngineCoreServiceStub:
        """For `GetArtifacts` and `UploadBlob`."""
        ...

    async def ready(self) -> None:
        """Wait until the engine can be reached."""
        ...

    def open_stream(self, clock: Clock, *, heartbeat_s: float, last_seq: int) -> MessageStream: ...

    async def close(self) -> None: ...


class GrpcTransport:
    """An engine behind a channel, whose streams end when the files of its credentials are replaced."""

    def __init__(self, channel: grpc.aio.Channel, credentials: ChannelCredentials = NO_CREDENTIALS) -> None:
        self._channel = channel
        self._credentials, self._version = credentials, credentials.version
        # Made once: making a stub costs as much as all else that sends an ADD.
        self.stub = engine_pb2_grpc.EngineCoreServiceStub(channel)

    async def ready(self) -> None:
        await self._channel.channel_ready()

    def open_stream(self, clock: Clock, *, heartbeat_s: float, last_seq: int) -> EngineStream:
        return EngineStream(
            self.stub,
            clock,
            heartbeat_s=heartbeat_s,
            last_seq=last_seq,
            waits=False,
            until_renewed=functools.partial(self._credentials.until_renewed, self._version),
        )

    async def close(self) -> None:
        await self._channel.close(None)


def open_transport(address: str, credentials: ChannelCredentials = NO_CREDENTIALS) -> GrpcTransport:
    """The transport to an engine that listens at `address`."""
    return GrpcTransport(engine_channel(address, credentials), credentials)


def engine_channel(address: str, credentials: ChannelCredentials = NO_CREDENTIALS) -> grpc.aio.Channel:
    """A channel whose streams have a small window. Raises ConfigError for a file that cannot be read."""
    return secured_channel(address, (*CHANNEL_OPTIONS["internal"], *_WINDOW), credentials)
