"""Uploads tensors to one engine, a few at once, with retries. Knows no request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import grpc.aio

from frontend_svc.tensors.wire_tensor import WireTensor
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc
from triptych_kit.errors import (
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    from_rpc_error,
)
from triptych_kit.rules import rules_of

# Half of what an engine accepts at once: other frontends upload too.
MAX_UPLOADS = 4
MAX_TRIES = 10
_CHUNK_BYTES = rules_of(engine_pb2.UploadBlobRequest, "chunk").max_bytes
_DEADLINE_S = 30.0
_MAX_DELAY_S = 5.0
# If a connection is not replaced for this long, the engine is considered lost.
RECONNECT_S = 2.0
# A retried upload waits this long after its header, in case the engine refuses it.
_HEADER_PAUSE_S = 0.1
# gRPC's only message for a call that the engine answered while a chunk was being written.
_ANSWER_LOST = "Internal error from Core"


class Uploads:
    """Uploads to one engine beside its stream, over the connection that the stream has at the moment."""

    def __init__(self, *, reconnect_s: float = RECONNECT_S) -> None:
        self._reconnect_s = reconnect_s
        self._slots = asyncio.Semaphore(MAX_UPLOADS)
        self._stub: engine_pb2_grpc.EngineCoreServiceStub | None = None
        self._num_replaced = 0
        self._replaced = asyncio.Event()

    def use(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        """Upload over the connection of `stub` from now on."""
        self._stub = stub

    def go_on(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        """The connection was replaced by that of `stub`: retry uploads that were cut off over it."""
        self._stub = stub
        self._num_replaced += 1
        self._replaced.set()
        self._replaced.clear()

    async def upload(self, tensor: WireTensor) -> None:
        """Return when the engine has the bytes; raises the ServiceError with which it refuses them."""
        num_tries = 0
        while True:
            num_replaced, num_tries = self._num_replaced, num_tries + 1
            try:
                async with self._slots:
                    await self._try(tensor, delay_s=_HEADER_PAUSE_S if num_tries > 1 else 0.0)
                return
            except DeadlineExceeded as error:
                # The limit is ours or the engine's: a client may have no deadline at all.
                raise Unavailable(f"upload of a tensor timed out: {error.message}") from error
            except ServiceError as error:
                if num_tries == MAX_TRIES or not await self._may_try_again(error, num_replaced):
                    raise

    async def _try(self, tensor: WireTensor, *, delay_s: float) -> None:
        assert self._stub is not None, "there is a connection before there is an upload"
        try:
            await self._stub.UploadBlob(_parts(tensor, delay_s), timeout=_DEADLINE_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except grpc.aio.UsageError as error:
            raise Unavailable("the connection is closed") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Only the call was cancelled, with its channel.
            raise Unavailable("the connection was closed during an upload") from error

    async def _may_try_again(self, error: ServiceError, num_replaced: int) -> bool:
        """Wait until a retry may succeed; returns False if it cannot."""
        if isinstance(error, Unavailable):
            return await self._is_replaced(num_replaced)
        if isinstance(error, ResourceExhausted) and error.retry_after_ms is not None:
            delay_s = min(error.retry_after_ms / 1000, _MAX_DELAY_S)
            # With jitter: not at the same time as all others that were refused.
            await asyncio.sleep(delay_s * random.uniform(1.0, 1.5))
            return True
        return isinstance(error, Internal) and error.message == _ANSWER_LOST

    async def _is_replaced(self, num_replaced: int) -> bool:
        """Wait up to the reconnect time for a newer connection than number `num_replaced`."""
        try:
            async with asyncio.timeout(self._reconnect_s):
                while self._num_replaced == num_replaced:
                    await self._replaced.wait()
        except TimeoutError:
            return False
        return True


async def _parts(tensor: WireTensor, delay_s: float) -> AsyncIterator[engine_pb2.UploadBlobRequest]:
    header = engine_pb2.UploadBlobHeader(sha256=tensor.digest, size_bytes=len(tensor.data))
    yield engine_pb2.UploadBlobRequest(header=header)
    if delay_s:
        await asyncio.sleep(delay_s)
    for start in range(0, len(tensor.data), _CHUNK_BYTES):
        yield engine_pb2.UploadBlobRequest(chunk=tensor.data[start : start + _CHUNK_BYTES])
