"""gRPC servers with health, reflection and limits, and the lifecycle of a service process.

STARTING -> SERVING -> DRAINING -> STOPPED, driven by signals, mirrored in the health service.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from triptych_kit import health
from triptych_kit.addresses import (
    AddressError,
    check_address,
    join_address,
    private_files,
    split_address,
    unix_path,
)
from triptych_kit.call_turns import CallTurns
from triptych_kit.errors import InvalidTransition, ServiceError
from triptych_kit.interceptors import CheckMessage, server_interceptors
from triptych_kit.limits import ADMIN, INTERNAL, PUBLIC, LimitProfile
from triptych_kit.open_calls import OpenCalls
from triptych_kit.process.setup import stop_signals
from triptych_kit.security.listeners import OPEN_LISTENERS, ListenerSecurity

__all__ = [
    "ADMIN",
    "INTERNAL",
    "PUBLIC",
    "AddressError",
    "DrainCut",
    "Lifecycle",
    "LimitProfile",
    "Listener",
    "Registration",
    "Server",
    "ServiceState",
    "check_address",
    "run_server",
    "write_announcement",
]

logger = logging.getLogger(__name__)

# Time to send complete answers after the drain is done.
_FLUSH_GRACE_S = 0.5
# Time for `on_cut` to end the remaining calls with their own errors, after a drain timeout.
_CUT_GRACE_S = 0.4
# Interval in which the progress of a drain is looked at.
_PROGRESS_S = 0.1
# Replaces both graces after a second signal.
_HURRIED_GRACE_S = 0.2

_V1ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
V1ALPHA_NAME: str = reflection.SERVICE_NAME
V1_NAME = V1ALPHA_NAME.replace(_V1ALPHA, _V1)


class ServiceState(Enum):
    """Lifecycle of a service process."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


_TRANSITIONS: dict[ServiceState, frozenset[ServiceState]] = {
    ServiceState.STARTING: frozenset({ServiceState.SERVING, ServiceState.STOPPED}),
    ServiceState.SERVING: frozenset({ServiceState.DRAINING, ServiceState.STOPPED}),
    ServiceState.DRAINING: frozenset({ServiceState.STOPPED}),
    ServiceState.STOPPED: frozenset(),
}


class DrainCut(Enum):
    """Why a drain ended before its work was done."""

    DEADLINE = "deadline"
    SIGNAL = "signal"


class Lifecycle:
    """The state of one process, and how it is to drain; an invalid transition is a bug.

    num_in_flight: returns the number of requests that a drain waits for.
    """

    def __init__(self, num_in_flight: Callable[[], int] = lambda: 0) -> None:
        self.state = ServiceState.STARTING
        self.num_in_flight = num_in_flight
        self.drain_deadline_s: float | None = None
        self.keeps_running = False  # the process stays when it is drained, until a signal
        self.has_signal = False
        self._is_ordered = asyncio.Event()
        self._is_drained = asyncio.Event()

    def move_to(self, state: ServiceState) -> None:
        """Enter `state` and log it."""
        if state not in _TRANSITIONS[self.state]:
            raise InvalidTransition(f"a service cannot go from {self.state.value} to {state.value}")
        self.state = state
        logger.info("service state", extra={"state": state.value})

    def drain(self, deadline_s: float | None, *, keeps_running: bool) -> None:
        """Have the process drain as on a signal. Without effect once it is to drain."""
        if not self._is_ordered.is_set():
            self.drain_deadline_s, self.keeps_running = deadline_s, keeps_running
            self._is_ordered.set()

    def note_signal(self, deadline_s: float) -> None:
        """The first signal: drain from now on for `deadline_s`, then end."""
        self.drain_deadline_s, self.keeps_running, self.has_signal = deadline_s, False, True
        self._is_ordered.set()

    def note_drained(self) -> None:
        self._is_drained.set()

    async def until_ordered(self) -> None:
        """Wait for `drain`."""
        await self._is_ordered.wait()

    async def progress(self) -> AsyncIterator[tuple[int, ServiceState]]:
        """The number of requests in flight and the state, at each change until the drain is over."""
        last: tuple[int, ServiceState] | None = None
        while True:
            is_drained, now = self._is_drained.is_set(), (self.num_in_flight(), self.state)
            if now != last:
                yield now
            if is_drained:
                return
            last = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROGRESS_S):
                    await self._is_drained.wait()


@dataclass(frozen=True, slots=True)
class Registration:
    """A servicer to serve: its full proto name, how to add it, and whether it is ready from the start."""

    full_name: str
    add: Callable[[grpc.aio.Server], None]
    is_ready: bool = False


