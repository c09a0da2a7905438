"""A served engine with a fake model on a port of the kernel's choice, and a frontend that talks to it."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio

from benchmarks.rig.processes import LOOPBACK
from engine_svc.admin.lifecycle import Lifecycle
from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.admin.utility import ENGINE_CALLS, registered
from engine_svc.convert import messages
from engine_svc.convert.feature import WireFeatures
from engine_svc.core.artifacts import Artifact
from engine_svc.core.facts import EngineFacts, EngineIdentity, ModelFingerprint
from engine_svc.core.request import Request
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Inbox, KVEventLog, StatsSnapshot
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import NoLockstep
from engine_svc.process.engine_thread import EngineThread
from engine_svc.scheduler.scheduler import Scheduler
from engine_svc.scheduler.watch import SchedulerWatch
from engine_svc.session.servicer import FULL_NAME, EngineCoreServicer
from engine_svc.tensors.source import TensorReceiver
from tests.engine_svc.fakes import (
    EOS_TOKEN_ID,
    LIMIT_S,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    FakeExecutor,
    make_scheduler,
)
from tests.engine_svc.request_options import make_wire_features
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, utility_pb2
from triptych_kit.addresses import join_address
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock
from triptych_kit.server import INTERNAL, Registration, Server

if TYPE_CHECKING:
    from engine_svc.loop.controls import EngineControls


def make_facts(*, num_kv_blocks: int = 64) -> EngineFacts:
    fingerprint = ModelFingerprint("ab" * 32, "float32", "cd" * 32, VOCAB_SIZE, "", "fake", MAX_MODEL_LEN)
    return EngineFacts(
        model_name="fake",
        fingerprint=fingerprint,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_kv_blocks=num_kv_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_TOKEN_ID, EOS_TOKEN_ID + 1),
    )


class ServiceRig:
    """Everything of an engine process but the process. Loading ends when `loading` is set."""

    def __init__(
        self,
        *,
        artifacts: tuple[Artifact, ...] = (),
        scheduler: Scheduler | None = None,
        max_outbox_bytes: int = 1_000_000,
        max_replay_bytes: int = 1_000_000,
        kv_event_log: KVEventLog | None = None,
        controls: Callable[[Engine, Scheduler], EngineControls] | None = None,
        preparations: Preparations | None = None,
        features: WireFeatures | None = None,
        facts: EngineFacts | None = None,
        tensors: TensorReceiver | None = None,
        watch: SchedulerWatch | None = None,
        listen: str = join_address(LOOPBACK, 0),
        epoch: int = 7,
    ) -> None:
        self._facts = facts or make_facts()
        features = features or make_wire_features(enable_prompt_embeds=tensors is not None)
        self.executor = FakeExecutor()
        self._make_controls = controls
        self._watch = watch
        self._preparations = preparations
        self.scheduler = scheduler or make_scheduler(features=[preparations] if preparations else ())
        self.load_error: Exception | None = None
        self.engine = ServedEngine(
            identity=EngineIdentity("engine-a", epoch, "test"),
            artifacts=artifacts,
            lifecycle=Lifecycle(),
            inbox=Inbox(1000),
            stats_snapshot=StatsSnapshot(),
            clock=MonotonicClock(),
            drain_deadline_s=5.0,
            kv_event_log=kv_event_log,
            features=features,
            tensors=tensors or TensorReceiver(),
            utilities=registered([*ENGINE_CALLS, *features.utilities]),
        )
        self.servicer = EngineCoreServicer(
            self.engine, max_outbox_bytes=max_outbox_bytes, max_replay_bytes=max_replay_bytes
        )
        self.server = Server(
            listen=listen,
            registrations=[Registration(FULL_NAME, self.servicer.add_to)],
            profile=INTERNAL,
            service="engine",
        )
        self.thread = EngineThread(self.engine, self._load)
        self.address = ""

    async def start(self) -> None:
        self.address = await self.server.start()
        self._heartbeats = asyncio.create_task(self.servicer.beat_forever())

    async def load(self) -> None:
        self.thread.start()
        while self.engine.core is None and self.engine.failure is None:
            await _next_change(self.engine)

    def stop_beating(self) -> None:
        """From now on only the test beats, so that how fast the machine is does not matter."""
        self._heartbeats.cancel()

    async def stop(self) -> None:
        self.executor.gate.set()
        self._heartbeats.cancel()
        await self.server.stop(0)
        assert await self.thread.stop(LIMIT_S)

    def _load(self) -> tuple[Engine, LoadedCore]:
        if self.load_error is not None:
            raise self.load_error
        engine = Engine(
            scheduler=self.scheduler,
            executor=self.executor,
            inbox=self.engine.inbox,
            stats_snapshot=self.engine.stats_snapshot,
            clock=self.engine.clock,
            lockstep=NoLockstep(),
            preparations=self._preparations,
            at_end=[self._preparations.close] if self._preparations else (),
        )
        controls = None if self._make_controls is None else self._make_controls(engine, self.scheduler)
        return engine, LoadedCore(
            self._facts,
            refusal=self.scheduler.refusal,
            prepare=lambda request: None,
            controls=controls,
            watch=self._watch,
        )


async def _next_change(engine: ServedEngine) -> None:
    changed = asyncio.Event()
    engine.lifecycle.subscribe(lambda state: changed.set())
    async with asyncio.timeout(LIMIT_S):
        await changed.wait()


class StreamClient:
    """One Connect stream, read to the end by a task of its own; keeps everything it receives."""

    def __init__(self, stub: engine_pb2_grpc.EngineCoreServiceStub, frontend_id: str) -> None:
        self.frontend_id = frontend_id
        self.received: list[engine_pb2.ConnectResponse] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, list[int]] = {}  # handle to reasons; more than one is a bug
        self.rejected: dict[int, engine_pb2.AddRejected] = {}
        self.error: grpc.aio.AioRpcError | None = None
        self.is_over = False
        self._changed = asyncio.Event()
        self._num_flushes = 0
        self._writing = asyncio.Lock()
        self.call = stub.Connect()

    async def open(self, **hello: object) -> None:
        await self.send_hello(**hello)
        self.start_reading()

    def start_reading(self) -> None:
        self._reader = asyncio.create_task(self._read())

    async def send_hello(self, **hello: object) -> None:
        fields = {
            "frontend_id": self.frontend_id,
            "session_id": session_id_of(self.frontend_id),
            "frontend_epoch": 1,
        }
        message = session_pb2.Hello(**{"schema_revision": 1, **fields, **hello})
        await self.send(engine_pb2.ConnectRequest(hello=message))

    async def send(self, message: engine_pb2.ConnectRequest) -> None:
        """Write one message; a stream takes one write at a time."""
        async with self._writing:
            await self.call.write(message)

    async def add(self, *entries: add_pb2.AddEntry) -> None:
        await self.send(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=entries)))

    async def abort(self, *handles: int, **fields: Any) -> None:
        abort = engine_pb2.Abort(handles=handles, **fields)
        await self.send(engine_pb2.ConnectRequest(abort=abort))

    async def adopt(self, *entries: tuple[int, str]) -> None:
        """Take over requests: the handle each is to have here, and the id of its ADD."""
        adopt = engine_pb2.Adopt(
            entries=[engine_pb2.AdoptEntry(handle=handle, request_id=wire_id) for handle, wire_id in entries]
        )
        await self.send(engine_pb2.ConnectRequest(adopt=adopt))

    async def flush(self) -> None:
        """Wait until all that was sent has been acted on: an unknown call is answered in turn."""
        self._num_flushes += 1
        call = utility_pb2.UtilityCall(call_id=self._num_flushes)
        await self.send(engine_pb2.ConnectRequest(utility=call))
        await self.until(
            lambda: any(message.utility_result.call_id == self._num_flushes for message in self.received)
        )

    async def until(self, condition: Callable[[], bool], *, patience_s: float = LIMIT_S) -> None:
        """Wait until what was received makes `condition` true."""
        async with asyncio.timeout(patience_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_ended(self, *handles: int) -> None:
        await self.until(lambda: all(handle in self.finished for handle in handles))

    def kinds(self) -> list[str]:
        """What was received, in order, heartbeats and stats left out."""
        kinds = [str(message.WhichOneof("message")) for message in self.received]
        return [kind for kind in kinds if kind not in ("heartbeat", "stats")]

    def last(self, kind: str) -> engine_pb2.ConnectResponse:
        return [message for message in self.received if message.WhichOneof("message") == kind][-1]

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self.received.append(message)
                self._take(message)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        self.is_over = True
        self._changed.set()

    def _take(self, message: engine_pb2.ConnectResponse) -> None:
        if message.WhichOneof("message") == "add_rejected":
            self.rejected[message.add_rejected.handle] = message.add_rejected
        if message.WhichOneof("message") != "step":
            return
        step, start = message.step, 0
        handles, token_ids = array("I", step.handles), array("I", step.token_ids)
        counts = array("I", step.num_tokens_wide) if step.num_tokens_wide else step.num_tokens
        for handle, num_tokens in zip(handles, counts, strict=True):
            self.tokens.setdefault(handle, []).extend(token_ids[start : start + num_tokens])
            start += num_tokens
        for finished in step.finished:
            self.finished.setdefault(handles[finished.row], []).append(finished.reason)

    async def close(self) -> None:
        """Cancel the stream, as a frontend that dies does."""
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader


@contextlib.asynccontextmanager
async def serving(
    rig: ServiceRig, *, load: bool = True
) -> AsyncIterator[engine_pb2_grpc.EngineCoreServiceStub]:
    await rig.start()
    try:
        if load:
            await rig.load()
        async with open_channel(rig.address) as channel:
            yield engine_pb2_grpc.EngineCoreServiceStub(channel)
    finally:
        await rig.stop()


@contextlib.asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[ServiceRig, engine_pb2_grpc.EngineCoreServiceStub]]:
    """A rig with these options, served."""
    rig = ServiceRig(**options)
    async with serving(rig) as stub:
        yield rig, stub


@contextlib.asynccontextmanager
async def connected(
    **options: Any,
) -> AsyncIterator[tuple[ServiceRig, engine_pb2_grpc.EngineCoreServiceStub, StreamClient]]:
    """The same, with a client that is open."""
    async with served(**options) as (rig, stub):
        client = StreamClient(stub, "f")
        await client.open()
        yield rig, stub, client


def session_id_of(name: str) -> str:
    return f"session of {name}".ljust(32, ".")


def make_entry(
    handle: int, *, prompt: Sequence[int] = (), max_tokens: int = 5, attempt: int = 0, **sampling: object
) -> add_pb2.AddEntry:
    """An ADD as a frontend makes it; the prompt is by default the handle's own."""
    return add_pb2.AddEntry(
        handle=handle,
        request_id=f"{handle:032x}",
        attempt=attempt,
        prompt_token_ids=column(prompt or prompt_of(handle)),
        sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
        request_seed=handle,
    )


