"""One engine process: listeners and membership in the event loop, the engine in its thread, their end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass

import uvloop

from engine_svc.admin.announce import num_in_flight
from engine_svc.admin.lifecycle import EngineState
from engine_svc.admin.load_log import LoadLog
from engine_svc.admin.served_engine import Failure, LoadedCore, ServedEngine
from engine_svc.build.engine import build_engine, build_memberships, build_served_engine, build_servers
from engine_svc.build.start_check import check_start, with_folders
from engine_svc.config import EngineConfig
from engine_svc.core.facts import LoadProgress
from engine_svc.loop.engine import Engine
from engine_svc.membership.departure import Departure
from engine_svc.model.errors import ModelError
from engine_svc.process.engine_thread import EXIT_CANNOT_LOAD, EXIT_LOOP_FAILED, EngineThread
from engine_svc.process.load_display import LoadDisplay
from engine_svc.session.servicer import FULL_NAME, EngineCoreServicer
from triptych_kit.channel import parse_target
from triptych_kit.clock import MonotonicClock
from triptych_kit.config import ConfigError, Loaded
from triptych_kit.errors import InvalidArgument
from triptych_kit.process.setup import end_at_once_on_signals, leave_process
from triptych_kit.server import AddressError, DrainCut, Lifecycle, Server, run_server, write_announcement
from triptych_kit.telemetry.logs import write_log_line
from triptych_kit.telemetry.traces import StartTrace, export_metrics, setup_telemetry, shutdown_telemetry

logger = logging.getLogger(__name__)

# The engine thread and the event loop share the interpreter: neither may block the other for long.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class _Patience:
    """How long the parts of an engine get to stop, in parallel, once its sessions are over."""

    thread_s: float  # for the engine thread to end its step and free the device
    last_words_s: float  # for the goodbye to the coordinator


_PATIENT = _Patience(thread_s=1.0, last_words_s=0.5)
# A second signal means that the process should end within a second.
_HURRIED = _Patience(thread_s=0.3, last_words_s=0.2)


def run(loaded: Loaded[EngineConfig]) -> int:
    """Serve until SIGTERM or the end of the engine loop. Returns the exit code."""
    config = loaded.config
    try:
        _check_coordinator(config)
        check_start(config)
    except (ValueError, OSError) as error:
        write_log_line(f"triptych engine: {error}")
        return EXIT_CANNOT_LOAD
    starting = setup_telemetry(
        "engine", instance=str(config.index), log_format=config.log_format, log_level=config.log_level
    )
    logger.info("starting", extra={"options": loaded.changed()})
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        starting.enter("find model")
        config = _with_folders(config)
        exit_code = uvloop.run(_serve(config, loaded.origins, starting))
    except (AddressError, ConfigError, ModelError) as error:
        write_log_line(f"triptych engine: {error}")
        starting.end(str(error))
        exit_code = EXIT_CANNOT_LOAD
    # Undoes the freeze of `calm_collector`.
    gc.unfreeze()
    shutdown_telemetry()
    # Finalizing an interpreter that has loaded a model takes a second of a core, and seconds on a busy
    # machine; it could crash while a thread is inside a load or a step.
    return leave_process(exit_code)


def _check_coordinator(config: EngineConfig) -> None:
    if config.coordinator is not None:
        try:
            parse_target(config.coordinator)
        except InvalidArgument as error:
            raise ConfigError(f"--coordinator: {error}") from error


def _with_folders(config: EngineConfig) -> EngineConfig:
    display = LoadDisplay(sys.stderr, MonotonicClock())

    def show(phase: str, done: int, total: int) -> None:
        display.show(LoadProgress(phase, done, total))

    try:
        return with_folders(config, show)
    finally:
        display.close()


async def _serve(config: EngineConfig, origins: Mapping[str, str], starting: StartTrace) -> int:
    starting.enter("listen")
    engine = build_served_engine(config, origins)
    servicer = EngineCoreServicer(engine)
    lifecycle = Lifecycle(lambda: num_in_flight(engine))
    servers = build_servers(config, engine, servicer, lifecycle)
    departure = Departure(engine, until_dry=servicer.until_dry, stop_process=_stop_process)
    thread = _engine_thread(config, engine, starting)
    background = [
        _background(engine, servicer.beat_forever()),
        _background(engine, LoadLog(engine.stats_snapshot, engine.clock).run()),
        _background(engine, export_metrics(engine.metrics)),
    ]
    memberships: list[asyncio.Task[None]] = []
    engine.lifecycle.subscribe(lambda state: _follow(engine, servers[0], state, starting))
    patience = _PATIENT

    async def cut(cause: DrainCut) -> None:
        nonlocal patience
        if cause is DrainCut.SIGNAL:
            patience = _HURRIED
        # Ends the sessions while the connections are still open, so that frontends can move running requests.
        _stop(engine)
        await servicer.drain()

    def announce(addresses: list[str]) -> None:
        _announce(config, addresses)
        built = build_memberships(config, engine, departure, bound=addresses[0])
        memberships.extend(_background(engine, membership.run()) for membership in built)
        thread.start()

    try:
        exit_code = await run_server(
            servers,
            on_drain=lambda: departure.end(servicer.drain),
            drain_deadline_s=config.drain_deadline_s,
            announce=announce,
            on_cut=cut,
            lifecycle=lifecycle,
        )
        if engine.failure is not None:
            exit_code = engine.failure.exit_code
        end_at_once_on_signals(exit_code)
    finally:
        _stop(engine)
        await asyncio.gather(
            _leave(background, memberships, patience.last_words_s), thread.stop(patience.thread_s)
        )
    if engine.failure is not None:
        # The last line: nothing that is logged at a stop comes after the cause.
        write_log_line(f"triptych engine: {engine.failure.reason}")
    return exit_code


def _background(engine: ServedEngine, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Run `work` as a task. An error in it is a bug and ends the engine like one in the engine loop."""

    def look_at_end(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("background task failed", exc_info=error)
            engine.fail(Failure(f"internal error ({type(error).__name__})", EXIT_LOOP_FAILED))

    task = asyncio.ensure_future(work)
    task.add_done_callback(look_at_end)
    return task


def _stop(engine: ServedEngine) -> None:
    """Move the engine's lifecycle to STOPPED, even if requests still run."""
    if engine.lifecycle.has_ended:
        return
    if engine.lifecycle.state is EngineState.READY:
        engine.lifecycle.move_to(EngineState.DRAINING)
    engine.lifecycle.move_to(EngineState.STOPPED)


async def _leave(
    background: list[asyncio.Task[None]], memberships: list[asyncio.Task[None]], last_words_s: float
) -> None:
    """Wait for the goodbye to the coordinator, then cancel the background tasks."""
    if memberships:
        await asyncio.wait(memberships, timeout=last_words_s)
    for task in (*background, *memberships):
        task.cancel()
    await asyncio.wait((*background, *memberships))


def _engine_thread(config: EngineConfig, engine: ServedEngine, starting: StartTrace) -> EngineThread:
    event_loop = asyncio.get_running_loop()
    display = LoadDisplay(sys.stderr, engine.clock)

    def on_progress(progress: LoadProgress) -> None:
        engine.progress = progress
        starting.enter(progress.phase)
        display.show(progress)

    def load() -> tuple[Engine, LoadedCore]:
        starting.enter("import")
        try:
            built = build_engine(config, engine, progress=on_progress, defer=event_loop.call_soon_threadsafe)
        finally:
            display.close()
        starting.enter("assemble")
        calm_collector()
        return built

    return EngineThread(engine, load, ends_if_hung=True)


def _follow(engine: ServedEngine, server: Server, state: EngineState, starting: StartTrace) -> None:
    server.set_ready(FULL_NAME, state is EngineState.READY)
    if state is EngineState.READY:
        starting.end()
    elif state is EngineState.FAILED:
        starting.end("cannot load" if engine.failure is None else engine.failure.reason)
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
    elif state is EngineState.FAILED:
        _stop_process()


def _stop_process() -> None:
    """End the process the way a supervisor does."""
    os.kill(os.getpid(), signal.SIGTERM)


def _announce(config: EngineConfig, addresses: list[str]) -> None:
    address, admin_address, admin_http = addresses
    logger.info(
        "listening", extra={"address": address, "admin_address": admin_address, "admin_http": admin_http}
    )
    write_announcement(
        config.announce_fd,
        {
            "service": "engine",
            "index": config.index,
            "pid": os.getpid(),
            "address": address,
            "admin_address": admin_address,
            "admin_http": admin_http,
        },
    )


def calm_collector() -> None:
    """Make garbage collections smaller and rarer. Called once, when the engine is built.

    Objects that are alive now live as long as the process. Later ones are freed by reference counting, except
    tracebacks of errors, while a full collection visits every token of every request: 10 to 20 ms at 1,024
    requests, 30 times the cost of scheduling a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
