"""A frontend reduced to a session and its tensors; as a program, one that sends until it is killed."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import Sequence
from types import TracebackType

from frontend_svc.engines.connection.stream import EngineStream
from frontend_svc.tensors.sender import TensorSender
from frontend_svc.tensors.wire_tensor import WireTensor
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock
from triptych_kit.errors import ServiceError

# 10 MB in rows of 100 KiB.
NUM_POSITIONS, HIDDEN = 100, 25_600


class TensorFrontend:
    """One session. Where it does not identify its host, its tensors are uploaded."""

    def __init__(self, address: str, frontend_id: str, *, has_host_proof: bool = True) -> None:
        self.frontend_id = frontend_id
        self.sent: list[add_pb2.AddEntry] = []
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.rejected: dict[int, int] = {}  # handle to status code
        self.failed: dict[int, ServiceError] = {}
        self._channel = open_channel(address)
        self._stub = engine_pb2_grpc.EngineCoreServiceStub(self._channel)
        self._stream = EngineStream(self._stub, MonotonicClock())
        self._has_host_proof = has_host_proof
        self._sender = TensorSender(frontend_id, send=self._send, fail=self._fail)
        self._changed = asyncio.Event()

    async def __aenter__(self) -> TensorFrontend:
        hello = session_pb2.Hello(
            frontend_id=self.frontend_id,
            session_id=secrets.token_hex(16),
            frontend_epoch=1,
            schema_revision=1,
        )
        ack = await self._stream.open(hello)
        proof = self._sender.greet(ack, hello.session_id, False)
        assert proof is not None, "this frontend shares the engine's host"
        if self._has_host_proof:
            self._stream.send(proof)
        else:
            self._sender.greet(session_pb2.HelloAck(), hello.session_id, False)
        self._reader = asyncio.ensure_future(self._stream.receive(self._take))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close(engine_pb2.Goodbye(reason="done"))
        await asyncio.wait({self._reader}, timeout=10)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(None)

    def add(self, handles: Sequence[int], tensor: WireTensor, *, max_tokens: int = 1) -> None:
        """Send a request for each handle, all with the same prompt of embeddings."""
        entries = [
            add_pb2.AddEntry(
                handle=handle,
                request_id=secrets.token_hex(16),
                prompt_embeds=tensor.reference,
                sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
            for handle in handles
        ]
        self._sender.send(entries, [tensor], self._stub)

    async def until_ended(self, *handles: int) -> None:
        """Wait for the ends of these requests, whatever they are."""
        async with asyncio.timeout(60):
            while not all(handle in self.ended for handle in handles):
                self._changed.clear()
                await self._changed.wait()

    def _send(self, entries: Sequence[add_pb2.AddEntry]) -> None:
        self.sent += entries
        self._stream.send(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=entries)))

    def _fail(self, handle: int, error: ServiceError) -> None:
        self.failed[handle] = error
        self._end(handle)

    def _end(self, handle: int) -> None:
        self.ended.add(handle)
        self._sender.forget(handle)
        self._changed.set()

    async def _take(self, message: engine_pb2.ConnectResponse) -> None:
        match message.WhichOneof("message"):
            case "add_rejected":
                self.rejected[message.add_rejected.handle] = message.add_rejected.status.code
                self._end(message.add_rejected.handle)
            case "step":
                self._take_step(message.step)

    def _take_step(self, step: step_pb2.Step) -> None:
        handles = memoryview(step.handles).cast("I").tolist()
        tokens = iter(memoryview(step.token_ids).cast("I").tolist())
        for handle, count in zip(handles, step.num_tokens, strict=True):
            self.tokens.setdefault(handle, []).extend(itertools.islice(tokens, count))
        for finished in step.finished:
            self._end(handles[finished.row])


def large_tensor(seed: int = 0) -> WireTensor:
    row = bytes(4 * HIDDEN - 4) + seed.to_bytes(4, "little")
    return WireTensor.of(tensor_pb2.D_TYPE_FP32, [NUM_POSITIONS, HIDDEN], row * NUM_POSITIONS)


async def _send_for_ever(address: str, frontend_id: str) -> None:
    tensor = large_tensor()
    async with TensorFrontend(address, frontend_id) as frontend:
        for handle in itertools.count(1):
            frontend.add([handle], tensor)
            print(handle, flush=True)
            # Now and then all of them end, so that kills strike before, amid and behind the engine's reading.
            if handle % 3 == 0:
                await frontend.until_ended(handle)
            await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(_send_for_ever(sys.argv[1], sys.argv[2]))
