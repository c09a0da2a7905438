"""Where a tensor may come from: the message, a blob, shared memory of a proven neighbour."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine_svc.tensors.host_tensor import ITEM_SIZES, BadTensor, HostTensor
from engine_svc.tensors.source import TensorMemory, TensorReceiver, TensorSource
from engine_svc.tensors.to_torch import to_torch, torch_dtype
from triptych.common.v1 import tensor_pb2
from triptych_kit import shared_memory
from triptych_kit.errors import (
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
)

FRONTEND = f"frontend-{os.getpid()}"
SESSION = "ab" * 16
DATA = bytes(range(24))


def proof_of(source: TensorSource, session_id: str = SESSION) -> bytes:
    return hmac.digest(shared_memory.read(source.probe_name, 0, 32), session_id.encode(), "sha256")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """As for a moment when too many files are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def tensor(shape=(2, 3), dtype=tensor_pb2.D_TYPE_FP32, **payload: object) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, **payload)


def shared(name: str, size: int = len(DATA), offset: int = 0) -> tensor_pb2.Tensor:
    reference = tensor_pb2.SharedMemoryReference(name=name, offset=offset, size=size, owner=FRONTEND)
    return tensor(shm=reference)


@pytest.fixture
def receiver():
    return TensorReceiver(is_open=True, max_held_bytes=100)


@pytest.fixture
def source(receiver):
    source = receiver.source(FRONTEND, SESSION)
    yield source
    source.close()


@pytest.fixture
def segment():
    made = shared_memory.create(shared_memory.segment_name(FRONTEND, 1), DATA)
    yield made
    made.close()


def test_bytes_in_the_message_are_the_tensor(source):
    taken = source.take(tensor(inline=DATA), "x")
    assert (taken.dtype, taken.shape, taken.data) == ("float32", (2, 3), DATA)


def test_a_blob_stays_as_long_as_its_tensor(receiver, source):
    digest = hashlib.sha256(DATA).hexdigest()
    receiver.blobs.put(digest, DATA, ttl_s=0.0)
    reference = tensor_pb2.BlobReference(sha256=digest, size=len(DATA))
    taken = source.take(tensor(blob=reference), "x")
    receiver.beat()
    assert (taken.data, len(receiver.blobs)) == (DATA, 1)
    del taken
    receiver.beat()
    assert len(receiver.blobs) == 0
    with pytest.raises(Unavailable) as caught:
        source.take(tensor(blob=reference), "x")
    assert caught.value.reason == "BLOB_NOT_FOUND"


def test_shared_memory_is_taken_from_a_proven_neighbour_and_gone_after_the_message(source, segment):
    assert source.verify_host(proof_of(source))
    assert source.probe_name == ""
    first = source.take(shared(segment.name), "x")
    # The outputs of a sampling group share one tensor.
    assert source.take(shared(segment.name), "x") is first
    assert (first.data, segment.is_taken) == (DATA, False)
    source.release()
    assert segment.is_taken


def test_shared_memory_of_an_unverified_host_is_not_read(source, segment):
    with pytest.raises(PermissionDenied) as caught:
        source.take(shared(segment.name), "x")
    assert caught.value.reason == "HOST_NOT_PROVEN"
    assert not segment.is_taken


def test_there_is_one_attempt_to_prove_a_host(source, segment):
    proof = proof_of(source)
    assert not source.verify_host(b"guessed".ljust(32))
    assert not source.verify_host(proof)
    with pytest.raises(PermissionDenied):
        source.take(shared(segment.name), "x")


def test_a_proof_is_of_one_session(receiver, source):
    other = receiver.source(FRONTEND, "cd" * 16)
    assert not source.verify_host(proof_of(other))
    assert not other.verify_host(proof_of(other, SESSION))
    other.close()


def test_a_probe_goes_with_its_session(receiver):
    source = receiver.source(FRONTEND, SESSION)
    name = source.probe_name
    assert (shared_memory.FOLDER / name).exists()
    source.close()
    assert not (shared_memory.FOLDER / name).exists()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda name: shared("../" + name), "x.shm.name"),
        (lambda name: shared(shared_memory.segment_name("another frontend", 1)), "x.shm.name"),
        (lambda name: shared(shared_memory.segment_name(FRONTEND, 2)), "x.shm"),
        (lambda name: shared(name, offset=1), "x.shm"),
        (lambda name: shared(name, offset=2**63), "x.shm"),
        (lambda name: shared(name, size=25), "x"),
        (lambda name: tensor(inline=DATA[1:]), "x"),
        (lambda name: tensor(inline=DATA, shape=(2**40, 2**40)), "x"),
        (lambda name: tensor(inline=DATA, shape=(2**63, 2)), "x"),
        (lambda name: tensor(inline=DATA, shape=(2, 3, *[1] * 7)), "x"),
        (lambda name: tensor(inline=DATA, dtype=tensor_pb2.D_TYPE_UNSPECIFIED), "x.dtype"),
        (lambda name: tensor(inline=DATA, dtype=99), "x.dtype"),
        (lambda name: tensor(), "x"),
        (lambda name: tensor_pb2.Tensor(), "x.dtype"),
    ],
)
def test_a_reference_or_form_that_is_wrong_is_refused_by_field(source, segment, make, field):
    source.verify_host(proof_of(source))
    with pytest.raises(InvalidArgument) as caught:
        source.take(make(segment.name), "x")
    assert [name for name, _ in caught.value.violations] == [field]
    source.release()
    assert not segment.is_taken


def test_an_unknown_transport_is_refused_by_name(source):
    with pytest.raises(Unimplemented, match=r"x\.remote"):
        source.take(tensor(remote=tensor_pb2.RemoteReference(transport="rdma")), "x")


