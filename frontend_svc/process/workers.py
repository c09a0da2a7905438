"""Supervises several frontend processes on one public port. Serves nothing itself.

The kernel gives each new connection to one of them. Each is a complete frontend with its own queue limits,
request ids, Abort, GetRequest and Resume, so a client that refers to an earlier request must use the
connection on which it sent that request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from frontend_svc.config import FrontendConfig
from frontend_svc.process.workers_process import WorkerAddress, WorkerDied, WorkerProcess, start_worker
from service_kit.config import Loaded
from service_kit.process import process_environment
from service_kit.server import check_address, write_announcement
from service_kit.telemetry import setup_telemetry, shutdown_telemetry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Timeouts and restart limits of workers."""

    startup_s: float = 60.0
    stop_s: float = 25.0
    max_restarts: int = 3  # of one worker within `restart_window_s`
    restart_window_s: float = 60.0
    restart_delay_s: float = 0.5  # doubles with each restart in the window


def run_workers(loaded: Loaded[FrontendConfig], argv: Sequence[str]) -> int:
    """Serve with `workers` processes until SIGTERM. Returns the highest exit code.

    `argv`, from which `loaded` was made, is passed to the workers.
    """
    config = loaded.config
    setup_telemetry(
        "frontend", instance=str(config.index), log_format=config.log_format, log_level=config.log_level
    )
    logger.info("starting", extra={"options": loaded.changed()})
    try:
        with _reserved(config) as port:
            limits = WorkerLimits(stop_s=config.drain_deadline_s + 5.0)
            group = WorkerGroup(
                config.workers,
                lambda index, admin_port: worker_command(config, argv, index, port, admin_port),
                process_environment(),
                limits,
            )
            return asyncio.run(
                serve_until_signal(group, lambda addresses: _announce(config, port, addresses))
            )
    except OSError as error:
        print(f"triptych frontend: {error}", file=sys.stderr)
        return 2
    finally:
        shutdown_telemetry()


def worker_command(
    config: FrontendConfig, argv: Sequence[str], index: int, port: int, admin_port: int | None
) -> list[str]:
    """The command line of one worker: that of its parent, and the flags that differ from worker to worker.

    `admin_port` is the worker's previous one after a restart, else None.
    """
    if admin_port is None:
        admin_port = config.admin_port + index if config.admin_port else 0
    flags = [
        "--workers=1",
        f"--port={port}",
        "--share-port",
        f"--admin-port={admin_port}",
        f"--index={config.index * config.workers + index}",
    ]
    if not config.text_workers:
        num_cores = len(os.sched_getaffinity(0))
        flags.append(f"--text-workers={max(1, num_cores // config.workers)}")
    return [sys.executable, "-m", "frontend_svc.process.workers_main", str(os.getpid()), *argv, *flags]


