from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest as Request

from tests.processes import START_LIMIT_S, running
from tests.triptych_kit.fakes import EOF, SERVICE_NAME, FakeService, call_unary, serving
from triptych_kit.channel import open_channel
from triptych_kit.errors import InvalidTransition
from triptych_kit.health import HealthServicer
from triptych_kit.limits import ADMIN, INTERNAL, PUBLIC, LimitProfile
from triptych_kit.server import (
    V1_NAME,
    V1ALPHA_NAME,
    AddressError,
    Lifecycle,
    Registration,
    Server,
    ServiceState,
    run_server,
    write_announcement,
)

ROOT = Path(__file__).resolve().parents[2]
STREAM = f"/{SERVICE_NAME}/Stream"
MIB = 1024 * 1024


@dataclass
class RunningProgram:
    """The drain program in a process of its own."""

    process: subprocess.Popen[str]
    channel: Any

    def let_go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)

    async def not_serving(self) -> None:
        async for answer in health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest()):
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return


@contextlib.asynccontextmanager
async def program(drain_deadline_s: float, *manner: str) -> AsyncIterator[RunningProgram]:
    reader, writer = os.pipe()
    command = (sys.executable, "-m", "tests.triptych_kit.drain_program", str(writer), str(drain_deadline_s))
    pipes = {"pass_fds": [writer], "stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with os.fdopen(reader) as pipe, running(*command, *manner, cwd=ROOT, text=True, **pipes) as process:
        os.close(writer)
        line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), START_LIMIT_S)
        async with open_channel(json.loads(line)["address"]) as channel:
            yield RunningProgram(process, channel)


async def test_sigterm_lets_a_stream_finish_and_exits_0() -> None:
    async with program(drain_deadline_s=20.0) as running:
        call = running.channel.unary_stream(STREAM)(b"")
        assert await call.read() == b"first"
        running.process.terminate()
        await running.not_serving()
        running.let_go_on()
        assert await call.read() == b"last"
        assert await call.code() is grpc.StatusCode.OK
        assert await running.ended() == 0
        assert running.process.stderr is not None
        states = [json.loads(line).get("state") for line in running.process.stderr]
    assert [state for state in states if state] == ["serving", "draining", "stopped"]


async def test_an_idle_service_ends_at_once() -> None:
    async with program(drain_deadline_s=20.0) as running:
        await call_unary(running.channel)
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 0


async def test_a_second_signal_cuts_the_drain() -> None:
    async with program(drain_deadline_s=60.0) as running:
        call = running.channel.unary_stream(STREAM)(b"")
        assert await call.read() == b"first"
        running.process.terminate()
        await running.not_serving()
        running.process.terminate()
        assert await running.ended() == 0
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_deadline_cuts_the_drain() -> None:
    async with program(drain_deadline_s=0.1) as running:
        call = running.channel.unary_stream(STREAM)(b"")
        assert await call.read() == b"first"
        running.process.terminate()
        assert await running.ended() == 0
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("deadline_s", "cause"), [(60.0, "signal"), (0.1, "deadline"), (0.0, "deadline")])
async def test_what_a_cut_drain_leaves_ends_in_the_services_own_words(deadline_s: float, cause: str) -> None:
    async with program(deadline_s, "ends") as running:
        call = running.channel.unary_stream(STREAM)(b"")
        assert await call.read() == b"first"
        running.process.terminate()
        if cause == "signal":
            await running.not_serving()
            running.process.terminate()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.details() == f"moved on, because of the {cause}"
        assert await running.ended() == 0


async def test_a_service_that_cannot_end_what_a_cut_drain_leaves_is_stopped_all_the_same() -> None:
    async with program(0.0, "hangs") as running:
        call = running.channel.unary_stream(STREAM)(b"")
        assert await call.read() == b"first"
        running.process.terminate()
        assert await running.ended() == 0
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_frozen_peer_is_noticed_though_its_kernel_still_answers() -> None:
    async with program(drain_deadline_s=20.0) as running:
        call = running.channel.unary_stream(STREAM)(b"")
        assert await call.read() == b"first"
        running.process.send_signal(signal.SIGSTOP)
        # Without the ping timeout this takes a minute.
        assert await asyncio.wait_for(call.code(), 30) is grpc.StatusCode.UNAVAILABLE


async def test_a_failing_drain_still_stops_the_servers() -> None:
    async def fail() -> None:
        raise RuntimeError("drain failed")

    bound: list[str] = []

    def announce(addresses: list[str]) -> None:
        bound.extend(addresses)
        os.kill(os.getpid(), signal.SIGTERM)

    server = Server(listen="127.0.0.1:0", registrations=[], profile=PUBLIC, service="fake")
    with pytest.raises(RuntimeError, match="drain failed"):
        await run_server([server], on_drain=fail, drain_deadline_s=1.0, announce=announce)
    again = Server(listen=bound[0], registrations=[], profile=PUBLIC, service="fake")
    assert await again.start() == bound[0]
    await again.stop(0.0)


