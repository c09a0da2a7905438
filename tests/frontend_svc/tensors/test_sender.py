"""A tensor takes the cheapest way to its engine, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from frontend_svc.tensors.sender import INLINE_BYTES, TensorSender
from frontend_svc.tensors.uploads import MAX_TRIES, MAX_UPLOADS, Uploads
from frontend_svc.tensors.wire_tensor import WireTensor, num_bytes
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit import shared_memory
from triptych_kit.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    to_status,
)

FRONTEND = f"sender-{os.getpid()}"
SMALL = WireTensor.of(tensor_pb2.D_TYPE_UINT8, [INLINE_BYTES], bytes(INLINE_BYTES))
LARGE = WireTensor.of(tensor_pb2.D_TYPE_UINT8, [INLINE_BYTES + 1], b"x" * (INLINE_BYTES + 1))


class FakeStub:
    """Takes uploads when it is let."""

    def __init__(self) -> None:
        self.uploads: list[tuple[engine_pb2.UploadBlobHeader, bytes]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def UploadBlob(self, requests: AsyncIterator[Any], timeout: float) -> None:
        header, data = None, b""
        async for request in requests:
            if request.WhichOneof("part") == "header":
                header = request.header
            else:
                assert len(request.chunk) <= 1024 * 1024
                data += request.chunk
        assert header is not None
        self.uploads.append((header, data))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error


class Rig:
    def __init__(self, **options: Any) -> None:
        self.sent: list[add_pb2.AddEntry] = []
        self.has_sent = asyncio.Event()
        self.failed: list[tuple[int, ServiceError]] = []
        self.stub = FakeStub()
        self.sender = TensorSender(
            FRONTEND,
            send=self._note_sent,
            fail=self._note_failed,
            **options,
        )

    def send(self, *handles: int, tensor: WireTensor) -> None:
        entries = [add_pb2.AddEntry(handle=handle, request_id=str(handle)) for handle in handles]
        for entry in entries:
            entry.prompt_embeds.CopyFrom(tensor.reference)
        stub: Any = self.stub
        self.sender.send(entries, [tensor], stub)

    def _note_sent(self, entries: Sequence[add_pb2.AddEntry]) -> None:
        self.sent += entries
        self.has_sent.set()

    def _note_failed(self, handle: int, error: ServiceError) -> None:
        self.failed.append((handle, error))
        # Its end comes back at once, as from an output processor.
        self.sender.forget(handle)

    def meet_neighbour(self, session_id: str = "s") -> engine_pb2.ConnectRequest | None:
        secret = secrets.token_bytes(32)
        name = shared_memory.segment_name(f"engine-{os.getpid()}", secrets.randbits(60))
        probe = shared_memory.create(name, secret)
        answer = self.sender.greet(session_pb2.HelloAck(host_probe=name), session_id, False)
        probe.close()
        assert answer is not None
        assert answer.host_proof.digest == hmac.digest(secret, session_id.encode(), "sha256")
        return answer


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise TimeoutError("it does not come about")


def segments() -> list[str]:
    return [name for name in os.listdir(shared_memory.FOLDER) if shared_memory.is_name_of(name, FRONTEND)]


def test_a_tensor_is_known_by_its_digest_and_its_form():
    assert SMALL.digest == hashlib.sha256(SMALL.data).hexdigest()
    assert num_bytes(tensor_pb2.D_TYPE_BF16, [3, 5]) == 30
    assert num_bytes(tensor_pb2.D_TYPE_INT64, [0, 5]) == 0


def test_up_to_256_kib_travel_in_the_add():
    rig = Rig()
    rig.send(1, 2, tensor=SMALL)
    assert [entry.prompt_embeds.inline for entry in rig.sent] == [SMALL.data] * 2
    assert not rig.stub.uploads


async def test_a_neighbour_finds_more_in_shared_memory_once_for_all_outputs():
    rig = Rig()
    rig.meet_neighbour()
    rig.send(1, 2, tensor=LARGE)
    names = {entry.prompt_embeds.shm.name for entry in rig.sent}
    assert names == set(segments())
    assert len(names) == 1
    reference = rig.sent[0].prompt_embeds.shm
    assert shared_memory.read(reference.name, 0, reference.size) == LARGE.data
    rig.sender.forget(1)
    assert len(segments()) == 1
    rig.sender.forget(2)
    assert segments() == []


async def test_what_the_engine_has_taken_counts_no_more_against_the_limit():
    rig = Rig(max_shared_bytes=len(LARGE.data))
    rig.meet_neighbour()
    rig.send(1, tensor=LARGE)
    rig.stub.may_answer.set()
    rig.send(2, tensor=LARGE)
    # No room for a second one: it is uploaded.
    await until(lambda: len(rig.sent) == 2)
    assert rig.sent[1].prompt_embeds.WhichOneof("payload") == "blob"
    shared_memory.remove(rig.sent[0].prompt_embeds.shm.name)
    rig.send(3, tensor=LARGE)
    assert rig.sent[2].prompt_embeds.WhichOneof("payload") == "shm"
    for handle in (1, 2, 3):
        rig.sender.forget(handle)
    assert segments() == []


async def test_elsewhere_the_add_follows_its_upload():
    rig = Rig()
    assert rig.sender.greet(session_pb2.HelloAck(), "s", False) is None
    rig.send(1, 2, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    assert rig.sent == []
    rig.stub.may_answer.set()
    await until(lambda: bool(rig.sent))
    ((header, data),) = rig.stub.uploads
    assert (header.sha256, header.size_bytes, data) == (LARGE.digest, len(LARGE.data), LARGE.data)
    assert [entry.prompt_embeds.blob.sha256 for entry in rig.sent] == [LARGE.digest] * 2


async def test_an_upload_that_fails_fails_its_requests():
    rig = Rig()
    rig.stub.error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), details="full"
    )
    rig.stub.may_answer.set()
    rig.send(1, 2, tensor=LARGE)
    await until(lambda: bool(rig.failed))
    assert [handle for handle, _ in rig.failed] == [1, 2]
    assert isinstance(rig.failed[0][1], ResourceExhausted)
    assert rig.sent == []


def full(*, retry_after_ms: int) -> Exception:
    error = ResourceExhausted("full", retry_after_ms=retry_after_ms)
    metadata = grpc.aio.Metadata(*to_status(error).trailing_metadata)
    return grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), metadata, "full", None)


async def test_the_upload_of_requests_that_have_all_ended_ends_with_them():
    rig = Rig()
    rig.send(1, 2, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    rig.sender.forget(1)
    rig.sender.forget(2)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    rig.stub.may_answer.set()
    await asyncio.sleep(0)
    assert (rig.sent, rig.failed) == ([], [])


async def test_what_a_full_engine_refused_is_not_tried_again_for_requests_that_have_ended():
    rig = Rig()
    rig.stub.error = full(retry_after_ms=60_000)
    rig.stub.may_answer.set()
    rig.send(1, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    for _ in range(5):
        await asyncio.sleep(0)
    assert rig.failed == []
    rig.sender.forget(1)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert len(rig.stub.uploads) == 1
    assert (rig.sent, rig.failed) == ([], [])


async def test_requests_that_have_ended_keep_no_other_from_uploading():
    rig = Rig()
    dead = range(2 * MAX_UPLOADS)
    for handle in dead:
        rig.send(handle, tensor=LARGE)
    await until(lambda: len(rig.stub.uploads) == MAX_UPLOADS)
    for handle in dead:
        rig.sender.forget(handle)
    rig.send(100, tensor=LARGE)
    await until(lambda: len(rig.stub.uploads) == MAX_UPLOADS + 1)
    rig.stub.may_answer.set()
    await until(lambda: bool(rig.sent))
    assert [entry.handle for entry in rig.sent] == [100]


async def test_an_upload_goes_on_for_those_of_its_requests_that_have_not_ended():
    rig = Rig()
    rig.send(1, 2, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    rig.sender.forget(1)
    rig.stub.may_answer.set()
    await until(lambda: bool(rig.sent))
    assert [entry.handle for entry in rig.sent] == [2]
    assert len(rig.stub.uploads) == 1


async def test_an_upload_that_fails_fails_those_of_its_requests_that_have_not_ended():
    rig = Rig()
    rig.send(1, 2, 3, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    rig.sender.forget(2)
    rig.stub.error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), details="full"
    )
    rig.stub.may_answer.set()
    await until(lambda: bool(rig.failed))
    assert [handle for handle, _ in rig.failed] == [1, 3]


async def test_a_request_that_ends_as_its_upload_does_is_not_sent():
    rig = Rig()
    rig.send(1, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    rig.stub.may_answer.set()
    rig.sender.forget(1)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert (rig.sent, rig.failed) == ([], [])


async def test_nothing_is_sent_to_an_engine_that_was_lost_meanwhile():
    rig = Rig()
    rig.send(1, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    rig.sender.stop()
    rig.stub.may_answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (rig.sent, rig.failed) == ([], [])


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "triptych-" + "0" * 32 + "-1"])
def test_a_probe_that_cannot_be_read_is_no_evidence(name):
    rig = Rig()
    assert rig.sender.greet(session_pb2.HelloAck(host_probe=name), "s", False) is None


async def test_a_session_that_goes_on_keeps_its_neighbour_and_a_new_one_asks_again():
    rig = Rig()
    rig.stub.may_answer.set()
    rig.meet_neighbour()
    assert rig.sender.greet(session_pb2.HelloAck(), "s", True) is None
    rig.send(1, tensor=LARGE)
    assert rig.sent[0].prompt_embeds.WhichOneof("payload") == "shm"
    rig.sender.forget(1)
    rig.sender.greet(session_pb2.HelloAck(), "t", False)
    rig.send(2, tensor=LARGE)
    await until(lambda: len(rig.sent) == 2)
    assert rig.sent[1].prompt_embeds.WhichOneof("payload") == "blob"


async def test_what_a_new_connection_cuts_is_uploaded_over_it():
    rig, stub = Rig(), FakeStub()
    rig.send(1, 2, tensor=LARGE)
    await until(lambda: bool(rig.stub.uploads))
    rig.stub.error = asyncio.CancelledError()
    rig.stub.may_answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (rig.sent, rig.failed) == ([], [])
    stub.may_answer.set()
    next_stub: Any = stub
    rig.sender.go_on(next_stub)
    await asyncio.wait_for(rig.has_sent.wait(), 10)
    assert [entry.handle for entry in rig.sent] == [1, 2]
    assert [data for _, data in stub.uploads] == [LARGE.data]
    assert rig.failed == []


# Uploads that are cut, refused, or too many at once, against real calls.

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


class UploadRig:
    def __init__(self, address: str, store: FakeStore, **options: Any) -> None:
        self.store = store
        self.uploads = Uploads(**options)
        self.channels: list[grpc.aio.Channel] = []
        self._address = address
        self.uploads.use(self.connect())

    def connect(self) -> engine_pb2_grpc.EngineCoreServiceStub:
        self.channels.append(grpc.aio.insecure_channel(self._address))
        return engine_pb2_grpc.EngineCoreServiceStub(self.channels[-1])

    def start(self, tensor: WireTensor) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.uploads.upload(tensor))


@asynccontextmanager
async def rig_with_store(**options: Any) -> AsyncIterator[UploadRig]:
    server, store = grpc.aio.server(), FakeStore()
    engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    rig = UploadRig(f"127.0.0.1:{port}", store, **options)
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


async def test_uploads_that_are_stopped_leave_their_slots_to_others(caplog):
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
