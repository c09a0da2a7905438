"""A proxy for any gRPC service that forwards bytes and notes when each message passed. Knows no benchmark."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType

import grpc.aio


@dataclass
class Recording:
    """One call: its messages as bytes, with the instants they came to the proxy, in s of one clock."""

    method: str
    request: bytes = b""
    request_at: float = 0.0
    responses: list[tuple[float, bytes]] = field(default_factory=list)
    code: str = "OK"


class RecordingProxy(grpc.GenericRpcHandler):
    """Stands in front of `target` on a port of its own while its block runs."""

    def __init__(self, target: str) -> None:
        self.recordings: list[Recording] = []
        self.address = ""
        self.peers: set[str] = set()
        self._channel = grpc.aio.insecure_channel(target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))

    async def __aenter__(self) -> RecordingProxy:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        await self._channel.close(None)

    def of(self, method: str) -> list[Recording]:
        """The recorded calls of a method, in order of their requests."""
        return [each for each in self.recordings if each.method.endswith("/" + method)]

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Every method is taken as streaming both ways, which on the wire any method is."""
        method = details.method

        async def forward(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext):
            recording = Recording(method)
            self.recordings.append(recording)
            self.peers.add(context.peer())
            call = self._channel.stream_stream(method, bytes, bytes)(None, timeout=context.time_remaining())
            recording.request = await anext(aiter(requests))
            recording.request_at = time.monotonic()
            await call.write(recording.request)
            await call.done_writing()
            try:
                async for response in call:
                    recording.responses.append((time.monotonic(), response))
                    yield response
            except grpc.aio.AioRpcError as error:
                recording.code = error.code().name
                await context.abort(error.code(), error.details() or "", error.trailing_metadata())
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)