@pytest.mark.parametrize("keeps_running", [False, True])
async def test_a_drain_may_be_ordered_and_the_process_may_stay_until_a_signal(keeps_running: bool) -> None:
    lifecycle, is_drained = Lifecycle(), asyncio.Event()

    async def drain() -> None:
        is_drained.set()

    server = Server(listen="127.0.0.1:0", registrations=[], profile=PUBLIC, service="fake")
    running = asyncio.ensure_future(
        run_server(
            [server],
            on_drain=drain,
            drain_deadline_s=1.0,
            announce=lambda addresses: lifecycle.drain(None, keeps_running=keeps_running),
            lifecycle=lifecycle,
        )
    )
    states = [state async for _, state in lifecycle.progress()]
    assert is_drained.is_set()
    assert states[-1] is (ServiceState.DRAINING if keeps_running else ServiceState.STOPPED)
    if keeps_running:
        os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0
    assert lifecycle.state is ServiceState.STOPPED


async def test_the_first_signal_limits_a_drain_that_was_ordered_without_a_limit() -> None:
    lifecycle = Lifecycle()

    async def never() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    server = Server(listen="127.0.0.1:0", registrations=[], profile=PUBLIC, service="fake")
    running = run_server(
        [server],
        on_drain=never,
        drain_deadline_s=0.05,
        announce=lambda addresses: lifecycle.drain(None, keeps_running=True),
        lifecycle=lifecycle,
    )
    assert await asyncio.wait_for(running, 30) == 0


@pytest.mark.parametrize("state", ServiceState)
@pytest.mark.parametrize("target", ServiceState)
def test_the_life_of_a_service(state: ServiceState, target: ServiceState) -> None:
    allowed = {
        (ServiceState.STARTING, ServiceState.SERVING),
        (ServiceState.STARTING, ServiceState.STOPPED),
        (ServiceState.SERVING, ServiceState.DRAINING),
        (ServiceState.SERVING, ServiceState.STOPPED),
        (ServiceState.DRAINING, ServiceState.STOPPED),
    }
    lifecycle = Lifecycle()
    lifecycle.state = state
    if (state, target) in allowed:
        lifecycle.move_to(target)
        assert lifecycle.state is target
    else:
        with pytest.raises(InvalidTransition):
            lifecycle.move_to(target)


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = Server(listen=address, registrations=[], profile=PUBLIC, service="fake")
        with pytest.raises(AddressError) as caught:
            await server.start()
    assert str(caught.value) == f"address {address} is already in use"


async def test_two_servers_never_share_a_port() -> None:
    first = Server(listen="127.0.0.1:0", registrations=[], profile=INTERNAL, service="fake")
    address = await first.start()
    second = Server(listen=address, registrations=[], profile=INTERNAL, service="fake")
    with pytest.raises(AddressError, match="is already in use"):
        await second.start()
    await first.stop(0.0)


async def test_servers_that_both_share_a_port_listen_on_it_together() -> None:
    shared = dataclasses.replace(PUBLIC, shares_port=True)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        servers = [Server(listen=address, registrations=[], profile=shared, service="fake") for _ in range(2)]
        assert [await server.start() for server in servers] == [address, address]
        alone = Server(listen=address, registrations=[], profile=PUBLIC, service="fake")
        with pytest.raises(AddressError, match="is already in use"):
            await alone.start()
        for server in servers:
            await server.stop(0.0)


async def test_what_runs_on_a_connection_that_is_too_old_may_end_and_the_next_call_connects_anew() -> None:
    go_on = asyncio.Event()

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield context.peer().encode()
        await go_on.wait()
        yield b"last"

    profile = dataclasses.replace(PUBLIC, max_connection_age_ms=100, max_connection_age_grace_ms=60_000)
    async with serving([FakeService(stream=stream).register()], profile) as (_, channel):
        call = channel.unary_stream(STREAM)(b"")
        peer = await call.read()
        # The server has asked the connection to go: the channel leaves it, the stream stays on it.
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 30)
        go_on.set()
        assert await call.read() == b"last"
        assert await call.code() is grpc.StatusCode.OK
        assert await channel.unary_stream(STREAM)(b"").read() != peer


