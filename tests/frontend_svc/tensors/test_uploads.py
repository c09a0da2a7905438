"""Uploads that are cut, refused, or too many at once, against real calls."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from frontend_svc.tensors.uploads import MAX_TRIES, MAX_UPLOADS, Uploads
from frontend_svc.tensors.wire_tensor import WireTensor
from service_kit.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    to_status,
)
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc

WAIT_S = 60.0
FULL: ServiceError = ResourceExhausted("full", retry_after_ms=1)


def tensor_of(seed: int, num_bytes: int = 3 * 1024 * 1024) -> WireTensor:
    return WireTensor.of(tensor_pb2.D_TYPE_UINT8, [num_bytes], bytes([seed]) * num_bytes)


class FakeStore(engine_pb2_grpc.EngineCoreServiceServicer):
    """Stores what it is let. `refusals` answer the next calls, before a chunk is read."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.num_calls = 0
        self.num_running = 0
        self.max_running = 0
        self.refusals: list[ServiceError] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.changed = asyncio.Event()

    async def UploadBlob(
        self, requests: AsyncIterator[engine_pb2.UploadBlobRequest], context: Any
    ) -> engine_pb2.UploadBlobResponse:
        self.num_calls += 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self.changed.set()
        try:
            await anext(aiter(requests))
            if self.refusals:
                await context.abort_with_status(to_status(self.refusals.pop(0)))
            digest = hashlib.sha256()
            async for request in requests:
                await self.may_read.wait()
                digest.update(request.chunk)
            self.stored.append(digest.hexdigest())
        finally:
            self.num_running -= 1
        return engine_pb2.UploadBlobResponse(sha256=self.stored[-1])

    async def until_running(self, num_calls: int) -> None:
        """Wait until so many calls run at once."""
        async with asyncio.timeout(WAIT_S):
            while self.num_running < num_calls:
                self.changed.clear()
                await self.changed.wait()