def test_an_engine_without_descriptors_beats_on_says_so_once_and_sweeps_again_later(receiver, caplog):
    left = shared_memory.FOLDER / shared_memory.segment_name(FRONTEND, 3)
    left.write_bytes(b"left by a dead process")
    with no_descriptors():
        for _ in range(6):
            receiver.beat()
    assert [record.message for record in caplog.records] == ["shared memory not swept"]
    assert left.exists()
    for _ in range(2):
        receiver.beat()
    assert not left.exists()


def test_what_cannot_be_read_for_a_moment_is_no_fault_of_the_client(source, segment):
    source.verify_host(proof_of(source))
    with no_descriptors(), pytest.raises(Unavailable, match="just now") as caught:
        source.take(shared(segment.name), "x")
    assert caught.value.retry_after_ms
    assert source.take(shared(segment.name), "x").data == DATA


def test_a_segment_that_cannot_be_removed_keeps_no_session_from_going_on(source, segment):
    source.verify_host(proof_of(source))
    source.take(shared(segment.name), "x")
    path = shared_memory.FOLDER / segment.name
    # The system refuses to unlink a folder.
    path.unlink()
    path.mkdir()
    try:
        source.release()
    finally:
        path.rmdir()
    assert source.take(tensor(inline=DATA), "x").data == DATA


def test_requests_hold_no_more_bytes_than_the_engine_takes(receiver, source):
    held = [source.take(tensor(inline=DATA), "x") for _ in range(4)]
    with pytest.raises(ResourceExhausted) as caught:
        source.take(tensor(inline=DATA), "x")
    assert caught.value.retry_after_ms
    held.pop()
    assert source.take(tensor(inline=DATA), "x").data == DATA


async def test_a_door_that_is_not_open_takes_nothing_and_shows_nothing():
    receiver = TensorReceiver()
    source = receiver.source(FRONTEND, SESSION)
    assert source.probe_name == ""
    with pytest.raises(ServiceError, match="not served"):
        source.take(tensor(inline=DATA), "x")

    async def nothing():
        return
        yield

    with pytest.raises(Unimplemented, match="takes no tensors"):
        await receiver.upload(nothing())


# Bytes that requests hold are counted from when they came until they are released.


def test_a_tensor_counts_until_the_last_holder_lets_go():
    memory = TensorMemory(100)
    tensor: HostTensor | None = HostTensor("uint8", (60,), bytes(60))
    memory.count(tensor)
    held = [tensor]
    assert (memory.used_bytes, memory.has_room(40), memory.has_room(41)) == (60, True, False)
    tensor = None
    assert memory.used_bytes == 60
    held.clear()
    assert (memory.used_bytes, memory.has_room(100)) == (0, True)


# What is a tensor, what is none, and that it comes to torch as it was.


def host_tensor(values: torch.Tensor) -> HostTensor:
    """What a sender makes of a tensor, strided or not."""
    raw = bytes(values.contiguous().reshape(-1).view(torch.uint8).tolist()) if values.numel() else b""
    return HostTensor(str(values.dtype).removeprefix("torch."), tuple(values.shape), raw)


@pytest.mark.parametrize("dtype", ITEM_SIZES)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0, 8), (2, 0, 3)], ids=str)
def test_every_type_and_shape_round_trips_bit_by_bit(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    sent = (torch.randint(0, 2, shape, generator=generator) * 3 - 1).to(torch_dtype(dtype))
    came = to_torch(host_tensor(sent))
    assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
    assert torch.equal(came.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def test_a_strided_tensor_comes_in_the_order_of_its_indices():
    sent = torch.arange(24.0).reshape(4, 6)[::2, 1::2].t()
    assert not sent.is_contiguous()
    assert torch.equal(to_torch(host_tensor(sent)), sent)


def test_what_is_done_to_a_tensor_leaves_the_message_as_it_came():
    message = host_tensor(torch.ones(3))
    before = message.data
    to_torch(message).fill_(5.0)
    assert message.data == before == host_tensor(torch.ones(3)).data


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "what"),
    [
        ("float32", (2, 2), bytes(15), "16 bytes, 15 came"),
        ("float32", (2, 2), bytes(17), "16 bytes, 17 came"),
        ("float32", (0, 2), bytes(4), "0 bytes, 4 came"),
        ("float32", (2**40, 2**40), b"", f"{2**82} bytes, 0 came"),
        ("complex64", (1,), bytes(8), "dtype is complex64"),
        ("object", (1,), bytes(8), "dtype is object"),
    ],
)
def test_bytes_that_do_not_belong_to_the_form_are_no_tensor(dtype, shape, data, what):
    with pytest.raises(BadTensor, match=what):
        HostTensor(dtype, shape, data)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_element_that_is_no_number_is_found(dtype, bad):
    if dtype == "float8_e4m3fn":
        # It has no infinity.
        bad = math.nan
    values = torch.tensor([0.0, -1.0, 2.0])
    assert host_tensor(values.to(torch_dtype(dtype))).is_sound
    values[1] = bad
    assert not host_tensor(values.to(torch_dtype(dtype))).is_sound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_float16_cannot_hold_is_not_moderate(dtype):
    def values(largest: float) -> HostTensor:
        return host_tensor(torch.tensor([0.0, -largest, 1.0]).to(torch_dtype(dtype)))

    assert values(60_000.0).is_moderate
    for beyond in (70_000.0, 3e38):
        # What is infinite there is another mistake.
        assert values(beyond).is_moderate is (dtype == "float16")


def test_integers_are_sound_and_booleans_are_0_or_1():
    assert HostTensor("int64", (1,), b"\xff" * 8).is_sound
    assert HostTensor("bool", (2,), b"\0\1").is_sound
    assert not HostTensor("bool", (2,), b"\0\2").is_sound
