"""How one engine is reached: its streams of messages, and calls beside them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc.aio

from frontend_svc.engines.connection.stream import EngineStream
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.channel import NO_CREDENTIALS, ChannelCredentials, open_channel
from triptych_kit.clock import Clock


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
    return GrpcTransport(open_channel(address, credentials=credentials), credentials)
