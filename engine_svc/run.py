"""One engine process: listeners and membership in the event loop, the engine in its thread, their end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

import uvloop

from engine_svc.build import build_engine, build_memberships, build_served_engine, build_servers
from engine_svc.config import EngineConfig
from engine_svc.engine import Engine
from engine_svc.engine_thread import EXIT_CANNOT_LOAD, EXIT_LOOP_FAILED, EngineThread
from engine_svc.facts import LoadProgress
from engine_svc.heap import calm_collector
from engine_svc.lifecycle import EngineState
from engine_svc.load_display import LoadDisplay
from engine_svc.model.errors import CheckpointError
from engine_svc.model.hub import find_model
from engine_svc.served_engine import Failure, LoadedCore, ServedEngine
from engine_svc.servicer import FULL_NAME, EngineCoreServicer
from service_kit.channel import parse_target
from service_kit.clock import MonotonicClock
from service_kit.config import Loaded
from service_kit.errors import InvalidArgument
from service_kit.server import AddressError, Server, run_server, write_announcement
from service_kit.telemetry import setup_telemetry, shutdown_telemetry

logger = logging.getLogger(__name__)

# The loop's thread shares the interpreter with the event loop: neither may keep the other waiting for long.
_SWITCH_INTERVAL_S = 0.0005
# How long the thread gets to end its step when everything else is over.
_THREAD_END_S = 2.0
_LAST_WORDS_S = 1.0


def run(loaded: Loaded[EngineConfig]) -> int:
    """Serve until SIGTERM or the end of the loop. Returns the exit code."""
    config = loaded.config
    mistake = _mistake_in(config)
    if mistake is not None:
        print(f"triptych engine: {mistake}", file=sys.stderr)
        return EXIT_CANNOT_LOAD
    setup_telemetry(
        "engine", instance=str(config.index), log_format=config.log_format, log_level=config.log_level
    )
    logger.info("starting", extra={"options": loaded.changed()})
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        config = _with_folder(config)
    except CheckpointError as error:
        print(f"triptych engine: {error}", file=sys.stderr)
        return EXIT_CANNOT_LOAD
    try:
        exit_code, is_thread_over = uvloop.run(_serve(config))
    except AddressError as error:
        print(f"triptych engine: {error.strerror}", file=sys.stderr)
        exit_code, is_thread_over = 2, True
    shutdown_telemetry()
    if not is_thread_over:
        # It is deep in a load or a step; taking the interpreter apart around it could crash.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def _mistake_in(config: EngineConfig) -> str | None:
    """What can be seen to be wrong before anything is started, in words for people."""
    folder = Path(config.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        return f"{folder} is not a model folder: it has no config.json"
    if config.coordinator is not None:
        try:
            parse_target(config.coordinator)
        except InvalidArgument as error:
            return f"--coordinator: {error}"
    return None


def _with_folder(config: EngineConfig) -> EngineConfig:
    """The configuration with a folder of this machine as its model, served under the name that was given."""
    display = LoadDisplay(sys.stderr, MonotonicClock())
    try:
        folder = find_model(
            config.model,
            revision=config.revision,
            progress=lambda phase, done, total: display.show(LoadProgress(phase, done, total)),
        )
    finally:
        display.close()
    if str(folder) == config.model:
        return config
    return replace(config, model=str(folder), served_model_name=config.served_model_name or config.model)


async def _serve(config: EngineConfig) -> tuple[int, bool]:
    engine = build_served_engine(config)
    servicer = EngineCoreServicer(engine)
    servers = build_servers(config, engine, servicer)
    thread = _engine_thread(config, engine)
    heartbeats = _background(engine, servicer.beat_forever())
    memberships: list[asyncio.Task[None]] = []
    engine.lifecycle.subscribe(lambda state: _follow(engine, servers[0], state))

    def announce(addresses: list[str]) -> None:
        _announce(config, addresses)
        built = build_memberships(config, engine, bound=addresses[0], stop_engine=_stop_process)
        memberships.extend(_background(engine, membership.run()) for membership in built)
        thread.start()

    try:
        exit_code = await run_server(
            servers, on_drain=servicer.drain, drain_deadline_s=config.drain_deadline_s, announce=announce
        )
    finally:
        await _end(engine, heartbeats, memberships)
    if engine.failure is not None:
        exit_code = engine.failure.exit_code
    return exit_code, await thread.stop(_THREAD_END_S)


def _background(engine: ServedEngine, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Run `work` beside everything else; an error in it is a bug and ends the engine like one in the loop."""

    def look_at_end(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("background task failed", exc_info=error)
            engine.fail(Failure(f"internal error ({type(error).__name__})", EXIT_LOOP_FAILED))

    task = asyncio.ensure_future(work)
    task.add_done_callback(look_at_end)
    return task


async def _end(
    engine: ServedEngine, heartbeats: asyncio.Task[None], memberships: list[asyncio.Task[None]]
) -> None:
    if not engine.lifecycle.has_ended:
        # The drain was cut short: what still runs is lost with the process.
        if engine.lifecycle.state is EngineState.READY:
            engine.lifecycle.move_to(EngineState.DRAINING)
        engine.lifecycle.move_to(EngineState.STOPPED)
    if memberships:
        # Time to say goodbye to the coordinator.
        await asyncio.wait(memberships, timeout=_LAST_WORDS_S)
    for task in (heartbeats, *memberships):
        task.cancel()
    await asyncio.wait((heartbeats, *memberships))


def _engine_thread(config: EngineConfig, engine: ServedEngine) -> EngineThread:
    event_loop = asyncio.get_running_loop()
    display = LoadDisplay(sys.stderr, engine.clock)

    def on_progress(progress: LoadProgress) -> None:
        engine.progress = progress
        display.show(progress)

    def load() -> tuple[Engine, LoadedCore]:
        try:
            built = build_engine(config, engine, progress=on_progress, defer=event_loop.call_soon_threadsafe)
        finally:
            display.close()
        calm_collector()
        return built

    return EngineThread(engine, load)


def _follow(engine: ServedEngine, server: Server, state: EngineState) -> None:
    server.set_ready(FULL_NAME, state is EngineState.READY)
    if state is EngineState.READY and engine.core is not None:
        facts = engine.core.facts
        num_kv_tokens = facts.num_kv_blocks * facts.block_size
        logger.info(
            "READY",
            extra={
                "model": facts.model_name,
                "max_model_len": facts.max_model_len,
                "num_kv_blocks": facts.num_kv_blocks,
                "num_kv_tokens": num_kv_tokens,
                "concurrency": round(num_kv_tokens / facts.max_model_len, 1),
            },
        )
    elif state is EngineState.FAILED and engine.failure is not None:
        print(f"triptych engine: {engine.failure.reason}", file=sys.stderr)
        _stop_process()


def _stop_process() -> None:
    """End the process the way its supervisor would."""
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(config: EngineConfig, addresses: list[str]) -> None:
    address, admin_address = addresses
    logger.info("listening", extra={"address": address, "admin_address": admin_address})
    write_announcement(
        config.announce_fd,
        {
            "service": "engine",
            "index": config.index,
            "pid": os.getpid(),
            "address": address,
            "admin_address": admin_address,
        },
    )
