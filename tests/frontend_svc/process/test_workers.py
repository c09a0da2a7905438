"""Several frontends on one port, as processes: one address, restarts, a common end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import AsyncGenerator, Callable

import grpc
import pytest

from frontend_svc.config import FrontendConfig
from frontend_svc.process.workers import WorkerGroup, worker_command
from tests.frontend_svc.fakes import AT_LENGTH, WAIT_S, Client, FakeEngine, answer, read_all
from tests.processes import announced, running_async, source_environment
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.api.v1 import model_pb2
from triptych_kit.channel import open_channel
from triptych_kit.config import load_config
from triptych_kit.http.admin_http import read_page
from triptych_kit.process.child import ChildDied
from triptych_kit.process.supervision import SupervisorLimits

START_S = 60.0
# Without it all channels of a process to one address share one connection.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
MAX_CONNECTIONS = 64


@contextlib.asynccontextmanager
async def workers(engine: FakeEngine, *flags: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, dict]]:
    """A parent of two workers in front of `engine`, and what it announces once all serve."""
    command = (sys.executable, "-m", "frontend_svc.main", "--workers=2", "--engine", engine.address)
    options = ("--port=0", "--text-workers=1", "--drain-lag-s=0", *flags)
    try:
        async with announced(*command, *options, stderr=asyncio.subprocess.DEVNULL) as started:
            await engine.wait(lambda: len(engine.sessions) == 2)
            yield started
    finally:
        await engine.kill()


async def a_client_of_each(address: str, stack: contextlib.AsyncExitStack) -> dict[str, Client]:
    """Clients by the id of the worker that serves their connection, two of them."""
    clients: dict[str, Client] = {}
    for _ in range(MAX_CONNECTIONS):
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=OWN_CONNECTION))
        client = Client(channel)
        info = await client.model.GetServerInfo(model_pb2.GetServerInfoRequest(), timeout=WAIT_S)
        clients.setdefault(info.frontend_id, client)
        if len(clients) == 2:
            break
    for client in clients.values():
        await client.wait_ready()
    return clients


async def pid_at(admin_address: str) -> int:
    """The process that answers at an admin address, once one does."""
    async with open_channel(admin_address, profile="public") as channel:
        status = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
            admin_pb2.GetStatusRequest(), timeout=START_S, wait_for_ready=True
        )
        return int(status.pid)


async def test_two_workers_serve_one_address_and_drain_together():
    engine = FakeEngine()
    await engine.start()
    async with workers(engine) as (process, record), contextlib.AsyncExitStack() as stack:
        admins = record["admin_addresses"]
        assert record["pid"] == process.pid
        assert [await pid_at(address) for address in admins] == record["worker_pids"]
        assert (record["service"], record["admin_address"], len(set(admins))) == (
            "frontend",
            admins[0],
            2,
        )

        clients = await a_client_of_each(record["address"], stack)
        assert sorted(name.rpartition("-")[0] for name in clients) == ["frontend-0", "frontend-1"]
        running = [client.generate() for client in clients.values()]
        requests = list(await engine.wait_for_requests(2))
        assert requests[0].session is not requests[1].session
        page = await read_page(record["admin_http"], "/metrics", limit_s=WAIT_S)
        assert b"\ntriptych_frontend_requests_total 2.0\n" in page
        # One of the two answers.
        state = json.loads(await read_page(record["admin_http"], "/ui/state", limit_s=WAIT_S))
        assert state["frontend"]["open"] == 1
        assert [one["address"] for one in state["engines"]] == [engine.address]
        page = await read_page(record["admin_http"], "/traces/last?n=64", limit_s=WAIT_S)
        starts = [trace for trace in json.loads(page)["traces"] if trace["name"] == "start frontend"]
        assert {trace["pid"] for trace in starts} == set(record["worker_pids"])
        process.send_signal(signal.SIGTERM)
        for client in clients.values():
            await client.wait_ready(is_ready=False)
        for request in requests:
            engine.step({request: [5]}, finished={request: AT_LENGTH})
        for call in running:
            assert (await read_all(call))[2] == [5]
        assert await asyncio.wait_for(process.wait(), START_S) == 0


async def test_a_worker_that_is_killed_starts_again_with_its_admin_port_while_the_other_serves():
    engine = FakeEngine(answer("x"))
    await engine.start()
    async with workers(engine) as (process, record), contextlib.AsyncExitStack() as stack:
        admin, killed = record["admin_addresses"][1], record["worker_pids"][1]
        clients = await a_client_of_each(record["address"], stack)
        other = next(client for name, client in clients.items() if name.startswith("frontend-0-"))
        os.kill(killed, signal.SIGKILL)
        assert (await read_all(other.generate()))[1] == "x"
        while (pid := await _pid_or_none(admin)) in (None, killed):
            pass
        assert os.getpgid(pid) == pid, "Ctrl-C in a terminal must reach the parent alone"
        assert os.getsid(pid) == os.getsid(0), "sessions are scheduled as groups, against each other"
        assert process.returncode is None
        process.terminate()
        assert await asyncio.wait_for(process.wait(), START_S) == 0


async def _pid_or_none(admin_address: str) -> int | None:
    try:
        return await pid_at(admin_address)
    except grpc.aio.AioRpcError:
        # It died under the call.
        return None


async def test_a_killed_parent_leaves_no_worker_and_a_second_parent_cannot_share_the_port():
    engine = FakeEngine()
    await engine.start()
    async with workers(engine) as (process, record):
        port = record["address"].rpartition(":")[2]
        async with running_async(
            *(sys.executable, "-m", "frontend_svc.main", "--workers=2", f"--port={port}"),
            *("--engine", engine.address),
            env=source_environment(),
            stderr=asyncio.subprocess.PIPE,
        ) as second:
            _, stderr = await asyncio.wait_for(second.communicate(), START_S)
        assert (second.returncode, b"is already in use" in stderr) == (2, True), stderr

        ends = [os.pidfd_open(pid) for pid in record["worker_pids"]]
        process.kill()
        for end in ends:
            # Readable once the process has ended.
            assert select.select([end], [], [], WAIT_S)[0] == [end]
            os.close(end)


async def test_workers_that_cannot_start_end_their_parent_with_their_code():
    async with running_async(
        *(sys.executable, "-m", "frontend_svc.main", "--workers=2", "--port=0", "--engine=127.0.0.1:1"),
        "--tokenizer=/nowhere",
        env=source_environment(),
        stderr=asyncio.subprocess.PIPE,
    ) as process:
        _, stderr = await asyncio.wait_for(process.communicate(), START_S)
    assert (process.returncode, b"/nowhere" in stderr) == (2, True), stderr


ANNOUNCE = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))\n"
    "fd = int(sys.argv[-1].partition('=')[2])\n"
    'os.write(fd, b\'{"admin_address": "127.0.0.1:7"}\\n\')\n'
    "os.close(fd)\n"
)
SERVE = ANNOUNCE + "signal.pause()\n"


@pytest.fixture
async def make_group() -> AsyncGenerator[Callable[..., WorkerGroup]]:
    """Makes groups of programs that are no frontends; each gets its code as its argument."""
    made: list[WorkerGroup] = []

    def make(program: str, *codes: int, **limits: float) -> WorkerGroup:
        group = WorkerGroup(
            len(codes),
            lambda index, admin_port: [sys.executable, "-c", program, str(codes[index]), str(admin_port)],
            source_environment(),
            SupervisorLimits(**{"startup_s": WAIT_S, "restart_delay_s": 0.01, **limits}),
        )
        made.append(group)
        return group

    yield make
    for group in made:
        await group.stop()


async def test_the_worst_exit_code_counts(make_group):
    one = make_group(SERVE, 0, 3, 1)
    await one.start()
    assert await one.stop() == 3


async def test_one_that_died_before_a_stop_does_not_count(make_group):
    one = make_group(SERVE, 0, 0, restart_delay_s=WAIT_S)
    await one.start()
    running = asyncio.ensure_future(one.keep_running())
    os.kill(one.addresses[1].pid, signal.SIGKILL)
    await vars(one)["_workers"][1].wait()
    running.cancel()
    assert await one.stop() == 0


async def test_a_worker_that_cannot_be_started_again_now_is_given_up_only_in_the_end():
    programs = [sys.executable, "/nonexistent/python"]
    failing = WorkerGroup(
        1,
        lambda index, admin_port: [
            programs[admin_port is not None],
            "-c",
            ANNOUNCE + "sys.exit(5)\n",
            "0",
            "0",
        ],
        source_environment(),
        SupervisorLimits(startup_s=WAIT_S, restart_delay_s=0.01, max_restarts=2),
    )
    await failing.start()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ChildDied, match="after 2 restarts"):
            await failing.keep_running()
    assert await failing.stop() == 0


async def test_a_worker_that_does_not_end_is_killed(make_group):
    deaf = make_group(
        SERVE.replace("sys.exit(int(sys.argv[1]))", "None") + "signal.pause()\n" * 9, 0, stop_s=0.2
    )
    await deaf.start()
    assert await deaf.stop() == 128 + signal.SIGKILL


async def test_a_worker_that_keeps_dying_is_given_up_with_its_code(make_group):
    dying = make_group(ANNOUNCE + "sys.exit(5)\n", 0, max_restarts=2)
    await dying.start()
    with pytest.raises(ChildDied, match="exited with code 5 after 2 restarts") as caught:
        await asyncio.wait_for(dying.keep_running(), START_S)
    assert caught.value.exit_code == 5


async def test_a_worker_that_keeps_dying_stays_down_while_another_serves(make_group, caplog):
    one = make_group(SERVE.replace("signal.pause()", "if sys.argv[1] != '5': signal.pause()"), 5, 0)
    await one.start()
    is_given_up = asyncio.Event()
    caplog.handler.addFilter(lambda record: is_given_up.set() or True)
    with caplog.at_level("ERROR"):
        running = asyncio.ensure_future(one.keep_running())
        await asyncio.wait_for(is_given_up.wait(), START_S)
    [record] = caplog.records
    assert (record.message, record.worker, record.num_deaths) == ("worker stays down", 0, 4)
    assert record.last_cause == "exited with code 0"
    assert not running.done()
    running.cancel()


async def test_a_worker_that_does_not_serve_in_time_is_killed(make_group):
    silent = make_group("import signal; signal.pause()", 0, startup_s=0.1)
    with pytest.raises(ChildDied, match=r"worker 0 .* did not serve within 0\.1 s"):
        await silent.start()
    assert vars(silent)["_workers"][0].shell_code == 128 + signal.SIGKILL
    assert await silent.stop() == 0


def test_the_flags_of_a_worker_differ_from_those_of_its_parent():
    argv = ["--workers=3", "--engine=a:1", "--port=0", "--admin-port=7000", "--index=2", "--announce-fd=9"]
    argv += ["--admin-http-host=0.0.0.0", "--admin-http-port=9400", "--insecure"]
    parent = load_config(FrontendConfig, argv, service="frontend", env={}).config
    configs = [
        load_config(
            FrontendConfig,
            worker_command(parent, argv, index, 5555, http_port, admin_port)[5:],
            service="frontend",
            env={"TRIPTYCH_FRONTEND_WORKERS": "3"},
        ).config
        for index, http_port, admin_port in ((0, None, None), (2, 8000, None), (1, 8001, 4444))
    ]
    assert [(one.workers, one.port, one.share_port, one.engine) for one in configs] == [
        (1, 5555, True, ("a:1",))
    ] * 3
    assert [one.admin_port for one in configs] == [7000, 7002, 4444]
    assert [one.index for one in configs] == [6, 8, 7]
    assert [one.http_port for one in configs] == [None, 8000, 8001]
    # Of their own, so that their parent needs no credentials to read them.
    assert len({one.admin_http_uds for one in configs} - {None}) == 3
