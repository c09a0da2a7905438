"""Service processes that may be killed and started again on their own ports. Knows no request."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType

from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych_cli.serve.readiness import await_ready
from triptych_cli.services import command_of
from triptych_kit.addresses import join_address
from triptych_kit.channel import open_channel
from triptych_kit.process.child import Child, ChildDied

_REPOSITORY = Path(__file__).resolve().parent.parent.parent
_ROOTS = (str(_REPOSITORY), str(_REPOSITORY / "protos"), str(_REPOSITORY / "kernels"))
# ::1 where all runs on IPv6 alone (`make test-chaos-ipv6`).
LOOPBACK = os.environ.get("LOOPBACK", "127.0.0.1")
_FAMILY = socket.AF_INET6 if ":" in LOOPBACK else socket.AF_INET
_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 30.0
_STATUS_LIMIT_S = 60.0
_POLL_S = 0.02
_KEEP_LIMIT_S = 600.0
_FIRST_PORT = 10_000
_NUM_PORT_ATTEMPTS = 100


class StartFailed(Exception):
    """A service ended before it said where it listens."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A service to run: its number, its flags without those of ports, and additions to its environment."""

    service: str
    index: int
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How scenarios call it, e.g. `engine-0`."""
        return f"{self.service}-{self.index}"


class ServiceProcess:
    """One service on one port for all its lives, so that the others find it again; logs JSON into a file."""

    def __init__(self, plan: ServicePlan, port: int, log_file: Path) -> None:
        self.plan = plan
        self.address = join_address(LOOPBACK, port)
        self.admin_address = ""
        self.admin_http = self.http = ""
        self.log_file = log_file
        self.num_starts = 0
        self._port = port
        self._process: Child | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int:
        """Its process id in its newest life."""
        return self._started().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running

    @property
    def exit_status(self) -> int | None:
        """The exit status of its newest process, a signal's number negative; None while it runs."""
        return self._started().exit_code

    async def start(self) -> None:
        """Start it and wait until it listens, which is not until it is ready. Raises StartFailed."""
        flags = (f"--port={self._port}", f"--index={self.plan.index}", "--log-format=json")
        command = (*command_of(self.plan.service), *self.plan.flags, *flags)
        with self.log_file.open("ab") as log:
            self._process = Child(
                self.name, command, self._environment(), announces=True, stdout=log, stderr=log
            )
        self.num_starts += 1
        try:
            announcement = await asyncio.wait_for(self._process.announced(), _START_LIMIT_S)
        except ChildDied as died:
            raise StartFailed(f"{died}: {self.log_file.read_text()[-2000:]}") from died
        self.admin_address = announcement.admin_address
        self.admin_http, self.http = announcement.admin_http, announcement.http

    async def ready(self) -> None:
        await asyncio.wait_for(await_ready(self.plan.service, self.address), _START_LIMIT_S)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        if self._process is not None:
            self._process.send_signal(number)

    async def ended(self, limit_s: float = _STOP_LIMIT_S) -> int:
        """Wait for its end; its exit status. TimeoutError after the limit."""
        process = self._started()
        await asyncio.wait_for(process.wait(), limit_s)
        assert process.exit_code is not None
        return process.exit_code

    async def stop(self) -> None:
        """Ask it to end, and end it where it does not."""
        if self._process is not None:
            self.send(signal.SIGCONT)
            await self._process.stop(_STOP_LIMIT_S)

    async def status(self) -> dict[str, float | str]:
        """Its own facts and gauges, as its admin service tells them."""
        async with open_channel(self.admin_address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_STATUS_LIMIT_S)
        return {
            value.key: value.number if value.HasField("number") else value.text for value in answer.values
        }

    def log_records(self) -> Iterator[dict]:
        """Its JSON log lines of all its lives, oldest first; others are passed over."""
        for line in self.log_file.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                try:
                    yield json.loads(line)
                except ValueError:
                    # Killed in the middle of a line.
                    continue

    def _started(self) -> Child:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    def _environment(self) -> dict[str, str]:
        roots = (*_ROOTS, *filter(None, [self.plan.environment.get("PYTHONPATH")]))
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **self.plan.environment,
            "PYTHONPATH": os.pathsep.join(roots),
        }


