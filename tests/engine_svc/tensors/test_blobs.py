"""Uploads: whole or not at all, once for a digest, within limits of size, number and time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from engine_svc.tensors.blobs import BlobStore, BlobUploads
from engine_svc.tensors.host_tensor import HostTensor
from triptych.engine.v1 import engine_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import InvalidArgument, ResourceExhausted

MAX_BLOB = 4096


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def header_of(data: bytes, **fields: object) -> engine_pb2.UploadBlobRequest:
    values = {"sha256": digest_of(data), "size_bytes": len(data), **fields}
    return engine_pb2.UploadBlobRequest(header=engine_pb2.UploadBlobHeader(**values))


async def parts(
    *messages: engine_pb2.UploadBlobRequest | bytes,
) -> AsyncIterator[engine_pb2.UploadBlobRequest]:
    for message in messages:
        yield engine_pb2.UploadBlobRequest(chunk=message) if isinstance(message, bytes) else message


class Rig:
    def __init__(self, max_bytes: int = 10_000) -> None:
        self.clock = FakeClock()
        self.store = BlobStore(self.clock, max_bytes)
        self.uploads = BlobUploads(self.store, MAX_BLOB)

    async def upload(self, data: bytes, **fields: object) -> engine_pb2.UploadBlobResponse:
        return await self.uploads.receive(parts(header_of(data, **fields), data[:700], data[700:]))

    def use(self, data: bytes) -> HostTensor:
        found = self.store.get(digest_of(data))
        assert found is not None
        tensor = HostTensor("uint8", (len(found),), found)
        self.store.pin(digest_of(data), tensor)
        return tensor


async def test_chunks_become_the_blob_that_the_header_names():
    rig, data = Rig(), bytes(range(256)) * 4
    response = await rig.upload(data)
    assert (response.sha256, response.ttl_ms) == (digest_of(data), 60_000)
    assert rig.store.get(digest_of(data)) == data
    assert (await rig.upload(b"x" * 900, ttl_ms=500)).ttl_ms == 500


async def test_a_blob_that_is_there_is_answered_without_its_bytes():
    rig, data = Rig(), b"a" * 1000
    await rig.upload(data)

    async def header_alone() -> AsyncIterator[engine_pb2.UploadBlobRequest]:
        yield header_of(data)
        raise AssertionError("nothing behind the header is read")

    assert (await rig.uploads.receive(header_alone())).sha256 == digest_of(data)
    assert (len(rig.store), rig.store.used_bytes) == (1, 1000)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "header"),
        ([b"no header"], "header"),
        ([header_of(b"ab", sha256="AB" * 32), b"ab"], "header.sha256"),
        ([header_of(b"ab", sha256="ab"), b"ab"], "header.sha256"),
        ([header_of(b"ab", sha256=digest_of(b"xy")), b"ab"], "header.sha256"),
        ([header_of(b"")], "header.size_bytes"),
        ([header_of(b"", size_bytes=MAX_BLOB + 1)], "header.size_bytes"),
        ([header_of(b"abc"), b"ab"], "header.size_bytes"),
        ([header_of(b"ab"), b"abc"], "chunk"),
        ([header_of(b"ab"), header_of(b"ab")], "chunk"),
        ([header_of(bytes(2)), bytes(2**20 + 1)], "chunk"),
    ],
)
async def test_what_is_not_as_the_header_says_is_refused_and_takes_no_room(messages, field):
    rig = Rig()
    with pytest.raises(InvalidArgument) as caught:
        await rig.uploads.receive(parts(*messages))
    assert [name for name, _ in caught.value.violations] == [field]
    assert len(rig.store) == 0
    assert rig.store.reserve(rig.store.max_bytes)


async def test_a_blob_goes_when_its_time_since_the_last_use_is_over():
    rig, data = Rig(), b"a" * 1000
    await rig.upload(data)
    rig.clock.advance(59)
    tensor: HostTensor | None = rig.use(data)
    rig.clock.advance(600)
    rig.store.expire()
    assert tensor is not None and len(rig.store) == 1
    tensor = None
    rig.store.expire()
    rig.clock.advance(59)
    rig.store.expire()
    assert len(rig.store) == 1
    rig.clock.advance(1)
    rig.store.expire()
    assert (len(rig.store), rig.store.used_bytes) == (0, 0)


async def test_room_is_made_by_the_unused_blob_that_was_used_longest_ago():
    rig = Rig(max_bytes=3000)
    first, second, third, fourth = (bytes([value]) * 1000 for value in range(4))
    for data in (first, second, third):
        await rig.upload(data)
    rig.store.touch(digest_of(first))
    held = rig.use(second)
    await rig.upload(fourth)
    assert [rig.store.get(digest_of(data)) is not None for data in (first, second, third, fourth)] == [
        True, True, False, True,
    ]  # fmt: skip
    assert held.data == second


async def test_blobs_in_use_are_never_dropped_for_others():
    rig = Rig(max_bytes=2000)
    held = []
    for value in range(2):
        data = bytes([value]) * 1000
        await rig.upload(data)
        held.append(rig.use(data))
    with pytest.raises(ResourceExhausted) as caught:
        await rig.upload(b"z" * 1000)
    assert caught.value.retry_after_ms
    held.clear()
    await rig.upload(b"z" * 1000)


async def test_of_too_many_uploads_at_once_the_last_is_refused():
    rig, may_go = Rig(max_bytes=100_000), asyncio.Event()

    async def slow(value: int) -> AsyncIterator[engine_pb2.UploadBlobRequest]:
        data = bytes([value]) * 1000
        yield header_of(data)
        await may_go.wait()
        yield engine_pb2.UploadBlobRequest(chunk=data)

    running = [asyncio.create_task(rig.uploads.receive(slow(value))) for value in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="8 uploads"):
        await rig.upload(b"one more")
    may_go.set()
    await asyncio.gather(*running)
    await rig.upload(b"one more")
    assert len(rig.store) == 9


async def test_an_upload_that_breaks_off_gives_its_room_back():
    rig = Rig(max_bytes=1000)
    never = asyncio.Event()

    async def stuck() -> AsyncIterator[engine_pb2.UploadBlobRequest]:
        yield header_of(b"a" * 1000)
        await never.wait()

    task = asyncio.create_task(rig.uploads.receive(stuck()))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted):
        await rig.upload(b"b" * 1000)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.upload(b"b" * 1000)
