"""A whole engine service in this process, behind a channel without sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.build.engine import build_engine, build_served_engine
from engine_svc.config import EngineConfig
from engine_svc.core.facts import LoadProgress
from engine_svc.loop.engine import Engine
from engine_svc.model.loading.hub import find_model
from engine_svc.process.engine_thread import EngineThread
from engine_svc.session.servicer import FULL_NAME, EngineCoreServicer
from launcher.engines.core_client import EngineDead
from launcher.engines.local_channel import LocalChannel, LocalServer
from service_kit.server import Registration

# A step cannot be interrupted; the longest steps are large prompts on a CPU.
_THREAD_END_S = 30.0


class HostedEngine:
    """One engine: its loop in a thread, its servicer in the event loop that `start` is called in.

    `on_death` is called with the reason if the engine ends by itself.
    """

    # The frontend needs an address as a name for the engine; it is never connected to.
    address = "in-process:1"

    def __init__(self, config: EngineConfig, *, on_death: Callable[[str], None]) -> None:
        self._config = config
        self._on_death = on_death
        self._served: ServedEngine | None = None
        self._servicer: EngineCoreServicer | None = None
        self._server: LocalServer | None = None
        self._thread: EngineThread | None = None
        self._heartbeats: asyncio.Task[None] | None = None

    @property
    def served(self) -> ServedEngine:
        """The engine as its sessions see it, once it is started."""
        assert self._served is not None, "the engine is started first"
        return self._served

    async def start(self) -> None:
        """Load the model and wait until requests are accepted. EngineDead if it fails."""
        config = await asyncio.get_running_loop().run_in_executor(None, _with_folder, self._config)
        self._served = served = build_served_engine(config)
        self._servicer = EngineCoreServicer(served)
        self._server = LocalServer([Registration(FULL_NAME, self._servicer.add_to)], service="engine")
        self._heartbeats = asyncio.ensure_future(self._servicer.beat_forever())
        changed = asyncio.Event()
        served.lifecycle.subscribe(lambda state: changed.set())
        self._thread = _engine_thread(config, served)
        self._thread.start()
        await changed.wait()
        if served.lifecycle.state is not EngineState.READY:
            raise EngineDead("it could not be loaded" if served.failure is None else served.failure.reason)
        served.lifecycle.subscribe(self._on_state)

    def connect(self, address: str) -> grpc.aio.Channel:
        """A channel to the engine, whatever the address."""
        assert self._server is not None, "the engine is started first"
        return LocalChannel(self._server)

    async def close(self) -> None:
        """Stop the loop; the model is freed with this object."""
        if self._servicer is not None and self._served is not None:
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
        self._served = self._servicer = self._server = self._thread = None

    def _on_state(self, state: EngineState) -> None:
        failure = self.served.failure
        if state is EngineState.FAILED and failure is not None:
            self._on_death(failure.reason)


def _engine_thread(config: EngineConfig, served: ServedEngine) -> EngineThread:
    event_loop = asyncio.get_running_loop()

    def on_progress(progress: LoadProgress) -> None:
        served.progress = progress

    def load() -> tuple[Engine, LoadedCore]:
        return build_engine(config, served, progress=on_progress, defer=event_loop.call_soon_threadsafe)

    return EngineThread(served, load)


def _with_folder(config: EngineConfig) -> EngineConfig:
    """The configuration with a local folder as its model; a hub name is downloaded."""
    folder: Path = find_model(config.model, revision=config.revision, progress=_ignore_progress)
    if str(folder) == config.model:
        return config
    return dataclasses.replace(
        config, model=str(folder), served_model_name=config.served_model_name or config.model
    )


def _ignore_progress(phase: str, done: int, total: int) -> None:
    """The caller waits for the download without a display."""
