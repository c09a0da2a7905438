"""Tensors over a real stream: what proves a host, what a reference without proof costs, what is announced."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from engine_svc.session.session import Session
from engine_svc.tensors.source import TensorDoor
from service_kit import shared_memory
from tests.engine_svc.session.service_rig import ServiceRig, StreamClient, make_entry, make_facts, serving
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, session_pb2

HIDDEN = 4
DATA = bytes(2 * HIDDEN * 4)


def open_rig() -> ServiceRig:
    facts = replace(make_facts(), hidden_size=HIDDEN, takes_prompt_embeds=True)
    return ServiceRig(facts=facts, tensors=TensorDoor(is_open=True))


def entry_with(handle: int, **payload: object) -> add_pb2.AddEntry:
    entry = make_entry(handle)
    entry.ClearField("prompt_token_ids")
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[2, HIDDEN], **payload)
    entry.prompt_embeds.CopyFrom(tensor)
    return entry


def ack_of(client: StreamClient) -> session_pb2.HelloAck:
    return client.heard[0].hello_ack


def proof(digest: bytes) -> engine_pb2.ConnectRequest:
    return engine_pb2.ConnectRequest(host_proof=session_pb2.HostProof(digest=digest))


async def opened(stub: object, name: str) -> StreamClient:
    client = StreamClient(stub, name)  # type: ignore[arg-type]
    await client.open()
    await client.until(lambda: bool(client.heard))
    return client


async def test_a_proven_neighbour_sends_by_shared_memory_and_others_lose_that_request_alone():
    async with serving(open_rig()) as stub:
        near, far = await opened(stub, "near"), await opened(stub, "far")
        secret = shared_memory.read(ack_of(near).host_probe, 0, 32)
        await near.send(proof(hmac.digest(secret, (near.frontend_id * 4).encode(), "sha256")))
        for handle, client in ((1, near), (2, far)):
            segment = shared_memory.create(shared_memory.segment_name(client.frontend_id, handle), DATA)
            reference = tensor_pb2.SharedMemoryReference(name=segment.name, size=len(DATA))
            await client.add(entry_with(handle, shm=reference))
            await client.add(entry_with(handle + 10, inline=DATA))
            await client.until_ended(handle + 10)
            assert segment.is_taken == (client is near)
            segment.close()
        await near.until_ended(1)
        assert near.rejected == {}
        assert far.rejected[2].status.code == grpc.StatusCode.PERMISSION_DENIED.value[0]


async def test_a_wrong_proof_ends_the_session():
    async with serving(open_rig()) as stub:
        client = await opened(stub, "liar")
        await client.send(proof(bytes(32)))
        await client.until(lambda: client.is_over)
        assert client.error is not None
        assert client.error.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_an_uploaded_blob_is_a_prompt():
    digest = hashlib.sha256(DATA).hexdigest()

    async def upload() -> AsyncIterator[engine_pb2.UploadBlobRequest]:
        header = engine_pb2.UploadBlobHeader(sha256=digest, size_bytes=len(DATA))
        yield engine_pb2.UploadBlobRequest(header=header)
        yield engine_pb2.UploadBlobRequest(chunk=DATA)

    async with serving(open_rig()) as stub:
        assert (await stub.UploadBlob(upload(), timeout=10)).sha256 == digest
        client = await opened(stub, "uploader")
        blob = tensor_pb2.BlobReference(sha256=digest, size=len(DATA))
        await client.add(entry_with(1, blob=blob))
        await client.until_ended(1)
        assert client.rejected == {}


async def test_an_engine_that_takes_no_tensors_probes_nobody_and_refuses_uploads():
    async def upload() -> AsyncIterator[engine_pb2.UploadBlobRequest]:
        yield engine_pb2.UploadBlobRequest(header=engine_pb2.UploadBlobHeader())

    async with serving(ServiceRig()) as stub:
        client = await opened(stub, "any")
        assert ack_of(client).host_probe == ""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.UploadBlob(upload(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await client.add(entry_with(1, inline=DATA))
        await client.until(lambda: bool(client.rejected))
        assert client.rejected[1].status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]


async def test_each_tensor_of_a_message_lets_others_have_the_loop():
    rig = open_rig()
    async with serving(rig):
        hello = session_pb2.Hello(frontend_id="f", session_id="ab" * 16)
        session = Session(rig.engine, hello, number=99, on_finished=lambda: None)
        add = add_pb2.Add(entries=[entry_with(handle, inline=DATA) for handle in range(5)])
        num_turns = 0

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(count_turns())
        await session.take(engine_pb2.ConnectRequest(add=add))
        other.cancel()
        assert num_turns >= 5
        session.end()


async def test_frontends_learn_the_width_of_embeddings_and_that_they_are_taken():
    async with serving(open_rig()) as stub:
        ready = (await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)).ready
        assert (ready.hidden_size, ready.takes_prompt_embeds) == (HIDDEN, True)