async def test_what_does_not_end_within_the_grace_of_its_connection_is_cut() -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    profile = dataclasses.replace(PUBLIC, max_connection_age_ms=100, max_connection_age_grace_ms=100)
    async with serving([FakeService(stream=stream).register()], profile) as (_, channel):
        call = channel.unary_stream(STREAM)(b"")
        # Where this process was held up, the connection is cut before the first message is taken.
        with contextlib.suppress(grpc.aio.AioRpcError):
            assert await call.read() == b"first"
        assert await asyncio.wait_for(call.code(), 30) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("profile", [PUBLIC, INTERNAL, ADMIN])
def test_connections_live_for_ever_unless_asked_otherwise(profile: LimitProfile) -> None:
    assert not [name for name, _ in profile.options() if "connection_age" in name]


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("127.0.0.1", "is not host:port"),
        ("127.0.0.1:x", "is not host:port"),
        ("127.0.0.1:99999", "is not host:port"),
        ("192.0.2.1:0", "cannot be listened on"),
    ],
)
async def test_addresses_that_cannot_be_had(listen: str, message: str) -> None:
    server = Server(listen=listen, registrations=[], profile=PUBLIC, service="fake")
    with pytest.raises(AddressError) as caught:
        await server.start()
    assert message in str(caught.value)
    assert listen in str(caught.value)


async def test_a_service_can_be_ready_from_the_start() -> None:
    registration = Registration("test.v1.Ready", lambda server: None, is_ready=True)
    async with serving([registration]) as (_, channel):
        request = health_pb2.HealthCheckRequest(service="test.v1.Ready")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("profile", "limit"), [(PUBLIC, 16 * MIB), (INTERNAL, 64 * MIB), (ADMIN, 16 * MIB)])
def test_message_limits(profile: LimitProfile, limit: int) -> None:
    assert dict(profile.options())["grpc.max_receive_message_length"] == limit


async def test_a_message_above_the_limit_is_refused_and_below_it_served() -> None:
    async with serving([FakeService().register()], PUBLIC) as (_, channel):
        assert len(await call_unary(channel, bytes(15 * MIB))) == 15 * MIB
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_unary(channel, bytes(20 * MIB))
        assert await call_unary(channel, b"still here") == b"still here"
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(16 * MIB) in (caught.value.details() or "")


async def test_thousands_of_calls_at_once_on_one_connection_are_answered() -> None:
    async with serving([FakeService().register()], PUBLIC) as (_, channel):
        answers = await asyncio.gather(*(call_unary(channel, b"%d" % number) for number in range(4000)))
    assert answers == [b"%d" % number for number in range(4000)]


async def test_what_comes_compressed_is_refused_and_not_unpacked() -> None:
    async with serving([FakeService().register()], PUBLIC) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError, match="gzip") as caught:
            await call_unary(channel, bytes(MIB), compression=grpc.Compression.Gzip)
        assert await call_unary(channel, b"still here") == b"still here"
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_metadata_above_the_limit_is_refused() -> None:
    async with serving([FakeService().register()], PUBLIC) as (_, channel):
        await call_unary(channel, metadata=(("x-large", "x" * 6000),))
        for size_bytes in (9000, 12_000):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_unary(channel, metadata=(("x-large", "x" * size_bytes),))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("profile", "interval_ms"), [(PUBLIC, 5000), (INTERNAL, 400)])
def test_pings_of_clients_are_allowed(profile: LimitProfile, interval_ms: int) -> None:
    options = dict(profile.options())
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == interval_ms
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.so_reuseport"] == 0
    assert not [name for name in options if "recv_ping" in name]


def test_an_announcement_is_one_line_and_closes_the_pipe() -> None:
    reader, writer = os.pipe()
    write_announcement(writer, {"service": "engine", "index": 1, "pid": 7, "address": "127.0.0.1:1"})
    with os.fdopen(reader) as pipe:
        lines = pipe.readlines()
    assert [json.loads(line) for line in lines] == [
        {"service": "engine", "index": 1, "pid": 7, "address": "127.0.0.1:1"}
    ]


def test_a_parent_that_does_not_wait_for_the_announcement_any_more_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    write_announcement(write_fd, {"address": "127.0.0.1:1"})


def test_without_a_pipe_nothing_is_announced() -> None:
    write_announcement(None, {"service": "engine"})


async def test_a_stopped_server_is_let_go_of_while_its_loop_runs() -> None:
    def grpc_servers() -> dict[int, Any]:
        # By type alone: asking some things for their class makes them warn.
        return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), grpc.aio.Server)}

    # Those of other tests are held: one that is released meanwhile would not be missed, but its id taken.
    others = grpc_servers()
    server = Server(listen="127.0.0.1:0", registrations=[], profile=PUBLIC, service="fake")
    await server.start()
    (own,) = grpc_servers().keys() - others.keys()
    await server.stop(0.0)
    assert own not in grpc_servers()


Response = health_pb2.HealthCheckResponse


async def check(channel: Any, name: str) -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


