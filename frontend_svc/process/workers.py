"""Supervises several frontend processes on one public port. Serves nothing itself.

The kernel gives each new connection to one of them. Each is a complete frontend with its own queue limits,
request ids, Abort, GetRequest and Resume, so a client that refers to an earlier request must use the
connection on which it sent that request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from frontend_svc.config import FrontendConfig
from frontend_svc.process.worker_metrics import WorkerMetrics
from triptych_kit.addresses import bind_socket, check_address, join_address, listen_at, port_in
from triptych_kit.config import Loaded
from triptych_kit.http.admin_http import AdminHTTP, read_page
from triptych_kit.http.pages import MakePage, Page
from triptych_kit.http.trace_page import number_of_traces, page_of
from triptych_kit.process.child import Announcement, Child, ChildDied
from triptych_kit.process.setup import (
    child_command,
    end_at_once_on_signals,
    leave_process,
    process_environment,
    runtime_folder,
)
from triptych_kit.process.supervision import Restarts, SupervisorLimits, first_failure, run_until_signal
from triptych_kit.security.setup import listener_security
from triptych_kit.server import write_announcement
from triptych_kit.telemetry.logs import write_log_line
from triptych_kit.telemetry.metrics import TEXT_FORMAT, to_text
from triptych_kit.telemetry.traces import setup_telemetry, shutdown_telemetry

logger = logging.getLogger(__name__)

_STARTUP_S = 60.0
_STATE_LIMIT_S = 2.0
_TRACES_LIMIT_S = 2.0


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
        with _reserved(config, config.port) as port, _reserved_http(config) as http_port:
            limits = SupervisorLimits(startup_s=_STARTUP_S, stop_s=config.drain_deadline_s + 5.0)
            group = WorkerGroup(
                config.workers,
                lambda index, admin_port: worker_command(config, argv, index, port, http_port, admin_port),
                process_environment(),
                limits,
            )
            exit_code = asyncio.run(_serve(config, group, port, http_port))
    except OSError as error:
        write_log_line(f"triptych frontend: {error}")
        exit_code = 2
    finally:
        shutdown_telemetry()
    return leave_process(exit_code)


def worker_command(
    config: FrontendConfig,
    argv: Sequence[str],
    index: int,
    port: int,
    http_port: int | None,
    admin_port: int | None,
) -> tuple[str, ...]:
    """The command line of one worker: that of its parent, and the flags that differ from worker to worker.

    `admin_port` is the worker's previous one after a restart, else None.
    """
    if admin_port is None:
        admin_port = config.admin_port + index if config.admin_port else 0
    flags = [
        "--workers=1",
        f"--port={port}",
        *([] if http_port is None else [f"--http-port={http_port}"]),
        "--share-port",
        f"--admin-port={admin_port}",
        # Scraped by this process, which adds up what all have counted.
        *_private_listener(index),
        *([] if config.admin_uds is None else [f"--admin-uds={config.admin_uds}.{index}"]),
        f"--index={config.index * config.workers + index}",
    ]
    if not config.text_workers:
        num_cores = len(os.sched_getaffinity(0))
        flags.append(f"--text-workers={max(1, num_cores // config.workers)}")
    return child_command("frontend_svc.main", *argv, *flags)


def _private_listener(index: int) -> list[str]:
    """The flags of a worker's admin HTTP listener: a unix socket, where there can be one."""
    path = _socket_of(index)
    if path is None:
        return ["--admin-http-host=127.0.0.1", "--admin-http-port=0"]
    return [f"--admin-http-uds={path}"]


def _socket_of(index: int) -> Path | None:
    folder = runtime_folder()
    return None if folder is None else folder / f"worker-{os.getpid()}-{index}.sock"


