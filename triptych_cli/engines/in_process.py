"""An engine in this process: its loop in a thread, its messages handed over in memory."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import cast

from engine_svc.admin import announce
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.build.engine import build_engine, build_served_engine
from engine_svc.build.start_check import check_start, with_folders
from engine_svc.config import EngineConfig
from engine_svc.core.facts import LoadProgress
from engine_svc.loop.engine import Engine
from engine_svc.process.engine_thread import EngineThread
from engine_svc.session.servicer import EngineCoreServicer
from frontend_svc.engines.connection.connection import RESUME
from frontend_svc.engines.connection.stream import StreamEnd, StreamLost, end_of
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_cli.engines.own_engine import EngineDead
from triptych_kit.clock import Clock
from triptych_kit.errors import ServiceError

logger = logging.getLogger(__name__)

# A step cannot be interrupted; the longest steps are large prompts on a CPU.
_THREAD_END_S = 30.0
# As few as a connection would hold, so that the session of a slow frontend waits and merges steps.
_MAX_UNREAD = 16


class InProcessEngine:
    """One engine: its loop in a thread, its sessions in the event loop that it is made in."""

    # The frontend needs an address as a name for the engine; it is never connected to.
    address = "in-process:1"

    def __init__(self, config: EngineConfig) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._served: ServedEngine | None = None
        self._servicer: EngineCoreServicer | None = None
        self._thread: EngineThread | None = None
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    def served(self) -> ServedEngine:
        """The engine as its sessions see it, once it is started."""
        assert self._served is not None, "the engine is started first"
        return self._served

    async def start(self) -> None:
        """Load the model and wait until requests are accepted.

        Raises what the loader raises for a model or an option that cannot be used, else EngineDead.
        """
        config = await asyncio.get_running_loop().run_in_executor(None, _with_folders, self._config)
        self._served = served = build_served_engine(config)
        self._servicer = EngineCoreServicer(served)
        self._heartbeats = asyncio.ensure_future(self._servicer.beat_forever())
        changed = asyncio.Event()
        served.lifecycle.subscribe(lambda state: changed.set())
        refusal: list[ValueError | OSError] = []
        self._thread = _engine_thread(config, served, refusal.append)
        self._thread.start()
        await changed.wait()
        if served.lifecycle.state is not EngineState.READY:
            if refusal:
                raise refusal[0]
            raise EngineDead("it could not be loaded" if served.failure is None else served.failure.reason)
        # A full collection would visit modules and the model, and stop the steps for 0.3 s.
        gc.collect()
        gc.freeze()
        served.lifecycle.subscribe(self._on_state)

    def connect(self, address: str) -> InProcessTransport:
        """The transport to the engine, whatever the address."""
        assert self._servicer is not None, "the engine is started first"
        return InProcessTransport(self._servicer, self.served)

    async def close(self) -> None:
        """Stop the loop; the model is freed with this object."""
        if self._served is not None:
            lifecycle = self._served.lifecycle
            if lifecycle.state is EngineState.READY:
                lifecycle.move_to(EngineState.DRAINING)
            if not lifecycle.has_ended:
                lifecycle.move_to(EngineState.STOPPED)
        if self._thread is not None:
            await self._thread.stop(_THREAD_END_S)
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.wait({self._heartbeats})
        self._served = self._servicer = self._thread = None
        gc.unfreeze()

    def _on_state(self, state: EngineState) -> None:
        failure = self.served.failure
        if state is EngineState.FAILED and failure is not None and not self.death.done():
            self.death.set_result(failure.reason)


class InProcessTransport:
    """Streams that the engine's sessions serve in the same event loop."""

    def __init__(self, servicer: EngineCoreServicer, served: ServedEngine) -> None:
        self._servicer = servicer
        self._streams: list[InProcessStream] = []
        self.stub = cast(engine_pb2_grpc.EngineCoreServiceStub, _Files(served))

    async def ready(self) -> None:
        """There is nothing to connect to."""

    def open_stream(self, clock: Clock, *, heartbeat_s: float, last_seq: int) -> InProcessStream:
        stream = InProcessStream(self._servicer)
        self._streams.append(stream)
        return stream

    async def close(self) -> None:
        for stream in self._streams:
            await stream.ended()