def watch(channel: Any, name: str) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))


async def test_a_process_is_alive_before_its_services_are_ready() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        assert await check(channel, "") == Response.SERVING
        assert await check(channel, SERVICE_NAME) == Response.NOT_SERVING
        server.set_ready(SERVICE_NAME, True)
        assert await check(channel, SERVICE_NAME) == Response.SERVING
        server.set_ready(SERVICE_NAME, False)
        assert await check(channel, SERVICE_NAME) == Response.NOT_SERVING


async def test_watches_of_an_address_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_kit.health._MAX_WATCHES_OF_ADDRESS", 2)
    async with serving([]) as (_, channel):
        watches = [watch(channel, "") for _ in range(2)]
        for each in watches:
            await each.read()
        with pytest.raises(grpc.aio.AioRpcError, match="2 watches of the health are open") as refused:
            await watch(channel, "").read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await watch(channel, "").read()
                    break
                await asyncio.sleep(0.01)


async def test_an_unknown_name_is_not_found() -> None:
    async with serving([]) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "test.v1.Other")
        assert (await watch(channel, "test.v1.Other").read()).status == Response.SERVICE_UNKNOWN
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_receives_every_change() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        call = watch(channel, SERVICE_NAME)
        seen = [(await call.read()).status]
        for is_ready in (True, False, True):
            server.set_ready(SERVICE_NAME, is_ready)
            seen.append((await call.read()).status)
        server.drain()
        seen.append((await call.read()).status)
        call.cancel()
    assert seen == [
        Response.NOT_SERVING,
        Response.SERVING,
        Response.NOT_SERVING,
        Response.SERVING,
        Response.NOT_SERVING,
    ]


async def test_draining_is_for_good() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        server.drain()
        server.set_ready(SERVICE_NAME, True)
        assert await check(channel, SERVICE_NAME) == Response.NOT_SERVING
        assert await check(channel, "") == Response.NOT_SERVING


async def test_a_watcher_that_leaves_takes_no_other_with_it() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        leaving, staying = watch(channel, SERVICE_NAME), watch(channel, SERVICE_NAME)
        await leaving.read()
        await staying.read()
        leaving.cancel()
        assert await leaving.code() is grpc.StatusCode.CANCELLED
        server.set_ready(SERVICE_NAME, True)
        assert (await staying.read()).status == Response.SERVING
        staying.cancel()


async def test_watches_end_with_the_server() -> None:
    async with serving([FakeService().register()]) as (server, channel):
        call = watch(channel, "")
        assert (await call.read()).status == Response.SERVING
        await asyncio.wait_for(server.stop(grace_s=60.0), 30)
        assert (await call.read()).status == Response.NOT_SERVING
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK


def test_only_served_names_have_a_status() -> None:
    with pytest.raises(ValueError, match="is not served here"):
        HealthServicer([SERVICE_NAME]).set_ready("test.v1.Other", True)


async def ask(channel: Any, service: str, request: Request) -> Any:
    method = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=Request.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method()
    await call.write(request)
    answer = await call.read()
    await call.done_writing()
    return answer


@pytest.mark.parametrize("service", [V1_NAME, V1ALPHA_NAME])
async def test_services_are_listed_under_both_names(service: str) -> None:
    async with serving([]) as (_, channel):
        answer = await ask(channel, service, Request(list_services=""))
    names = {entry.name for entry in answer.list_services_response.service}
    assert names == {"grpc.health.v1.Health", V1_NAME, V1ALPHA_NAME}


@pytest.mark.parametrize("symbol", ["grpc.health.v1.Health", V1_NAME, V1ALPHA_NAME])
async def test_every_listed_service_can_be_described(symbol: str) -> None:
    async with serving([]) as (_, channel):
        answer = await ask(channel, V1_NAME, Request(file_containing_symbol=symbol))
    file = descriptor_pb2.FileDescriptorProto()
    file.ParseFromString(answer.file_descriptor_response.file_descriptor_proto[0])
    assert symbol in [f"{file.package}.{service.name}" for service in file.service]


@pytest.mark.parametrize("name", ["BadRequest", "ErrorInfo", "RetryInfo", "ResourceInfo"])
async def test_the_details_of_statuses_can_be_described(name: str) -> None:
    async with serving([]) as (_, channel):
        answer = await ask(channel, V1_NAME, Request(file_containing_symbol=f"google.rpc.{name}"))
    file = descriptor_pb2.FileDescriptorProto()
    file.ParseFromString(answer.file_descriptor_response.file_descriptor_proto[0])
    assert name in [message.name for message in file.message_type]


async def test_reflection_can_be_left_out() -> None:
    async with serving([], reflection=False) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, V1_NAME, Request(list_services=""))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
