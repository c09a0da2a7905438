"""Runs a frontend from listening to the end of its drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os

import uvloop

from frontend_svc.build import build_frontend
from frontend_svc.config import FrontendConfig
from triptych_kit.config import ConfigError, Loaded
from triptych_kit.process.setup import end_at_once_on_signals, leave_process
from triptych_kit.server import AddressError, DrainCut, run_server, write_announcement
from triptych_kit.telemetry.logs import write_log_line
from triptych_kit.telemetry.traces import StartTrace, export_metrics, setup_telemetry, shutdown_telemetry

logger = logging.getLogger(__name__)


def run(loaded: Loaded[FrontendConfig]) -> int:
    """Serve until SIGTERM. Returns the exit code."""
    config = loaded.config
    starting = setup_telemetry(
        "frontend", instance=str(config.index), log_format=config.log_format, log_level=config.log_level
    )
    logger.info("starting", extra={"options": loaded.changed()})
    try:
        exit_code = uvloop.run(_serve(config, starting))
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, AddressError) else error
        write_log_line(f"triptych frontend: {reason}")
        starting.end(str(reason))
        exit_code = 2
    finally:
        shutdown_telemetry()
    return leave_process(exit_code)


async def _serve(config: FrontendConfig, starting: StartTrace) -> int:
    frontend = build_frontend(config)
    # Modules are never freed. Traversing them in every full collection would stop all streams for 50 ms and
    # more.
    gc.collect()
    gc.freeze()

    starting.enter("listen")

    def announce(addresses: list[str]) -> None:
        starting.end()
        address, admin_address, admin_http, *http = addresses
        logger.info(
            "serving",
            extra={
                "address": address,
                "admin_address": admin_address,
                "admin_http": admin_http,
                **({"http": http[0]} if http else {}),
            },
        )
        frontend.connect(address)
        write_announcement(
            config.announce_fd,
            {
                "service": "frontend",
                "index": config.index,
                "pid": os.getpid(),
                "address": address,
                "admin_address": admin_address,
                "admin_http": admin_http,
                **({"http": http[0]} if http else {}),
            },
        )

    async def drain() -> None:
        # The health service reports NOT_SERVING at once. A load balancer learns it from there, or from a list
        # of endpoints, a moment later; requests sent until then are served.
        await asyncio.sleep(config.drain_lag_s)
        await frontend.drain()
        await frontend.end_calls()

    async def cut(cause: DrainCut) -> None:
        await frontend.cut()

    exporting = asyncio.ensure_future(export_metrics(frontend.metrics))
    try:
        exit_code = await run_server(
            frontend.servers.listeners(),
            on_drain=drain,
            drain_deadline_s=config.drain_deadline_s,
            announce=announce,
            on_cut=cut,
            lifecycle=frontend.servers.lifecycle,
        )
        end_at_once_on_signals(exit_code)
        return exit_code
    finally:
        exporting.cancel()
        await frontend.close()
        gc.unfreeze()
