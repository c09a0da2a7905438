"""Builds a coordinator from its configuration and serves it. Only this module imports all the others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Coroutine, Iterable
from functools import partial

import uvloop

from coordinator_svc.config import CoordinatorConfig
from coordinator_svc.membership.registry import EngineRegistry
from coordinator_svc.membership.servicer import CoordinatorServicer
from coordinator_svc.membership.topology import Topology
from coordinator_svc.metrics import coordinator_metrics
from coordinator_svc.scaling.engines import MemberEngines
from coordinator_svc.scaling.scaling import Scaling
from coordinator_svc.scaling.servicer import ScalingServicer
from triptych.coordinator.v1 import coordinator_pb2_grpc, scaling_pb2_grpc
from triptych_kit.addresses import listen_at, loopback_of
from triptych_kit.admin import AdminServicer
from triptych_kit.clock import MonotonicClock
from triptych_kit.config import ConfigError, Loaded
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import metrics_page
from triptych_kit.http.trace_page import traces_page
from triptych_kit.process.setup import end_at_once_on_signals, leave_process
from triptych_kit.security.setup import listener_security
from triptych_kit.server import (
    ADMIN,
    INTERNAL,
    AddressError,
    Lifecycle,
    Listener,
    Registration,
    Server,
    run_server,
    write_announcement,
)
from triptych_kit.telemetry.logs import write_log_line
from triptych_kit.telemetry.traces import StartTrace, export_metrics, setup_telemetry, shutdown_telemetry

logger = logging.getLogger(__name__)

# The same code as an engine whose loop fails.
EXIT_LOOP_FAILED = 70


def run(loaded: Loaded[CoordinatorConfig]) -> int:
    """Serve until SIGTERM. Returns the exit code."""
    config = loaded.config
    starting = setup_telemetry(
        "coordinator", instance=str(config.index), log_format=config.log_format, log_level=config.log_level
    )
    logger.info("starting", extra={"options": loaded.changed()})
    try:
        exit_code = uvloop.run(_serve(config, starting))
    except (AddressError, ConfigError) as error:
        write_log_line(f"triptych coordinator: {error}")
        starting.end(str(error))
        exit_code = 2
    finally:
        shutdown_telemetry()
    # Finalizing the interpreter is most of a shutdown's time, and clients wait for the next coordinator.
    return leave_process(exit_code)


async def _serve(config: CoordinatorConfig, starting: StartTrace) -> int:
    clock = MonotonicClock()
    lease_s = config.lease_ms / 1000
    # The epoch is wall-clock time, so that of two coordinators the later one has the greater epoch.
    registry = EngineRegistry(clock, lease_s=lease_s)
    topology = Topology(registry, coordinator_epoch=time.time_ns())
    servicer = CoordinatorServicer(topology, clock, lease_s=lease_s)
    # The prefix keeps operation ids of two coordinators apart.
    operations = Scaling(id_prefix=f"scale-{topology.coordinator_epoch // 10**9:x}")
    scaling = ScalingServicer(
        operations,
        MemberEngines(registry, topology),
        servicer.signal,
        clock,
        epoch=topology.coordinator_epoch,
        rebuilt_at=clock.now() + lease_s,
    )
    lifecycle = Lifecycle()
    admin = AdminServicer("coordinator", f"coordinator-{config.index}", topology.status, lifecycle=lifecycle)
    metrics = coordinator_metrics(registry, topology, operations)
    security = listener_security(config)
    security.register(metrics, "coordinator")
    servers: list[Listener] = [
        Server(
            listen=listen_at(config.uds, config.host, config.port),
            registrations=[
                Registration(
                    "triptych.coordinator.v1.CoordinatorService",
                    partial(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer),
                    is_ready=True,
                )
            ],
            profile=INTERNAL,
            service="coordinator",
            reflection=config.reflection,
            security=security,
        ),
        Server(
            listen=listen_at(config.admin_uds, loopback_of(config.host), config.admin_port),
            registrations=[
                admin.registration(),
                Registration(
                    "triptych.coordinator.v1.ScalingService",
                    partial(scaling_pb2_grpc.add_ScalingServiceServicer_to_server, scaling),
                    is_ready=True,
                ),
            ],
            profile=ADMIN,
            service="coordinator",
            reflection=config.reflection,
            security=security,
        ),
        AdminHTTP(
            listen_at(config.admin_http_uds, config.admin_http_host, config.admin_http_port),
            {"/metrics": metrics_page(metrics.collect), "/traces/last": traces_page},
            security=security,
        ),
    ]

    def announce(addresses: list[str]) -> None:
        starting.end()
        _announce(config, addresses)

    async def close() -> None:
        scaling.close()
        await servicer.close()

    starting.enter("listen")
    exit_code = await serve_beside(
        [servicer.expire_leases(), servicer.step_groups(), scaling.run(), export_metrics(metrics)],
        run_server(
            servers,
            on_drain=close,
            drain_deadline_s=config.drain_deadline_s,
            announce=announce,
            lifecycle=lifecycle,
        ),
    )
    end_at_once_on_signals(exit_code)
    return exit_code


def _announce(config: CoordinatorConfig, addresses: list[str]) -> None:
    address, admin_address, admin_http = addresses
    logger.info(
        "serving", extra={"address": address, "admin_address": admin_address, "admin_http": admin_http}
    )
    write_announcement(
        config.announce_fd,
        {
            "service": "coordinator",
            "index": config.index,
            "pid": os.getpid(),
            "address": address,
            "admin_address": admin_address,
            "admin_http": admin_http,
        },
    )


async def serve_beside(works: Iterable[Coroutine[None, None, None]], serving: Awaitable[int]) -> int:
    """Run `works` in the background until `serving` returns; its exit code, or 70 if one of them failed.

    An exception in a background task is a bug, after which leases or groups would silently stop being
    updated. The process then sends itself SIGTERM, so that it drains, reports NOT_SERVING and is restarted by
    its supervisor.
    """
    has_failed = False

    def check_result(task: asyncio.Task[None]) -> None:
        nonlocal has_failed
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("background task failed", exc_info=error)
            has_failed = True
            os.kill(os.getpid(), signal.SIGTERM)

    tasks = [asyncio.ensure_future(work) for work in works]
    for task in tasks:
        task.add_done_callback(check_result)
    try:
        exit_code = await serving
    finally:
        for task in tasks:
            task.cancel()
    return EXIT_LOOP_FAILED if has_failed else exit_code