class Listener(Protocol):
    """A listening server that `run_server` starts, drains and stops."""

    async def start(self) -> str:
        """Bind and serve. Returns the bound `host:port`; raises AddressError if it cannot be bound."""
        ...

    def drain(self) -> None:
        """Report that no new work should be sent. Calls are still served."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Stop serving; running calls get `grace_s` to end."""
        ...


class Server:
    """A grpc.aio server with health, reflection and limits. Built, started and stopped in one event loop.

    listen: host:port or unix:/path.  check_large: checks requests above 64 KiB away from the event loop;
    without it they are checked on it.  security: who may call, and TLS; a unix socket is open to its user.
    health_names: services that are served elsewhere, whose health is here too.  turns: of calls of accounts.
    """

    def __init__(
        self,
        *,
        listen: str,
        registrations: Sequence[Registration],
        profile: LimitProfile,
        service: str,
        reflection: bool = True,
        check_large: CheckMessage | None = None,
        security: ListenerSecurity = OPEN_LISTENERS,
        health_names: Sequence[str] = (),
        turns: CallTurns | None = None,
    ) -> None:
        self._turns = turns
        self._check_large = check_large
        self._security = security
        self._listen = listen
        self._registrations = registrations
        self._profile = profile
        self._service = service
        self._has_reflection = reflection
        self._health = health.HealthServicer(
            [*(registration.full_name for registration in registrations), *health_names]
        )
        self._server: grpc.aio.Server | None = None
        self._calls = OpenCalls()
        self._port = 0
        for registration in registrations:
            self._health.set_ready(registration.full_name, registration.is_ready)

    @property
    def num_calls(self) -> int:
        """The number of open calls, without those of health and reflection."""
        return len(self._calls)

    async def start(self) -> str:
        """Bind and serve. Returns the bound address; raises AddressError if it cannot be bound."""
        # Checked first: grpc does not report why it could not bind, and prints messages of its own.
        check_address(self._listen, shares_port=self._profile.shares_port)
        server = grpc.aio.server(
            interceptors=server_interceptors(
                self._service,
                calls=self._calls,
                limits=self._profile.message_limits,
                check_large=self._check_large,
                authenticator=self._security.authenticator,
                note_call=self._security.strangers.note_call,
                note_known=self._security.strangers.note_known,
                turns=self._turns,
            ),
            options=self._profile.options(),
        )
        for registration in self._registrations:
            registration.add(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._has_reflection:
            names = [registration.full_name for registration in self._registrations]
            add_reflection(server, [*names, health.SERVICE_NAME])
        try:
            port = self._port = self._bind(server)
        except RuntimeError as error:
            raise AddressError(errno.EADDRINUSE, f"address {self._listen} cannot be bound") from error
        await server.start()
        self._server = server
        is_unix = unix_path(self._listen) is not None
        if not is_unix and self._security.authenticator.needs_credentials:
            self._security.strangers.watch(port)
        return self._listen if is_unix else join_address(split_address(self._listen)[0], port)

    def _bind(self, server: grpc.aio.Server) -> int:
        if unix_path(self._listen) is not None:
            with private_files():
                return server.add_insecure_port(self._listen)
        if self._security.tls is None:
            return server.add_insecure_port(self._listen)
        return server.add_secure_port(self._listen, self._security.tls.grpc_credentials())

    def set_ready(self, full_name: str, is_ready: bool) -> None:
        """Set the health of a served name."""
        self._health.set_ready(full_name, is_ready)

    def drain(self) -> None:
        """Report NOT_SERVING for everything from now on. Calls are still served."""
        self._health.drain()

    async def end_calls(self, error_of: Callable[[], ServiceError], *, grace_s: float = 0.0) -> None:
        """End every call with an error after `grace_s`, except those of health and reflection.

        Later calls get the error at once. Returns when all have ended; a call that writes to a client that
        does not read may never end.
        """
        await self._calls.end(error_of, grace_s=grace_s)

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, give running ones `grace_s` to end, cancel the rest."""
        self._health.drain()
        self._health.close()
        # Dereferenced here: grpc's server does its last cleanup in its event loop when it is collected.
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_s)
        self._security.strangers.leave(self._port)


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Let clients list `service_names` and fetch their descriptors."""
    _describe_v1(descriptor_pool.Default())
    servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]  # missing in the stubs
        [*service_names, V1ALPHA_NAME, V1_NAME]
    )
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1ALPHA_NAME, V1_NAME):
        handlers = {"ServerReflectionInfo": method}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _describe_v1(pool: descriptor_pool.DescriptorPool) -> None:
    # grpcio-reflection has only v1alpha; a client that describes v1 itself needs its descriptor as well.
    path = "grpc/reflection/v1/reflection.proto"
    proto = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    text = text_format.MessageToString(proto).replace(_V1ALPHA, _V1).replace(proto.name, path)
    try:
        pool.FindFileByName(path)
    except KeyError:
        pool.AddSerializedFile(
            text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString()
        )