def read_add(
    entry: add_pb2.AddEntry, *, now: float = 100.0, enable_prompt_embeds: bool = False, **facts: Any
) -> Request:
    """The request of an ADD, as an engine with all features and these facts reads it."""
    tensors = TensorReceiver(is_open=True).source("frontend", "session")
    try:
        return messages.to_request(
            entry,
            session_number=3,
            facts=replace(make_facts(), **facts),
            now=now,
            features=make_wire_features(enable_prompt_embeds=enable_prompt_embeds),
            tensors=tensors,
        )
    finally:
        tensors.close()


def prompt_of(handle: int) -> list[int]:
    return [handle % VOCAB_SIZE, 5, 6, 7, 8]


def column(values: Sequence[int]) -> bytes:
    return array("I", values).tobytes()


LENGTH = output_pb2.FINISH_REASON_LENGTH
ABORT = output_pb2.FINISH_REASON_ABORT


async def added(rig: ServiceRig, client: StreamClient, *entries: add_pb2.AddEntry, hold_at: int) -> None:
    """Add requests, and wait until the model is held, at a launch which none of them comes too late for."""
    rig.executor.gate.clear()
    await client.add(*entries)
    await client.flush()
    # All of them are in the inbox, and one step at most has been launched without some.
    rig.executor.hold_at = hold_at
    rig.executor.gate.set()
    # From here on the gate is shut: opening it does not come too early.
    await asyncio.to_thread(rig.executor.wait_for_launches, hold_at)


async def lost(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub) -> None:
    """Wait until no session has a stream: they wait for another one, or are over already."""
    async with asyncio.timeout(LIMIT_S):
        while rig.servicer.num_sessions:
            await stub.GetLoad(engine_pb2.GetLoadRequest())


async def parked(rig: ServiceRig, stub: engine_pb2_grpc.EngineCoreServiceStub, num_parked: int = 1) -> None:
    """Wait until so many sessions have no stream."""
    async with asyncio.timeout(LIMIT_S):
        while rig.servicer.num_parked_sessions != num_parked:
            await stub.GetLoad(engine_pb2.GetLoadRequest())


async def until_finished(stub: engine_pb2_grpc.EngineCoreServiceStub, num_requests: int) -> session_pb2.Stats:
    """The engine's statistics when so many requests have ended there."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            stats = (await stub.GetLoad(engine_pb2.GetLoadRequest())).stats
            if stats.num_finished == num_requests:
                return stats