class Fleet:
    """Services of one machine by name; all of them end with the block."""

    def __init__(self, log_folder: Path) -> None:
        self.processes: dict[str, ServiceProcess] = {}
        self._log_folder = log_folder
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __getitem__(self, name: str) -> ServiceProcess:
        return self.processes[name]

    def of(self, service: str) -> list[ServiceProcess]:
        """All of one service, in order of their numbers."""
        return [process for process in self.processes.values() if process.plan.service == service]

    def add(self, plan: ServicePlan) -> ServiceProcess:
        """Make room for a process; it is not started."""
        process = ServiceProcess(plan, free_port(), self._log_folder / f"{plan.name}.log")
        self.processes[plan.name] = process
        return process

    def twin(self, process: ServiceProcess, name: str, *, same_port: bool) -> ServiceProcess:
        """Another process of the same plan that is not one of the fleet; its log has `name`. Not started."""
        port = int(process.address.rpartition(":")[2]) if same_port else free_port()
        return ServiceProcess(process.plan, port, self._log_folder / f"{name}.log")

    async def start(self, names: Sequence[str] | None = None) -> None:
        """Start these, or all that do not run, at once, and wait until each is ready."""
        chosen = self.processes if names is None else names
        processes = [self.processes[name] for name in chosen if not self.processes[name].is_running]
        await asyncio.gather(*(process.start() for process in processes))
        await asyncio.gather(*(process.ready() for process in processes))

    async def until_routed(self, limit_s: float = 60.0) -> None:
        """Wait until every frontend that runs has every engine that runs READY; TimeoutError if not."""
        async with asyncio.timeout(limit_s):
            for frontend in self.of("frontend"):
                # Another process has no event to wait for.
                while frontend.is_running and not await self.routes_all(frontend):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)

    async def routes_all(self, frontend: ServiceProcess) -> bool:
        """Whether a frontend has as many engines READY as run."""
        states = [value for key, value in (await frontend.status()).items() if is_engine_key(key, "state")]
        return states.count("ready") == sum(engine.is_running for engine in self.of("engine"))

    def keep(self, name: str, *, max_restarts: int = 10) -> None:
        """Start a process again whenever it ends, as a supervisor does, so often at most."""
        self._keepers[name] = asyncio.ensure_future(self._keep(self.processes[name], max_restarts))

    async def release(self) -> None:
        keepers, self._keepers = self._keepers, {}
        for keeper in keepers.values():
            keeper.cancel()
        await asyncio.gather(*keepers.values(), return_exceptions=True)

    async def stop(self) -> None:
        await self.release()
        for service in ("frontend", "engine", "coordinator"):
            await asyncio.gather(*(process.stop() for process in self.of(service)))

    async def _keep(self, process: ServiceProcess, max_restarts: int) -> None:
        for _ in range(max_restarts):
            await process.ended(_KEEP_LIMIT_S)
            start = asyncio.ensure_future(process.start())
            try:
                await asyncio.shield(start)
            except asyncio.CancelledError:
                # Else its addresses would be those of the life before.
                await start
                raise


def is_engine_key(key: str, fact: str) -> bool:
    """Whether a frontend's status key tells this fact of some engine."""
    return key.startswith("engine.") and key.endswith("." + fact)


def free_port() -> int:
    """A loopback port that is free and that the kernel gives to no connection in the meantime.

    Not one of those that it gives: another process gets it before the service starts, and to a listener that
    is not there yet, a connection can be its own peer. Raises OSError if none of a sample is free.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Where the kernel gives nearly all of them, one of those has to do.
    ports = range(_FIRST_PORT, max(first_given, _FIRST_PORT + _NUM_PORT_ATTEMPTS))
    for port in random.SystemRandom().sample(ports, _NUM_PORT_ATTEMPTS):
        with socket.socket(_FAMILY) as listener, suppress(OSError):
            listener.bind((LOOPBACK, port))
            return port
    raise OSError(f"no port from {ports.start} to {ports.stop} is free")


def log_instant(record: dict) -> float:
    """When a log line was written, in seconds since 1970; exact to a millisecond."""
    return datetime.fromisoformat(record["ts"]).timestamp()