class WorkerGroup:
    """The workers of one port. `start` once, then `keep_running`, then `stop`.

    `command_of` makes a worker's command line from its index and, after a restart, its previous admin port.
    """

    def __init__(
        self,
        num_workers: int,
        command_of: Callable[[int, int | None], Sequence[str]],
        environment: Mapping[str, str],
        limits: WorkerLimits,
    ) -> None:
        self._num_workers = num_workers
        self._command_of = command_of
        self._environment = environment
        self._limits = limits
        self._workers: dict[int, WorkerProcess] = {}
        self._addresses: dict[int, WorkerAddress] = {}

    @property
    def addresses(self) -> list[WorkerAddress]:
        """The workers' addresses in order; the last known one of a worker that is down."""
        return [self._addresses[index] for index in sorted(self._addresses)]

    async def start(self) -> None:
        """Start all workers and wait until all serve. Raises WorkerDied if one does not."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._num_workers):
                    tasks.create_task(self._start(index))
        except ExceptionGroup as failures:
            # The first failure is the cause; the other tasks were cancelled because of it.
            raise failures.exceptions[0] from failures

    async def keep_running(self) -> None:
        """Restart workers that die, until cancelled. Raises WorkerDied for one that keeps dying."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._num_workers):
                    tasks.create_task(self._keep(index))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures

    def terminate(self) -> None:
        """Send SIGTERM to each worker. A second one cuts its drain short."""
        for worker in self._workers.values():
            worker.terminate()

    async def stop(self) -> int:
        """Drain all workers at once, kill those that exceed the limit. Returns the highest exit code.

        The exit code of a worker that was about to be restarted does not count.
        """
        workers = [worker for worker in self._workers.values() if not worker.has_ended]
        await asyncio.gather(*(worker.stop(self._limits.stop_s) for worker in workers))
        return max((worker.exit_code for worker in workers), default=0)

    async def _start(self, index: int) -> None:
        before = self._addresses.get(index)
        admin_port = int(before.admin_address.rpartition(":")[2]) if before else None
        command = self._command_of(index, admin_port)
        worker = await start_worker(index, command, self._environment)
        self._workers[index] = worker
        address = await worker.announced(self._limits.startup_s)
        self._addresses[index] = address
        logger.info(
            "worker serves",
            extra={"worker": index, "worker_pid": address.pid, "admin_address": address.admin_address},
        )

    async def _keep(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        limits = self._limits
        restarted_at: list[float] = []
        while True:
            worker = self._workers[index]
            await worker.wait()
            restarted_at = [at for at in restarted_at if loop.time() - at < limits.restart_window_s]
            if len(restarted_at) == limits.max_restarts:
                raise WorkerDied(
                    f"worker {index} ended with {worker.exit_code} after {limits.max_restarts} restarts "
                    f"within {limits.restart_window_s:g} s",
                    worker.exit_code,
                )
            delay_s = limits.restart_delay_s * 2 ** len(restarted_at)
            restarted_at.append(loop.time())
            logger.warning(
                "worker ended",
                extra={"worker": index, "exit_code": worker.exit_code, "restart_in_s": delay_s},
            )
            await asyncio.sleep(delay_s)
            # A worker that dies before it serves, or cannot be started, is counted in the next iteration.
            with contextlib.suppress(WorkerDied, OSError):
                await self._start(index)


async def serve_until_signal(group: WorkerGroup, announce: Callable[[Sequence[WorkerAddress]], None]) -> int:
    """Run `group` until SIGTERM or SIGINT or until one worker keeps dying. Returns the highest exit code.

    `announce` is called when all workers serve. A second signal cuts the drain short.
    """
    exit_code = 0
    stopping = _first_signal(group)
    running = asyncio.ensure_future(_run(group, announce))
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    except WorkerDied as error:
        logger.error("workers given up", extra={"reason": str(error)})
        exit_code = error.exit_code
    finally:
        running.cancel()
        await asyncio.wait((running,))
        exit_code = max(exit_code, await group.stop())
    return exit_code


async def _run(group: WorkerGroup, announce: Callable[[Sequence[WorkerAddress]], None]) -> None:
    await group.start()
    announce(group.addresses)
    await group.keep_running()


def _first_signal(group: WorkerGroup) -> asyncio.Future[None]:
    """A future that the first SIGTERM or SIGINT resolves; later ones are forwarded to the workers."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if stopping.done():
            group.terminate()
        else:
            stopping.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopping


@contextlib.contextmanager
def _reserved(config: FrontendConfig) -> Iterator[int]:
    """Reserve the public port for the workers: no other program can bind it before they listen."""
    # Checked without sharing first, so that two groups of workers never share one port.
    check_address(f"{config.host}:{config.port}", shares_port=config.share_port)
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host.strip("[]"), config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        yield int(holder.getsockname()[1])


def _announce(config: FrontendConfig, port: int, addresses: Sequence[WorkerAddress]) -> None:
    address = f"{config.host}:{port}"
    admin_addresses = [one.admin_address for one in addresses]
    logger.info("serving", extra={"address": address, "admin_addresses": admin_addresses})
    write_announcement(
        config.announce_fd,
        {
            "service": "frontend",
            "index": config.index,
            "pid": os.getpid(),
            "address": address,
            "admin_address": admin_addresses[0],
            "admin_addresses": admin_addresses,
            "worker_pids": [one.pid for one in addresses],
        },
    )