class LosingStub:
    """Loses the answer to its first call, as gRPC does of a call that ends while it is written to."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def UploadBlob(
        self, requests: AsyncIterator[engine_pb2.UploadBlobRequest], timeout: float
    ) -> engine_pb2.UploadBlobResponse:
        self.num_calls += 1
        if self.num_calls == 1:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core", None
            )
        return engine_pb2.UploadBlobResponse()


class Rig:
    def __init__(self, address: str, store: FakeStore, **options: Any) -> None:
        self.store = store
        self.uploads = Uploads(**options)
        self.channels: list[grpc.aio.Channel] = []
        self._address = address
        self.uploads.use(self.connect())

    def connect(self) -> engine_pb2_grpc.EngineCoreServiceStub:
        """Another connection to the store."""
        self.channels.append(grpc.aio.insecure_channel(self._address))
        return engine_pb2_grpc.EngineCoreServiceStub(self.channels[-1])

    def start(self, tensor: WireTensor) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.uploads.upload(tensor))


@asynccontextmanager
async def rig_with_store(**options: Any) -> AsyncIterator[Rig]:
    server, store = grpc.aio.server(), FakeStore()
    engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    rig = Rig(f"127.0.0.1:{port}", store, **options)
    try:
        yield rig
    finally:
        for channel in rig.channels:
            await channel.close(None)
        await server.stop(0)


@pytest.mark.parametrize("num_uploads", [1, 2 * MAX_UPLOADS])
async def test_uploads_that_end_with_their_connection_are_repeated_over_the_next(num_uploads: int) -> None:
    async with rig_with_store() as rig:
        rig.store.may_read.clear()
        tensors = [tensor_of(seed) for seed in range(num_uploads)]
        running = [rig.start(tensor) for tensor in tensors]
        await rig.store.until_running(min(num_uploads, MAX_UPLOADS))
        await rig.channels[0].close(None)
        rig.store.may_read.set()
        rig.uploads.go_on(rig.connect())
        await asyncio.wait_for(asyncio.gather(*running), WAIT_S)
        assert {tensor.digest for tensor in tensors} <= set(rig.store.stored)


async def test_an_upload_whose_connection_is_not_replaced_fails_as_one_that_may_go_elsewhere() -> None:
    async with rig_with_store(reconnect_s=0.0) as rig:
        await rig.channels[0].close(None)
        with pytest.raises(Unavailable, match="the connection is closed"):
            await asyncio.wait_for(rig.uploads.upload(tensor_of(1)), WAIT_S)


async def test_an_upload_that_fails_with_the_wire_waits_for_the_next_connection() -> None:
    async with rig_with_store() as rig:
        rig.store.refusals = [Unavailable("socket closed")]
        running = rig.start(tensor_of(1))
        await rig.store.until_running(1)
        rig.uploads.go_on(rig.connect())
        await asyncio.wait_for(running, WAIT_S)
        assert rig.store.stored == [tensor_of(1).digest]


async def test_an_upload_whose_answer_was_lost_asks_again() -> None:
    stub = LosingStub()
    uploads, any_stub = Uploads(), cast(Any, stub)
    uploads.use(any_stub)
    await asyncio.wait_for(uploads.upload(tensor_of(1)), WAIT_S)
    assert stub.num_calls == 2


async def test_an_upload_that_is_stopped_ends_as_such() -> None:
    async with rig_with_store() as rig:
        rig.store.may_read.clear()
        running = rig.start(tensor_of(1))
        await rig.store.until_running(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, WAIT_S)


async def test_uploads_that_are_stopped_leave_their_places_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig_with_store() as rig:
        rig.store.may_read.clear()
        stopped = [rig.start(tensor_of(seed)) for seed in range(2 * MAX_UPLOADS)]
        await rig.store.until_running(MAX_UPLOADS)
        for running in stopped:
            running.cancel()
        await asyncio.wait(stopped)
        rig.store.may_read.set()
        await asyncio.wait_for(rig.uploads.upload(tensor_of(99)), WAIT_S)
        assert all(running.cancelled() for running in stopped)
        assert tensor_of(99).digest in rig.store.stored
    del stopped, running
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_no_more_uploads_run_at_once_than_leave_room_for_other_frontends() -> None:
    async with rig_with_store() as rig:
        rig.store.may_read.clear()
        running = [rig.start(tensor_of(seed)) for seed in range(3 * MAX_UPLOADS)]
        await rig.store.until_running(MAX_UPLOADS)
        rig.store.may_read.set()
        await asyncio.wait_for(asyncio.gather(*running), WAIT_S)
        assert rig.store.max_running == MAX_UPLOADS
        assert len(rig.store.stored) == 3 * MAX_UPLOADS


async def test_an_upload_that_is_refused_for_now_is_tried_again() -> None:
    async with rig_with_store() as rig:
        rig.store.refusals = [FULL, FULL]
        await asyncio.wait_for(rig.uploads.upload(tensor_of(1)), WAIT_S)
        assert rig.store.stored == [tensor_of(1).digest]
        assert rig.store.num_calls == 3


async def test_an_upload_that_is_refused_again_and_again_fails() -> None:
    async with rig_with_store() as rig:
        rig.store.refusals = [FULL] * 2 * MAX_TRIES
        with pytest.raises(ResourceExhausted, match="full"):
            await asyncio.wait_for(rig.uploads.upload(tensor_of(1)), WAIT_S)
        assert rig.store.num_calls == MAX_TRIES


async def test_an_upload_that_takes_too_long_fails_as_one_that_may_go_elsewhere() -> None:
    async with rig_with_store() as rig:
        # The limit of the upload, whether it ends here or there, and none that a client has set.
        rig.store.refusals = [DeadlineExceeded("the upload took more than 30 s")]
        with pytest.raises(Unavailable, match="the upload took more than 30 s"):
            await asyncio.wait_for(rig.uploads.upload(tensor_of(1, num_bytes=1)), WAIT_S)
        assert rig.store.num_calls == 1


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), ResourceExhausted("too large for ever")])
async def test_an_upload_that_is_refused_for_good_fails_at_once(error: ServiceError) -> None:
    async with rig_with_store() as rig:
        rig.store.refusals = [error]
        with pytest.raises(type(error), match=error.message):
            await asyncio.wait_for(rig.uploads.upload(tensor_of(1, num_bytes=1)), WAIT_S)
        assert rig.store.num_calls == 1