class WorkerGroup:
    """The workers of one port. `start` once, then `keep_running`, then `stop`.

    One that keeps dying stays down, and the others go on serving.
    `command_of` makes a worker's command line from its index and, after a restart, its previous admin port.
    """

    def __init__(
        self,
        num_workers: int,
        command_of: Callable[[int, int | None], Sequence[str]],
        environment: Mapping[str, str],
        limits: SupervisorLimits,
    ) -> None:
        self._num_workers = num_workers
        self._command_of = command_of
        self._environment = environment
        self._limits = limits
        self._workers: dict[int, Child] = {}
        self._addresses: dict[int, Announcement] = {}
        self._num_kept = num_workers

    @property
    def addresses(self) -> list[Announcement]:
        """The workers' addresses in order; the last known one of a worker that is down."""
        return [self._addresses[index] for index in sorted(self._addresses)]

    async def start(self) -> None:
        """Start all workers and wait until all serve. Raises ChildDied if one does not."""
        with first_failure():
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._num_workers):
                    tasks.create_task(self._start(index))

    async def keep_running(self) -> None:
        """Restart workers that die, until cancelled. Raises ChildDied where the last one keeps dying."""
        with first_failure():
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._num_workers):
                    tasks.create_task(self._keep(index))

    async def hurry(self) -> None:
        """Cut every drain short."""
        for worker in self._workers.values():
            worker.terminate()

    async def stop(self) -> int:
        """Drain all workers at once, kill those that exceed the limit. Returns the highest exit code.

        The exit code of a worker that was about to be restarted does not count.
        """
        workers = [worker for worker in self._workers.values() if worker.is_running]
        await asyncio.gather(*(worker.stop(self._limits.stop_s) for worker in workers))
        return max((worker.shell_code for worker in workers), default=0)

    async def _start(self, index: int) -> None:
        before = self._addresses.get(index)
        admin_port = port_in(before.admin_address) if before else None
        command = self._command_of(index, admin_port)
        worker = Child(f"worker {index}", command, self._environment, announces=True)
        self._workers[index] = worker
        try:
            async with asyncio.timeout(self._limits.startup_s):
                address = await worker.announced()
        except TimeoutError as error:
            late = ChildDied(worker, f"and did not serve within {self._limits.startup_s:g} s")
            worker.kill()
            await worker.wait()
            raise late from error
        self._addresses[index] = address
        logger.info(
            "worker serves",
            extra={"worker": index, "worker_pid": address.pid, "admin_address": address.admin_address},
        )

    async def _keep(self, index: int) -> None:
        loop, restarts = asyncio.get_running_loop(), Restarts(self._limits)
        while True:
            worker = self._workers[index]
            await worker.wait()
            delay_s = restarts.begin(loop.time())
            if delay_s is None:
                self._num_kept -= 1
                if not self._num_kept:
                    raise ChildDied(worker, f"after {restarts.tries}")
                logger.error(
                    "worker stays down",
                    extra={"worker": index, "num_deaths": restarts.num_deaths, "last_cause": worker.cause},
                )
                return
            logger.warning(
                "worker ended",
                extra={"worker": index, "exit_code": worker.shell_code, "restart_in_s": delay_s},
            )
            await asyncio.sleep(delay_s)
            # A worker that dies before it serves, or cannot be started, is counted in the next iteration.
            with contextlib.suppress(ChildDied, OSError):
                await self._start(index)


async def serve_until_signal(group: WorkerGroup, announce: Callable[[Sequence[Announcement]], None]) -> int:
    """Run `group` until a signal or until the last worker keeps dying. Returns the highest exit code.

    `announce` is called when all workers serve. A second signal cuts the drain short.
    """
    stopped_code = 0

    async def stop(number: signal.Signals | None) -> None:
        nonlocal stopped_code
        stopped_code = await group.stop()

    exit_code = await run_until_signal(
        _run(group, announce), stop=stop, hurry=group.hurry, failures=(ChildDied,), on_failure=_give_up
    )
    exit_code = max(exit_code, stopped_code)
    end_at_once_on_signals(exit_code)
    return exit_code


