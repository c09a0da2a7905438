"""Sends the tensors of requests to one engine: inline in the ADD, by shared memory, or uploaded before it."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from frontend_svc.tensors.uploads import Uploads
from frontend_svc.tensors.wire_tensor import WireTensor
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit import shared_memory
from triptych_kit.errors import ServiceError

logger = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
MAX_SHARED_BYTES = 256 * 1024 * 1024
_SECRET_BYTES = 32
# Interval at which segments that the engine has taken are freed.
_REAP_S = 0.2


@dataclass(slots=True, eq=False)
class _Lent:
    """A segment, and the handles of the requests in flight that refer to it."""

    segment: shared_memory.Segment
    handles: set[int]


class TensorSender:
    """Sends ADDs with tensors to one engine.

    send: gets the final ADDs, at once or when their tensors have been uploaded.
    fail: gets the handle of a request whose tensor cannot be sent, and the error.
    """

    def __init__(
        self,
        frontend_id: str,
        *,
        send: Callable[[Sequence[add_pb2.AddEntry]], None],
        fail: Callable[[int, ServiceError], object],
        max_shared_bytes: int = MAX_SHARED_BYTES,
    ) -> None:
        self._frontend_id = frontend_id
        self._send = send
        self._fail = fail
        self._max_shared_bytes = max_shared_bytes
        self._is_neighbour = False
        self._lent: list[_Lent] = []
        self._reaper: asyncio.TimerHandle | None = None
        self._uploads = Uploads()
        # Each upload task with the handles of the requests in flight that wait for it.
        self._uploading: dict[asyncio.Task[None], set[int]] = {}

    def greet(
        self, ack: session_pb2.HelloAck, session_id: str, is_resumed: bool
    ) -> engine_pb2.ConnectRequest | None:
        """Answer the engine's probe for a shared host; None if it is on another host or did not probe."""
        self._is_neighbour = self._is_neighbour and is_resumed
        if not ack.host_probe:
            return None
        try:
            secret = shared_memory.read(ack.host_probe, 0, _SECRET_BYTES)
        except (OSError, ValueError):
            return None
        self._is_neighbour = True
        digest = hmac.digest(secret, session_id.encode(), "sha256")
        return engine_pb2.ConnectRequest(host_proof=session_pb2.HostProof(digest=digest))

    def send(
        self,
        entries: Sequence[add_pb2.AddEntry],
        tensors: Collection[WireTensor],
        stub: engine_pb2_grpc.EngineCoreServiceStub,
    ) -> None:
        """Send requests together with `tensors`, to which they refer by digest."""
        by_digest = {tensor.digest: tensor for tensor in tensors}
        wire = []
        for entry in entries:
            copy = add_pb2.AddEntry()
            copy.CopyFrom(entry)
            wire.append(copy)
        uploads = [tensor for tensor in by_digest.values() if not self._put_in_entry(tensor, wire)]
        if not uploads:
            self._send(wire)
            return
        self._uploads.use(stub)
        handles = {entry.handle for entry in wire}
        task = asyncio.ensure_future(self._upload_and_send(wire, handles, uploads))
        self._uploading[task] = handles
        task.add_done_callback(self._uploading.pop)

    def go_on(self, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
        """The session has another connection: uploads that were cut off continue over it."""
        self._uploads.go_on(stub)

    def forget(self, handle: int) -> None:
        """A request has ended: its tensors are no longer needed."""
        for lent in self._lent:
            lent.handles.discard(handle)
        self._reap()
        for task, handles in self._uploading.items():
            if handles == {handle}:
                task.cancel()
            handles.discard(handle)

    def stop(self) -> None:
        """The engine is lost: cancel the uploads."""
        for task in self._uploading:
            task.cancel()

    def _put_in_entry(self, tensor: WireTensor, entries: Sequence[add_pb2.AddEntry]) -> bool:
        """Put a tensor into the ADDs or into shared memory; False if it has to be uploaded."""
        references = {entry.handle: _references(entry, tensor) for entry in entries}
        if len(tensor.data) <= INLINE_BYTES:
            for reference in itertools.chain(*references.values()):
                reference.inline = tensor.data
            return True
        segment = self._lend(tensor.data) if self._is_neighbour else None
        if segment is None:
            return False
        self._lent.append(_Lent(segment, {handle for handle, fields in references.items() if fields}))
        shared = tensor_pb2.SharedMemoryReference(
            name=segment.name, size=len(tensor.data), owner=self._frontend_id
        )
        for reference in itertools.chain(*references.values()):
            reference.shm.CopyFrom(shared)
        return True

    def _lend(self, data: bytes) -> shared_memory.Segment | None:
        self._reap()
        if sum(lent.segment.size_bytes for lent in self._lent) + len(data) > self._max_shared_bytes:
            return None
        name = shared_memory.segment_name(self._frontend_id, secrets.randbits(63))
        try:
            segment = shared_memory.create(name, data)
        except OSError as error:
            # The tensor is uploaded instead. Containers often have very little shared memory.
            logger.info(
                "no shared memory for a tensor", extra={"reason": str(error), "size_bytes": len(data)}
            )
            return None
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().call_later(_REAP_S, self._reap_again)
        return segment

    def _reap_again(self) -> None:
        self._reaper = None
        self._reap()
        if self._lent:
            self._reaper = asyncio.get_running_loop().call_later(_REAP_S, self._reap_again)

    def _reap(self) -> None:
        """Free segments that the engine has taken or that no request needs any more."""
        done = [lent for lent in self._lent if not lent.handles or lent.segment.is_taken]
        for lent in done:
            lent.segment.close()
            self._lent.remove(lent)

    async def _upload_and_send(
        self, entries: Sequence[add_pb2.AddEntry], handles: set[int], tensors: Iterable[WireTensor]
    ) -> None:
        try:
            for tensor in tensors:
                await self._uploads.upload(tensor)
        except ServiceError as error:
            for entry in _take(entries, handles):
                self._fail(entry.handle, error)
        else:
            self._send(_take(entries, handles))


def _references(entry: add_pb2.AddEntry, tensor: WireTensor) -> list[tensor_pb2.Tensor]:
    """The fields of an ADD that refer to `tensor`, whatever they are for."""
    return [
        value
        for _, value in entry.ListFields()
        if isinstance(value, tensor_pb2.Tensor) and value.blob.sha256 == tensor.digest
    ]


def _take(entries: Sequence[add_pb2.AddEntry], handles: set[int]) -> list[add_pb2.AddEntry]:
    """Remove all `handles` and return the `entries` that were among them.

    Failing a request calls `forget`, which would cancel the running task if the handle were still there.
    """
    taken = [entry for entry in entries if entry.handle in handles]
    handles.clear()
    return taken
