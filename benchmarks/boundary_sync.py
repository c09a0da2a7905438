"""The engine's stream on gRPC's server with threads, for comparison: the same mailbox and conversions.

It serves what a measurement needs and no more: ADDs, aborts, steps and heartbeats.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import grpc

from engine_svc.admin import announce
from engine_svc.admin.served_engine import ServedEngine
from engine_svc.convert import messages
from engine_svc.loop.mailbox import Abort, Add, Outbox
from engine_svc.session.requests import MAX_INFLIGHT_ADDS
from engine_svc.session.session import MAX_OUTBOX_BYTES
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc

_HEARTBEAT_S = 0.5


class SyncServicer(engine_pb2_grpc.EngineCoreServiceServicer):
    """Sessions whose messages are written by a thread of the server each."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def Connect(
        self, request_iterator: Iterator[engine_pb2.ConnectRequest], context: grpc.ServicerContext
    ) -> Iterator[engine_pb2.ConnectResponse]:
        """A frontend's session."""
        next(request_iterator)
        wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        outbox = Outbox(max_bytes=MAX_OUTBOX_BYTES, wake=lambda: wakes.put(True))
        request_ids: dict[int, str] = {}
        threading.Thread(
            target=self._read, args=(request_iterator, outbox, request_ids, wakes), daemon=True
        ).start()
        hello_ack = announce.hello_ack(self._engine, MAX_INFLIGHT_ADDS, features=(), is_resumed=False)
        yield engine_pb2.ConnectResponse(hello_ack=hello_ack)
        for seq, message in enumerate(self._messages(outbox, request_ids, wakes), start=1):
            message.seq = seq
            yield message

    def _messages(
        self, outbox: Outbox, request_ids: dict[int, str], wakes: queue.SimpleQueue[bool]
    ) -> Iterator[engine_pb2.ConnectResponse]:
        core = self._engine.core
        assert core is not None, "the synthetic engine is ready from its start"
        yield engine_pb2.ConnectResponse(ready=announce.ready(self._engine, core.facts))
        while True:
            try:
                if not wakes.get(timeout=_HEARTBEAT_S):
                    return
            except queue.Empty:
                beat = announce.heartbeat(self._engine, self._engine.board.read())
                yield engine_pb2.ConnectResponse(heartbeat=beat)
            step = outbox.take()
            if step is not None:
                ended = [step.handles[finished.row] for finished in step.finished]
                message = messages.to_step(step, dict.fromkeys(ended, frozenset()))
                yield engine_pb2.ConnectResponse(step=message)
                for handle in ended:
                    del request_ids[handle]

    def _read(
        self,
        requests: Iterator[engine_pb2.ConnectRequest],
        outbox: Outbox,
        request_ids: dict[int, str],
        wakes: queue.SimpleQueue[bool],
    ) -> None:
        core = self._engine.core
        assert core is not None, "the synthetic engine is ready from its start"
        try:
            for message in requests:
                for entry in message.add.entries:
                    now = self._engine.clock.now()
                    request = messages.to_request(entry, session_number=1, facts=core.facts, now=now)
                    request_ids[entry.handle] = request.request_id
                    self._engine.inbox.put(Add(request, outbox, entry.handle))
                for handle in message.abort.handles:
                    if handle in request_ids:
                        self._engine.inbox.put(Abort(request_ids[handle]))
        except grpc.RpcError:
            # The frontend is gone.
            pass
        wakes.put(False)
