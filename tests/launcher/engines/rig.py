"""Engines for clients of their core: a fake model that is stepped, and one that records its calls."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial

from engine_svc.admin.served_engine import LoadedCore
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Inbox, StatsSnapshot
from engine_svc.loop.protocols import NoLockstep
from engine_svc.session.servicer import FULL_NAME
from launcher.engines.in_process import InProcessClient
from launcher.engines.local_channel import LocalChannel, LocalServer
from service_kit.clock import MonotonicClock
from service_kit.server import Registration
from tests.engine_svc.fakes import FakeExecutor, expected_tokens, make_scheduler
from tests.engine_svc.session.service_rig import make_facts, prompt_of
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2, step_pb2

NUM_TOKENS = 5


def in_process_client(executor: FakeExecutor | None = None, *, max_commands: int = 1000) -> InProcessClient:
    """A client that steps a real scheduler over a fake model."""
    scheduler, inbox, clock = make_scheduler(), Inbox(max_commands), MonotonicClock()
    engine = Engine(
        scheduler=scheduler,
        executor=executor or FakeExecutor(),
        inbox=inbox,
        stats_snapshot=StatsSnapshot(),
        clock=clock,
        lockstep=NoLockstep(),
    )
    core = LoadedCore(make_facts(), refusal=scheduler.refusal, prepare=lambda request: None)
    return InProcessClient(engine, core, inbox=inbox, clock=clock)


class Gathered:
    """What came of each handle."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    def take(self, columns) -> None:
        start = 0
        for row, (handle, count) in enumerate(zip(columns.handles, columns.num_tokens, strict=True)):
            assert handle not in self.ended, "nothing comes after the end"
            self.tokens.setdefault(handle, []).extend(columns.token_ids[start : start + count])
            start += count
            if row in columns.endings:
                self.ended.add(handle)


def answer_of(number: int) -> list[int]:
    """What the fake model answers to the request that `make_entry` makes of `number`."""
    return expected_tokens(prompt_of(number), number, NUM_TOKENS)


class ScriptedEngine(engine_pb2_grpc.EngineCoreServiceServicer):
    """Keeps every message of its one client, and sends what a test gives it."""

    def __init__(self) -> None:
        self.messages: list[engine_pb2.ConnectRequest] = []
        self._outgoing: asyncio.Queue[engine_pb2.ConnectResponse] = asyncio.Queue()
        self._heard = asyncio.Event()
        self._seq = 0
        add = partial(engine_pb2_grpc.add_EngineCoreServiceServicer_to_server, self)
        self._server = LocalServer([Registration(FULL_NAME, add)], service="test")

    def channel(self) -> LocalChannel:
        return LocalChannel(self._server)

    def send(self, **content) -> None:
        self._seq += 1
        self._outgoing.put_nowait(engine_pb2.ConnectResponse(seq=self._seq, **content))

    def send_corrupt_step(self) -> None:
        self.send(step=step_pb2.Step(handles=array("I", [1, 2]).tobytes(), num_tokens=b"\1"))

    @property
    def aborts(self) -> list[list[int]]:
        return [list(message.abort.handles) for message in self.messages if message.HasField("abort")]

    async def until_received(self, num_messages: int) -> None:
        """Wait until so many messages have come, hello included."""
        async with asyncio.timeout(10):
            while len(self.messages) < num_messages:
                self._heard.clear()
                await self._heard.wait()

    async def Connect(self, request_iterator, context):
        requests = aiter(request_iterator)
        self.messages.append(await anext(requests))
        yield engine_pb2.ConnectResponse(hello_ack=session_pb2.HelloAck(engine_id="scripted"))
        self.send(ready=session_pb2.Ready(model_name="scripted"))
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while True:
                yield await self._outgoing.get()
        finally:
            reader.cancel()

    async def _read(self, requests) -> None:
        async for message in requests:
            self.messages.append(message)
            self._heard.set()