class InProcessStream:
    """A stream between a frontend and a session in one event loop, used as `EngineStream` is.

    It cannot break, so the session is not resumable and no message is acknowledged.
    """

    def __init__(self, servicer: EngineCoreServicer) -> None:
        self.last_seq = 0
        self._servicer = servicer
        # Bounded by the requests that a session takes.
        self._sent: asyncio.Queue[engine_pb2.ConnectRequest] = asyncio.Queue()
        self._unread: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def open(self, hello: session_pb2.Hello, *, limit_s: float | None = None) -> session_pb2.HelloAck:
        features = [feature for feature in hello.features if feature != RESUME]
        hello.ClearField("features")
        hello.features.extend(features)
        self.send(engine_pb2.ConnectRequest(hello=hello))
        self._serving = asyncio.ensure_future(self._servicer.connect(self._messages(), self._write))
        self._serving.add_done_callback(lambda serving: self._changed.set())
        return (await self._next(self._serving)).hello_ack

    def send(self, message: engine_pb2.ConnectRequest) -> None:
        self._sent.put_nowait(message)

    async def receive(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None:
        """Pass each message to `on_message` until the session ends, then raise StreamLost."""
        assert self._serving is not None, "opened before"
        try:
            while True:
                message = await self._next(self._serving)
                await on_message(message)
                self.last_seq = message.seq
        finally:
            self.cancel()

    def close(self, goodbye: engine_pb2.Goodbye) -> None:
        self.send(engine_pb2.ConnectRequest(goodbye=goodbye))

    def cancel(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    async def ended(self) -> None:
        """Cancel the stream and wait for its end."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})

    async def _next(self, serving: asyncio.Task[None]) -> engine_pb2.ConnectResponse:
        while not self._unread:
            if serving.done():
                raise _loss(serving)
            self._changed.clear()
            await self._changed.wait()
        message = self._unread.popleft()
        self._changed.set()
        return engine_pb2.ConnectResponse.FromString(message)

    async def _write(self, message: bytes) -> None:
        while len(self._unread) >= _MAX_UNREAD:
            self._changed.clear()
            await self._changed.wait()
        self._unread.append(message)
        self._changed.set()

    async def _messages(self) -> AsyncGenerator[engine_pb2.ConnectRequest, None]:
        while True:
            yield await self._sent.get()


def _loss(serving: asyncio.Task[None]) -> StreamLost:
    """How the session has ended."""
    if serving.cancelled():
        return StreamLost("the engine does not serve the stream any more", StreamEnd.BROKEN)
    error = serving.exception()
    if error is None:
        return StreamLost("the engine ended the stream", StreamEnd.LEFT)
    if isinstance(error, ServiceError):
        text = f"{error.code.name}: {error.message}"
        return StreamLost(text, end_of(error.code, error.message, error.reason))
    # A bug in the engine's session.
    logger.error("session failed", exc_info=error)
    return StreamLost(f"internal error ({type(error).__name__})", StreamEnd.FAILED)


class _Files:
    """The methods of a stub that a frontend uses."""

    def __init__(self, served: ServedEngine) -> None:
        self._served = served

    async def GetArtifacts(
        self, request: engine_pb2.GetArtifactsRequest, *, timeout: float
    ) -> AsyncGenerator[engine_pb2.GetArtifactsResponse, None]:
        for response in announce.artifacts(self._served, request):
            yield response

    async def UploadBlob(
        self, parts: AsyncIterator[engine_pb2.UploadBlobRequest], *, timeout: float
    ) -> engine_pb2.UploadBlobResponse:
        return await self._served.tensors.upload(parts)


def _engine_thread(
    config: EngineConfig, served: ServedEngine, on_refusal: Callable[[ValueError | OSError], None]
) -> EngineThread:
    event_loop = asyncio.get_running_loop()

    def on_progress(progress: LoadProgress) -> None:
        served.progress = progress

    def load() -> tuple[Engine, LoadedCore]:
        try:
            return build_engine(config, served, progress=on_progress, defer=event_loop.call_soon_threadsafe)
        except (ValueError, OSError) as error:
            on_refusal(error)
            raise

    return EngineThread(served, load)


def _with_folders(config: EngineConfig) -> EngineConfig:
    check_start(config)
    return with_folders(config, _ignore_progress)


def _ignore_progress(phase: str, done: int, total: int) -> None:
    """The caller waits for the download without a display."""