async def run_server(
    servers: Sequence[Listener],
    *,
    on_drain: Callable[[], Awaitable[None]],
    drain_deadline_s: float,
    announce: Callable[[list[str]], None],
    on_cut: Callable[[DrainCut], Awaitable[None]] | None = None,
    lifecycle: Lifecycle | None = None,
) -> int:
    """Serve until a signal or `Lifecycle.drain`, then drain and stop. Returns the exit code.

    `announce` gets the bound addresses, in the order of `servers`. On the first signal health reports
    NOT_SERVING at once and `on_drain` is awaited: it refuses new work, and returns when running work is done
    and endless streams are closed. The deadline or a second signal cuts the drain: `on_cut` gets a short time
    to end running calls with an error that has the reason, and the rest is cancelled. Connections get GOAWAY
    only after that. The first signal gives a drain that was ordered otherwise its own deadline.
    """
    lifecycle = lifecycle or Lifecycle()
    grace_s = 0.0
    with _signals() as received:
        try:
            announce([await server.start() for server in servers])
            lifecycle.move_to(ServiceState.SERVING)
            await _until_drain(received, lifecycle, drain_deadline_s)
            lifecycle.move_to(ServiceState.DRAINING)
            for server in servers:
                server.drain()
            cut = await _drained(on_drain, received, lifecycle, drain_deadline_s)
            if cut is None:
                grace_s = _FLUSH_GRACE_S
            elif on_cut is not None:
                grace_s = await _end_running_calls(on_cut, cut)
            if lifecycle.keeps_running:
                lifecycle.note_drained()
                await received.get()
        finally:
            lifecycle.move_to(ServiceState.STOPPED)
            lifecycle.note_drained()
            await asyncio.gather(*(server.stop(grace_s) for server in servers))
    return 0


def write_announcement(fd: int | None, record: Mapping[str, str | int | list[str] | list[int]]) -> None:
    """Send the bound addresses to the parent process: one JSON line on an inherited pipe."""
    if fd is None:
        return
    # A parent that stops does not read it any more, and ends this process.
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(dict(record)) + "\n")


async def _until_drain(
    received: asyncio.Queue[signal.Signals], lifecycle: Lifecycle, deadline_s: float
) -> None:
    """Wait for the first signal, or for `Lifecycle.drain`."""
    first_signal = asyncio.ensure_future(received.get())
    ordered = asyncio.ensure_future(lifecycle.until_ordered())
    await asyncio.wait({first_signal, ordered}, return_when=asyncio.FIRST_COMPLETED)
    if first_signal.done():
        lifecycle.note_signal(deadline_s)
    for task in (first_signal, ordered):
        task.cancel()
    await asyncio.wait({first_signal, ordered})


async def _drained(
    on_drain: Callable[[], Awaitable[None]],
    received: asyncio.Queue[signal.Signals],
    lifecycle: Lifecycle,
    deadline_s: float,
) -> DrainCut | None:
    draining = asyncio.ensure_future(on_drain())
    while True:
        second_signal = asyncio.ensure_future(received.get())
        await asyncio.wait(
            {draining, second_signal},
            timeout=lifecycle.drain_deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if draining.done() or not second_signal.done() or lifecycle.has_signal:
            break
        lifecycle.note_signal(deadline_s)
    is_done = draining.done()
    cut = None if is_done else DrainCut.SIGNAL if second_signal.done() else DrainCut.DEADLINE
    if cut is not None:
        event = "drain timeout" if cut is DrainCut.DEADLINE else "drain interrupted by a second signal"
        logger.warning(event, extra={"cause": cut.value})
    for task in (draining, second_signal):
        task.cancel()
    await asyncio.wait({draining, second_signal})
    if is_done:
        await draining
    return cut


async def _end_running_calls(on_cut: Callable[[DrainCut], Awaitable[None]], cut: DrainCut) -> float:
    """Let the service end running calls with its own errors; returns the grace for their last messages."""
    is_hurried = cut is DrainCut.SIGNAL
    try:
        async with asyncio.timeout(_HURRIED_GRACE_S if is_hurried else _CUT_GRACE_S):
            await on_cut(cut)
    except TimeoutError:
        logger.warning("calls still running after the drain")
    return _HURRIED_GRACE_S if is_hurried else _FLUSH_GRACE_S


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[signal.Signals]]:
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop, numbers = asyncio.get_running_loop(), stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
