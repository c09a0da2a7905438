"""Gets a tensor's bytes from the message, from a blob, or from shared memory of a frontend on this host."""

from __future__ import annotations

import errno
import hmac
import itertools
import logging
import secrets
import weakref
from collections import deque
from collections.abc import AsyncIterable

from engine_svc.tensors.blobs import BlobStore, BlobUploads
from engine_svc.tensors.host_tensor import BadTensor, HostTensor, size_bytes
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import engine_pb2
from triptych_kit import shared_memory
from triptych_kit.clock import Clock, MonotonicClock
from triptych_kit.errors import (
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from triptych_kit.field_checks import unserved
from triptych_kit.rules import rules_of

logger = logging.getLogger(__name__)

_MAX_TENSOR_BYTES = rules_of(tensor_pb2.Tensor, "inline").max_bytes
_MAX_DIMENSIONS = rules_of(tensor_pb2.Tensor, "shape").max_items
_MAX_STORE_BYTES = 512 * 1024 * 1024
_MAX_HELD_BYTES = 512 * 1024 * 1024
_RETRY_AFTER_MS = 1000
_SECRET_BYTES = 32
# Heartbeats between two sweeps for segments of dead processes: 1 s.
_BEATS_A_SWEEP = 2
# Shortages of the system that may pass, as opposed to errors of the segment.
_PASSING_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

_DTYPES = {
    tensor_pb2.D_TYPE_FP32: "float32",
    tensor_pb2.D_TYPE_FP16: "float16",
    tensor_pb2.D_TYPE_BF16: "bfloat16",
    tensor_pb2.D_TYPE_FP8: "float8_e4m3fn",
    tensor_pb2.D_TYPE_INT64: "int64",
    tensor_pb2.D_TYPE_INT32: "int32",
    tensor_pb2.D_TYPE_UINT8: "uint8",
    tensor_pb2.D_TYPE_INT8: "int8",
    tensor_pb2.D_TYPE_BOOL: "bool",
}


class TensorReceiver:
    """Tensor resources of one engine: the blob store, the limit of tensor memory, its shared memory segments.

    Accepts no tensors unless `is_open`. Belongs to the event loop.
    """

    def __init__(
        self,
        *,
        is_open: bool = False,
        clock: Clock | None = None,
        max_held_bytes: int = _MAX_HELD_BYTES,
    ) -> None:
        self.is_open = is_open
        self.blobs = BlobStore(clock or MonotonicClock(), _MAX_STORE_BYTES)
        self.memory = TensorMemory(max_held_bytes)
        self._uploads = BlobUploads(self.blobs, _MAX_TENSOR_BYTES)
        self._owner_id = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._num_beats = 0
        self._has_shared_memory = is_open and shared_memory.is_available()
        self._was_swept = True
        if self._has_shared_memory:
            self._sweep()

    async def upload(
        self, requests: AsyncIterable[engine_pb2.UploadBlobRequest]
    ) -> engine_pb2.UploadBlobResponse:
        """Serve one UploadBlob; see BlobUploads.receive."""
        if not self.is_open:
            raise Unimplemented("this engine takes no tensors: no feature that does is enabled")
        return await self._uploads.receive(requests)

    def source(self, frontend_id: str, session_id: str) -> TensorSource:
        """The tensors of one session."""
        probe = None
        if self._has_shared_memory:
            name = shared_memory.segment_name(self._owner_id, next(self._numbers))
            probe = HostProbe.make(name, session_id)
        return TensorSource(self, frontend_id, probe)

    def beat(self) -> None:
        """Expire blobs, and now and then remove what killed frontends left in shared memory."""
        self.blobs.expire()
        self._num_beats += 1
        if self._has_shared_memory and self._num_beats % _BEATS_A_SWEEP == 0:
            self._sweep()

    def _sweep(self) -> None:
        try:
            shared_memory.sweep()
        except OSError as error:
            # Logged once, not with each heartbeat, until a sweep succeeds.
            if self._was_swept:
                logger.warning("shared memory not swept", extra={"reason": error.strerror})
            self._was_swept = False
        else:
            self._was_swept = True


class TensorSource:
    """The tensors of one session, taken when their request is added."""

    def __init__(self, receiver: TensorReceiver, frontend_id: str, probe: HostProbe | None) -> None:
        self._receiver = receiver
        self._frontend_id = frontend_id
        self._probe = probe
        self._is_neighbour = False
        # Of the current message: the requests of a sampling group share their tensor.
        self._taken: dict[tuple[str, int], HostTensor] = {}
        self.has_taken = False  # whether requests of the current message have tensors

    @property
    def probe_name(self) -> str:
        """The name to offer in hello_ack; empty if there is none, or it was used."""
        return "" if self._probe is None else self._probe.name

    def verify_host(self, digest: bytes) -> bool:
        """Check a frontend's proof that it is on this host; there is one attempt. False if it is invalid."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()
            self._is_neighbour = probe.is_valid(digest)
        return self._is_neighbour

    def take(self, tensor: tensor_pb2.Tensor, field: str) -> HostTensor:
        """The tensor with its bytes, in this process's memory. Errors name `field`, never the content."""
        if not self._receiver.is_open:
            raise unserved(field)
        self.has_taken = True
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise InvalidArgument(
                f"{field}.dtype is {tensor.dtype}, which is no known type", field=f"{field}.dtype"
            )
        shape = tuple(tensor.shape)
        try:
            if len(shape) > _MAX_DIMENSIONS:
                raise BadTensor(f"shape has {len(shape)} dimensions, it takes at most {_MAX_DIMENSIONS}")
            num_bytes = size_bytes(dtype, shape)
            if num_bytes > _MAX_TENSOR_BYTES:
                raise BadTensor(f"shape {list(shape)} is {num_bytes} bytes, it takes {_MAX_TENSOR_BYTES}")
            match tensor.WhichOneof("payload"):
                case "inline":
                    return self._counted(HostTensor(dtype, shape, tensor.inline))
                case "blob":
                    return self._from_blob(dtype, shape, tensor.blob, field)
                case "shm":
                    return self._from_shared_memory(dtype, shape, tensor.shm, num_bytes, field)
                case "remote":
                    raise Unimplemented(
                        f"{field}.remote: no transport is registered",
                        reason="UNIMPLEMENTED_FIELD",
                        metadata={"field": f"{field}.remote"},
                    )
        except BadTensor as error:
            raise InvalidArgument(f"{field}: {error}", field=field) from error
        raise InvalidArgument(f"{field} has no payload, it needs one", field=field)

    def release(self) -> None:
        """Called at the end of a message. Removes the segments that were read, which signals their owner."""
        for name, _ in self._taken:
            shared_memory.remove(name)
        self._taken.clear()
        self.has_taken = False

    def close(self) -> None:
        self.release()
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _from_blob(
        self, dtype: str, shape: tuple[int, ...], reference: tensor_pb2.BlobReference, field: str
    ) -> HostTensor:
        data = self._receiver.blobs.get(reference.sha256)
        if data is None:
            raise Unavailable(
                f"{field}.blob is not stored (any more): upload it first", reason="BLOB_NOT_FOUND"
            )
        if reference.size != len(data):
            raise InvalidArgument(
                f"{field}.blob.size is {reference.size}, the blob has {len(data)}", field=f"{field}.blob.size"
            )
        tensor = HostTensor(dtype, shape, data)
        self._receiver.blobs.pin(reference.sha256, tensor)
        return tensor

    def _from_shared_memory(
        self,
        dtype: str,
        shape: tuple[int, ...],
        reference: tensor_pb2.SharedMemoryReference,
        num_bytes: int,
        field: str,
    ) -> HostTensor:
        # Never from a peer on another host: the outcome of reads would reveal what segments this host has.
        if not self._is_neighbour:
            raise PermissionDenied(
                f"{field}.shm is only accepted from frontends that have proven to be on the same host",
                reason="HOST_NOT_PROVEN",
            )
        name = reference.name
        if not shared_memory.is_name_of(name, self._frontend_id):
            raise InvalidArgument(
                f"{field}.shm.name is no segment of this frontend", field=f"{field}.shm.name"
            )
        if reference.size != num_bytes:
            raise BadTensor(f"shm.size is {reference.size}, the shape takes {num_bytes}")
        taken = self._taken.get((name, reference.offset))
        if taken is not None and (taken.dtype, taken.shape) == (dtype, shape):
            return taken
        self._require_room(num_bytes)
        try:
            data = shared_memory.read(name, reference.offset, reference.size)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if isinstance(error, OSError) and error.errno in _PASSING_ERRORS:
                raise Unavailable(
                    f"{field}.shm cannot be read just now: {reason}", retry_after_ms=_RETRY_AFTER_MS
                ) from error
            raise InvalidArgument(f"{field}.shm cannot be read: {reason}", field=f"{field}.shm") from error
        self._taken[name, reference.offset] = tensor = HostTensor(dtype, shape, data)
        self._receiver.memory.count(tensor)
        return tensor

    def _counted(self, tensor: HostTensor) -> HostTensor:
        self._require_room(len(tensor.data))
        self._receiver.memory.count(tensor)
        return tensor

    def _require_room(self, num_bytes: int) -> None:
        if not self._receiver.memory.has_room(num_bytes):
            raise ResourceExhausted(
                "requests hold as many bytes of tensors as the engine takes", retry_after_ms=_RETRY_AFTER_MS
            )


class HostProbe:
    """A secret that only processes of this host and user can read."""

    def __init__(self, segment: shared_memory.Segment, proof: bytes) -> None:
        self.name = segment.name
        self._segment = segment
        self._digest = proof

    @classmethod
    def make(cls, name: str, session_id: str) -> HostProbe | None:
        """A new probe for a session; None if the host has no room for it."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        try:
            segment = shared_memory.create(name, secret)
        except OSError:
            return None
        return cls(segment, hmac.digest(secret, session_id.encode(), "sha256"))

    def is_valid(self, digest: bytes) -> bool:
        """Whether the sender of this digest has read the secret."""
        return hmac.compare_digest(digest, self._digest)

    def close(self) -> None:
        self._segment.close()


class TensorMemory:
    """Counts the bytes of tensors while they exist, in any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        # Finalizers append to it: no lock may be taken there.
        self._freed: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        while self._freed:
            self._used_bytes -= self._freed.popleft()
        return self._used_bytes

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self._max_bytes

    def count(self, tensor: HostTensor) -> None:
        """Count a tensor until it is gone."""
        self._used_bytes += len(tensor.data)
        weakref.finalize(tensor, self._freed.append, len(tensor.data)).atexit = False
