"""Stores bytes that frontends upload, by digest, before the requests that refer to them. Knows no request."""

from __future__ import annotations

import asyncio
import hashlib
import re
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from engine_svc.tensors.host_tensor import HostTensor
from triptych.engine.v1 import engine_pb2
from triptych_kit.clock import Clock
from triptych_kit.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from triptych_kit.rules import rules_of

_MAX_CHUNK_BYTES = rules_of(engine_pb2.UploadBlobRequest, "chunk").max_bytes
_MAX_UPLOADS = 8
_MAX_UPLOAD_S = 30.0
_TTL_S = rules_of(engine_pb2.UploadBlobHeader, "ttl_ms").lowered_to / 1000
_RETRY_AFTER_MS = 1000
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class _Blob:
    data: bytes
    ttl_s: float
    used_at: float
    num_users: int = 0


class BlobStore:
    """At most `max_bytes` of blobs, including those of uploads in progress.

    A blob is kept while a tensor made from it exists, and for its time to live after its last use. If room is
    needed, unused blobs are dropped earlier, the least recently used first.
    """

    def __init__(self, clock: Clock, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._blobs: dict[str, _Blob] = {}  # least recently used first
        self._used_bytes = 0
        self._reserved_bytes = 0
        # Finalizers of tensors append to it, in any thread.
        self._left: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._blobs)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def touch(self, digest: str) -> float | None:
        """Mark a blob as used now. Returns its time to live in seconds, or None if it is not stored."""
        blob = self._blobs.pop(digest, None)
        if blob is None:
            return None
        blob.used_at = self._clock.now()
        self._blobs[digest] = blob
        return blob.ttl_s

    def get(self, digest: str) -> bytes | None:
        """The bytes of a blob, which is marked as used now."""
        return None if self.touch(digest) is None else self._blobs[digest].data

    def pin(self, digest: str, tensor: HostTensor) -> None:
        """Keep a blob, which must be stored, until `tensor` is gone."""
        self._blobs[digest].num_users += 1
        weakref.finalize(tensor, self._left.append, digest).atexit = False

    def reserve(self, num_bytes: int) -> bool:
        """Reserve room for an upload. False if blobs in use leave too little."""
        self.expire()
        idle = [digest for digest, blob in self._blobs.items() if not blob.num_users]
        while self._used_bytes + self._reserved_bytes + num_bytes > self.max_bytes:
            if not idle:
                return False
            self._drop(idle.pop(0))
        self._reserved_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Release reserved room."""
        self._reserved_bytes -= num_bytes

    def put(self, digest: str, data: bytes, ttl_s: float) -> None:
        """Store a blob, for which room was reserved and released just now."""
        if self.touch(digest) is None:
            self._blobs[digest] = _Blob(data, ttl_s, self._clock.now())
            self._used_bytes += len(data)

    def expire(self) -> None:
        """Drop blobs that are not in use and whose time to live since the last use is over."""
        now = self._clock.now()
        while self._left:
            digest = self._left.popleft()
            blob = self._blobs[digest]
            blob.num_users -= 1
            blob.used_at = now
        for digest, blob in list(self._blobs.items()):
            if not blob.num_users and now - blob.used_at >= blob.ttl_s:
                self._drop(digest)

    def _drop(self, digest: str) -> None:
        self._used_bytes -= len(self._blobs.pop(digest).data)


class BlobUploads:
    """Handles upload calls: a few at a time, each within limits of size and time."""

    def __init__(self, store: BlobStore, max_blob_bytes: int) -> None:
        self._store = store
        self._max_blob_bytes = max_blob_bytes
        self._num_running = 0

    async def receive(
        self, requests: AsyncIterable[engine_pb2.UploadBlobRequest]
    ) -> engine_pb2.UploadBlobResponse:
        """Store one blob. If it is stored already, the call returns at once and ignores the chunks.

        Raises InvalidArgument if the bytes do not match the header, ResourceExhausted, DeadlineExceeded.
        """
        if self._num_running >= _MAX_UPLOADS:
            raise ResourceExhausted(
                f"{_MAX_UPLOADS} uploads are in progress, the limit is {_MAX_UPLOADS}",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._num_running += 1
        try:
            async with asyncio.timeout(_MAX_UPLOAD_S):
                # Not before: an iterator that is created and never read logs a warning.
                return await self._receive(aiter(requests))
        except TimeoutError as error:
            raise DeadlineExceeded(f"the upload took more than {_MAX_UPLOAD_S:g} s") from error
        finally:
            self._num_running -= 1

    async def _receive(
        self, requests: AsyncIterator[engine_pb2.UploadBlobRequest]
    ) -> engine_pb2.UploadBlobResponse:
        header = self._header(await anext(requests, None))
        known_ttl_s = self._store.touch(header.sha256)
        if known_ttl_s is not None:
            return _response(header.sha256, known_ttl_s)
        if not self._store.reserve(header.size_bytes):
            raise ResourceExhausted(
                f"the store takes {self._store.max_bytes} bytes, and requests use too many of them",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        try:
            data = await _read_chunks(requests, header)
        finally:
            self._store.release(header.size_bytes)
        ttl_s = min(_TTL_S, header.ttl_ms / 1000) if header.ttl_ms else _TTL_S
        self._store.put(header.sha256, data, ttl_s)
        return _response(header.sha256, ttl_s)

    def _header(self, first: engine_pb2.UploadBlobRequest | None) -> engine_pb2.UploadBlobHeader:
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("the first message of an upload is header", field="header")
        header: engine_pb2.UploadBlobHeader = first.header
        if _DIGEST.fullmatch(header.sha256) is None:
            raise InvalidArgument("header.sha256 takes 64 lower-case hex digits", field="header.sha256")
        if not 0 < header.size_bytes <= self._max_blob_bytes:
            raise InvalidArgument(
                f"header.size_bytes is {header.size_bytes}, it takes 1 to {self._max_blob_bytes}",
                field="header.size_bytes",
            )
        return header


async def _read_chunks(
    requests: AsyncIterator[engine_pb2.UploadBlobRequest], header: engine_pb2.UploadBlobHeader
) -> bytes:
    data, digest = bytearray(), hashlib.sha256()
    async for request in requests:
        if request.WhichOneof("part") != "chunk":
            raise InvalidArgument("only chunks may follow the header", field="chunk")
        chunk = request.chunk
        if len(chunk) > _MAX_CHUNK_BYTES or len(data) + len(chunk) > header.size_bytes:
            raise InvalidArgument(
                f"a chunk has {len(chunk)} bytes, it takes {_MAX_CHUNK_BYTES} at most and "
                f"{header.size_bytes - len(data)} that are left of the blob",
                field="chunk",
            )
        data += chunk
        digest.update(chunk)
    if len(data) != header.size_bytes:
        raise InvalidArgument(
            f"{len(data)} bytes came, header.size_bytes is {header.size_bytes}", field="header.size_bytes"
        )
    if digest.hexdigest() != header.sha256:
        raise InvalidArgument("the bytes do not have the digest header.sha256", field="header.sha256")
    return bytes(data)


def _response(digest: str, ttl_s: float) -> engine_pb2.UploadBlobResponse:
    return engine_pb2.UploadBlobResponse(sha256=digest, ttl_ms=round(ttl_s * 1000))