async def _serve(config: FrontendConfig, group: WorkerGroup, port: int, http_port: int | None) -> int:
    metrics = WorkerMetrics(lambda: group.addresses)

    async def page(target: str) -> Page:
        return Page(to_text(await metrics.collect()), TEXT_FORMAT)

    async def state(target: str) -> Page:
        """As one worker has it: all know the same engines, each its own requests."""
        for worker in group.addresses:
            with contextlib.suppress(OSError):
                body = await read_page(worker.admin_http, "/ui/state", limit_s=_STATE_LIMIT_S)
                return Page(body, "application/json")
        return Page(b"no worker answers\n", status=503)

    pages: dict[str, MakePage] = {"/metrics": page, "/traces/last": partial(_traces_page, group)}
    if config.serves_ui:
        pages |= {"/ui/state": state}
    listener = AdminHTTP(
        listen_at(config.admin_http_uds, config.admin_http_host, config.admin_http_port),
        pages,
        security=listener_security(config, config.client_keys),
    )
    admin_http = await listener.start()
    try:
        return await serve_until_signal(
            group, lambda addresses: _announce(config, port, http_port, admin_http, addresses)
        )
    finally:
        await listener.stop(0)
        for index in range(config.workers):
            # A worker that was killed has left it.
            if (path := _socket_of(index)) is not None:
                path.unlink(missing_ok=True)


async def _traces_page(group: WorkerGroup, target: str) -> Page:
    """The last traces of all workers that answer, newest end first."""
    try:
        num_traces = number_of_traces(target)
    except ValueError as error:
        return Page(f"{error}\n".encode(), status=400)
    answers = await asyncio.gather(
        *(
            read_page(one.admin_http, f"/traces/last?n={num_traces}", limit_s=_TRACES_LIMIT_S)
            for one in group.addresses
        ),
        return_exceptions=True,
    )
    traces = [
        trace
        for answer in answers
        if not isinstance(answer, BaseException)
        for trace in json.loads(answer)["traces"]
    ]
    newest = sorted(traces, key=lambda trace: trace["start_unix_ms"] + trace["duration_ms"], reverse=True)
    return page_of(newest[:num_traces])


def _give_up(died: ChildDied) -> int:
    logger.error("workers given up", extra={"reason": str(died)})
    return died.exit_code


async def _run(group: WorkerGroup, announce: Callable[[Sequence[Announcement]], None]) -> None:
    await group.start()
    announce(group.addresses)
    await group.keep_running()


@contextlib.contextmanager
def _reserved_http(config: FrontendConfig) -> Iterator[int | None]:
    """The same for the port of the HTTP API; None if there is none."""
    if config.http_port is None:
        yield None
    else:
        with _reserved(config, config.http_port) as port:
            yield port


@contextlib.contextmanager
def _reserved(config: FrontendConfig, port: int) -> Iterator[int]:
    """Reserve a public port for the workers: no other program can bind it before they listen."""
    # Checked without sharing first, so that two groups of workers never share one port.
    address = join_address(config.host, port)
    check_address(address, shares_port=config.share_port)
    with bind_socket(address, shares_port=True) as holder:
        yield int(holder.getsockname()[1])


def _announce(
    config: FrontendConfig,
    port: int,
    http_port: int | None,
    admin_http: str,
    addresses: Sequence[Announcement],
) -> None:
    address = join_address(config.host, port)
    http = {} if http_port is None else {"http": join_address(config.host, http_port)}
    admin_addresses = [one.admin_address for one in addresses]
    logger.info(
        "serving",
        extra={"address": address, **http, "admin_addresses": admin_addresses, "admin_http": admin_http},
    )
    write_announcement(
        config.announce_fd,
        {
            "service": "frontend",
            "index": config.index,
            "pid": os.getpid(),
            "address": address,
            **http,
            "admin_address": admin_addresses[0],
            "admin_http": admin_http,
            "admin_addresses": admin_addresses,
            "worker_pids": [one.pid for one in addresses],
        },
    )
