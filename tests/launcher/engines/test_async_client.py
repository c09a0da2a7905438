from __future__ import annotations

import asyncio
import os
import signal
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine_svc.config import EngineConfig
from engine_svc.core.errors import DeviceLost
from engine_svc.loop.mailbox import Fail
from launcher.engines.async_client import AsyncEngineClient
from launcher.engines.child_engine import ChildEngine, flags_of
from launcher.engines.core_client import EngineDead, no_rows
from launcher.engines.factory import make_engine_client
from launcher.engines.hosted import HostedEngine
from launcher.engines.in_process import InProcessClient
from launcher.engines.sync_client import SyncEngineClient
from launcher.services import embedded_model
from service_kit.config import load_config
from service_kit.errors import InvalidArgument, ResourceExhausted, Unimplemented
from service_kit.process import process_environment
from tests.engine_svc.fakes import FakeExecutor
from tests.engine_svc.session.service_rig import ServiceRig, make_entry, serving
from tests.launcher.engines.rig import Gathered, ScriptedEngine, answer_of, in_process_client
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2, step_pb2

CLIENT = engine_pb2.ABORT_REASON_CLIENT
WAIT_S = 20.0


class Scripted:
    """A started client of scripted engines."""

    def __init__(self, num_engines: int = 1, **options) -> None:
        self.engines = [ScriptedEngine() for _ in range(num_engines)]
        self.client = AsyncEngineClient(
            [str(index) for index in range(num_engines)],
            connect=lambda address: self.engines[int(address)].channel(),
            **options,
        )

    async def __aenter__(self) -> Scripted:
        await self.client.start(timeout_s=WAIT_S)
        return self

    async def __aexit__(self, *error) -> None:
        await self.client.close()


async def test_a_thousand_requests_at_once_all_get_their_own_answer() -> None:
    rig = ServiceRig()
    async with serving(rig):
        client = AsyncEngineClient([rig.address])
        await client.start(timeout_s=WAIT_S)
        handles = {client.add(make_entry(number)): number for number in range(1, 1001)}
        gathered = Gathered()
        async with asyncio.timeout(60):
            while client.num_in_flight:
                gathered.take((await client.get_output()).columns)
        await client.close()
    assert gathered.tokens == {handle: answer_of(number) for handle, number in handles.items()}


async def test_a_refused_request_comes_back_with_its_error() -> None:
    rig = ServiceRig()
    async with serving(rig):
        client = AsyncEngineClient([rig.address])
        await client.start(timeout_s=WAIT_S)
        handle = client.add(make_entry(1, prompt=[5] * 500))
        output = await asyncio.wait_for(client.get_output(), WAIT_S)
        assert isinstance(output.rejected[handle], InvalidArgument)
        assert client.num_in_flight == 0
        await client.close()


async def test_requests_spread_and_an_abort_list_is_one_message_to_each_engine() -> None:
    async with Scripted(num_engines=2) as scripted:
        handles = [scripted.client.add(make_entry(number)) for number in range(1, 7)]
        scripted.client.abort([*handles, 999], CLIENT)
        for engine in scripted.engines:
            await engine.until_received(5)  # hello, three requests, one abort
        aborted = [engine.aborts for engine in scripted.engines]
    assert [len(messages) for messages in aborted] == [1, 1]
    assert sorted(aborted[0][0] + aborted[1][0]) == handles
    added = [
        [entry.handle for message in engine.messages for entry in message.add.entries]
        for engine in scripted.engines
    ]
    assert [messages[0] for messages in aborted] == added


def step_of(handle: int, *, is_last: bool = False) -> step_pb2.Step:
    column = array("I", [handle]).tobytes()
    ending = step_pb2.StepFinished(row=0, reason=output_pb2.FINISH_REASON_LENGTH)
    finished = [ending] if is_last else []
    return step_pb2.Step(handles=column, num_tokens=b"\1", token_ids=column, finished=finished)


async def test_a_request_is_in_flight_until_its_end_has_been_read() -> None:
    async with Scripted(max_unread=3) as scripted:
        answered, refused = (scripted.client.add(make_entry(number)) for number in (1, 2))
        engine = scripted.engines[0]
        engine.send(step=step_of(answered))
        engine.send(step=step_of(answered, is_last=True))
        engine.send(add_rejected=engine_pb2.AddRejected(handle=refused))
        engine.send(step=step_of(answered))
        async with asyncio.timeout(WAIT_S):
            await _until_dead(scripted.client)  # by the fourth, so the three before it are there
        in_flight = []
        while scripted.client.num_in_flight:
            in_flight.append(scripted.client.num_in_flight)
            await asyncio.wait_for(scripted.client.get_output(), WAIT_S)
        assert in_flight == [2, 2, 1]


async def test_a_corrupt_frame_is_raised_in_every_waiter() -> None:
    async with Scripted() as scripted:
        waiters = [asyncio.ensure_future(scripted.client.get_output()) for _ in range(3)]
        scripted.engines[0].send_corrupt_step()
        done, _ = await asyncio.wait(waiters, timeout=WAIT_S)
        assert [str(waiter.exception()) for waiter in done] == [str(waiters[0].exception())] * 3
        assert all(isinstance(waiter.exception(), EngineDead) for waiter in waiters)


async def test_the_dead_message_is_raised_in_every_waiter_and_every_later_call() -> None:
    async with Scripted() as scripted:
        waiters = [asyncio.ensure_future(scripted.client.get_output()) for _ in range(2)]
        scripted.engines[0].send(dead=engine_pb2.Dead(reason="out of memory"))
        await asyncio.wait(waiters, timeout=WAIT_S)
        for waiter in waiters:
            assert isinstance(waiter.exception(), EngineDead)
            assert "out of memory" in str(waiter.exception())
        with pytest.raises(EngineDead, match="out of memory"):
            scripted.client.add(make_entry(1))
        with pytest.raises(EngineDead, match="out of memory"):
            scripted.client.abort([1], CLIENT)
        with pytest.raises(EngineDead, match="out of memory"):
            await scripted.client.get_output()


async def test_a_client_that_is_marked_dead_sends_nothing_more() -> None:
    async with Scripted() as scripted:
        waiter = asyncio.ensure_future(scripted.client.get_output())
        await asyncio.sleep(0)
        scripted.client.mark_dead("the process was killed")
        with pytest.raises(EngineDead, match="killed"):
            await asyncio.wait_for(waiter, WAIT_S)
        with pytest.raises(EngineDead, match="killed"):
            scripted.client.add(make_entry(1))
        assert len(scripted.engines[0].messages) == 1  # hello


async def test_unread_outputs_end_the_client_at_its_limit() -> None:
    rig = ServiceRig()
    async with serving(rig):
        client = AsyncEngineClient([rig.address], max_unread=3)
        await client.start(timeout_s=WAIT_S)
        for number in range(1, 5):
            client.add(make_entry(number, prompt=[5] * 500))
        async with asyncio.timeout(WAIT_S):
            await _until_dead(client)
        assert [len((await client.get_output()).rejected) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(EngineDead, match="the limit is 3"):
            await client.get_output()
        await client.close()


async def test_start_raises_for_an_engine_that_cannot_be_reached() -> None:
    def connect(address: str):
        raise OSError("no such socket")

    client = AsyncEngineClient(["nowhere"], connect=connect)
    with pytest.raises(EngineDead, match="no such socket"):
        await client.start(timeout_s=WAIT_S)
    await client.close()


async def _until_dead(client: AsyncEngineClient) -> None:
    while True:
        try:
            client.abort([], CLIENT)
        except EngineDead:
            return
        await asyncio.sleep(0)


def _gather(client: SyncEngineClient, handles: dict[int, int]) -> Gathered:
    gathered = Gathered()
    while len(gathered.ended) < len(handles):
        gathered.take(client.get_output(timeout_s=20.0).columns)
    return gathered


async def test_get_output_blocks_until_something_comes() -> None:
    rig = ServiceRig()
    rig.executor.gate.clear()
    async with serving(rig):
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        handles = {await asyncio.to_thread(client.add, make_entry(number)): number for number in (1, 2, 3)}
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(client.get_output, 0.05)
        rig.executor.gate.set()
        gathered = await asyncio.to_thread(_gather, client, handles)
        await asyncio.to_thread(client.close)
    assert gathered.tokens == {handle: answer_of(number) for handle, number in handles.items()}


async def test_the_end_of_the_engine_is_raised_in_the_caller_that_waits_and_in_later_ones() -> None:
    rig = ServiceRig()
    rig.executor.gate.clear()
    async with serving(rig):
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        await asyncio.to_thread(client.add, make_entry(1))
        waiting = asyncio.ensure_future(asyncio.to_thread(client.get_output, 20.0))
        await rig.server.stop(0)
        with pytest.raises(EngineDead):
            await waiting
        for call in (lambda: client.add(make_entry(2)), lambda: client.abort([1], CLIENT), client.get_output):
            with pytest.raises(EngineDead):
                await asyncio.to_thread(call)
        await asyncio.to_thread(client.close)


async def test_an_aborted_request_ends() -> None:
    rig = ServiceRig()
    rig.executor.gate.clear()
    async with serving(rig):
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        handle = await asyncio.to_thread(client.add, make_entry(1, max_tokens=50))
        await asyncio.to_thread(rig.executor.wait_for_launches, 1)
        await asyncio.to_thread(client.abort, [handle], CLIENT)
        # The loop waits for a result and reads nothing, so what comes into its inbox is the abort.
        await asyncio.to_thread(rig.engine.inbox.wait, 10.0)
        rig.executor.gate.set()
        gathered = await asyncio.to_thread(_gather, client, {handle: 1})
        await asyncio.to_thread(client.close)
    assert len(gathered.tokens.get(handle, [])) < 50


async def test_closing_twice_leaves_no_thread() -> None:
    rig = ServiceRig()
    async with serving(rig):
        threads = {thread.name for thread in threading.enumerate()}
        client = await asyncio.to_thread(SyncEngineClient, [rig.address])
        assert "engine-client" in {thread.name for thread in threading.enumerate()}
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(client.close)
        left = {thread.name for thread in threading.enumerate()} - threads
    assert "engine-client" not in left


CONFIG = EngineConfig(model=str(embedded_model()), num_threads=1, num_kv_blocks=64, device="cpu")
ENVIRONMENT = {**process_environment(), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        EngineConfig(
            model="folder", enable_prefix_caching=False, gpu_memory_utilization=0.5, max_model_len=99
        ),
        EngineConfig(model="org/name", revision="main", enable_kv_events=True, scheduling_policy="priority"),
    ],
)
def test_the_flags_say_what_the_configuration_says(config: EngineConfig) -> None:
    loaded = load_config(EngineConfig, flags_of(config), service="engine", env={}).config
    assert loaded == replace(config, port=0)


@asynccontextmanager
async def child_engine(config: EngineConfig, on_death: Callable[[str], None]) -> AsyncIterator[ChildEngine]:
    """One that is closed in the end."""
    engine = ChildEngine(config, ENVIRONMENT, on_death=on_death)
    try:
        yield engine
    finally:
        await engine.close()


async def test_the_death_of_the_process_is_reported_with_its_cause() -> None:
    death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with child_engine(CONFIG, death.set_result) as engine:
        await engine.start()
        os.kill(engine.pid, signal.SIGKILL)
        assert "killed by SIGKILL" in await asyncio.wait_for(death, 10)


async def test_an_end_on_purpose_is_no_death() -> None:
    death: list[str] = []
    async with child_engine(CONFIG, death.append) as engine:
        await engine.start()
        pid = engine.pid
    assert death == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_model_that_cannot_be_loaded_is_reported_with_the_engines_message(tmp_path) -> None:
    async with child_engine(replace(CONFIG, model=str(tmp_path)), lambda why: None) as engine:
        with pytest.raises(EngineDead, match=r"has no config\.json"):
            await engine.start()


def test_a_blocking_client_without_an_address_is_the_engine_itself() -> None:
    client = make_engine_client(is_async=False, config=CONFIG)
    assert isinstance(client, InProcessClient)
    client.add(make_entry(1, max_tokens=3, temperature=0.0, ignore_eos=True))
    num_tokens = 0
    while client.num_in_flight:
        num_tokens += len(client.get_output().columns.token_ids)
    client.close()
    assert num_tokens == 3


def test_an_asyncio_client_without_a_process_of_its_own_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="needs an engine in another process"):
        make_engine_client(is_async=True, config=CONFIG)


async def test_an_address_gives_a_client_of_the_kind_that_is_asked_for() -> None:
    rig = ServiceRig()
    async with serving(rig):
        blocking = await asyncio.to_thread(make_engine_client, is_async=False, addresses=[rig.address])
        assert isinstance(blocking, SyncEngineClient)
        await asyncio.to_thread(blocking.close)
        assert isinstance(make_engine_client(is_async=True, addresses=[rig.address]), AsyncEngineClient)


@pytest.mark.parametrize("is_async", [False, True])
def test_both_an_address_and_a_configuration_are_refused(is_async: bool) -> None:
    with pytest.raises(ValueError, match="not both"):
        make_engine_client(is_async=is_async, addresses=["127.0.0.1:1"], config=CONFIG)


def test_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        make_engine_client(is_async=False)


def test_a_missing_folder_is_a_readable_error(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        make_engine_client(is_async=False, config=EngineConfig(model=str(tmp_path)))


HOSTED_WAIT_S = 30.0


async def test_an_engine_in_this_process_answers_over_the_channel_without_sockets() -> None:
    engine = HostedEngine(CONFIG, on_death=pytest.fail)
    await engine.start()
    client = AsyncEngineClient([engine.address], connect=engine.connect)
    await client.start(timeout_s=HOSTED_WAIT_S)
    handle = client.add(make_entry(1, max_tokens=4, ignore_eos=True))
    num_tokens = 0
    while client.num_in_flight:
        columns = (await asyncio.wait_for(client.get_output(), HOSTED_WAIT_S)).columns
        assert set(columns.handles) == {handle}
        num_tokens += len(columns.token_ids)
    await client.close()
    await engine.close()
    assert num_tokens == 4


async def test_the_end_of_the_loop_is_reported_and_raised_in_waiting_calls() -> None:
    death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = HostedEngine(CONFIG, on_death=death.set_result)
    await engine.start()
    client = AsyncEngineClient([engine.address], connect=engine.connect)
    await client.start(timeout_s=HOSTED_WAIT_S)
    waiting = asyncio.ensure_future(client.get_output())
    engine.served.inbox.put(Fail(ZeroDivisionError("in a step")))
    assert "ZeroDivisionError" in await asyncio.wait_for(death, HOSTED_WAIT_S)
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        await asyncio.wait_for(waiting, HOSTED_WAIT_S)
    await client.close()
    await engine.close()


async def test_a_folder_without_a_model_is_a_readable_error(tmp_path) -> None:
    engine = HostedEngine(EngineConfig(model=str(tmp_path), device="cpu"), on_death=pytest.fail)
    with pytest.raises(EngineDead, match=r"config\.json"):
        await engine.start()
    await engine.close()


def finish(client, gathered: Gathered | None = None) -> Gathered:
    gathered = gathered or Gathered()
    while client.num_in_flight:
        gathered.take(client.get_output().columns)
    return gathered


def test_a_request_completes_without_a_thread() -> None:
    threads = set(threading.enumerate())
    client = in_process_client()
    handle = client.add(make_entry(3))
    gathered = finish(client)
    assert gathered.tokens == {handle: answer_of(3)}
    # Threads of other tests may end meanwhile.
    assert set(threading.enumerate()) <= threads


def test_nothing_is_computed_but_in_get_output() -> None:
    executor = FakeExecutor()
    client = in_process_client(executor)
    client.add(make_entry(1))
    assert executor.num_launched == 0
    client.get_output()
    assert executor.num_launched > 0


def test_many_requests_share_steps() -> None:
    executor = FakeExecutor()
    client = in_process_client(executor)
    handles = {client.add(make_entry(number)): number for number in range(1, 41)}
    gathered = finish(client)
    assert gathered.tokens == {handle: answer_of(number) for handle, number in handles.items()}
    assert executor.num_launched < 40 * 5


def test_an_output_without_requests_has_no_rows() -> None:
    assert list(in_process_client().get_output().columns.handles) == []


def test_an_aborted_request_ends_once_and_the_others_go_on() -> None:
    client = in_process_client()
    first, second = client.add(make_entry(1, max_tokens=50)), client.add(make_entry(2))
    gathered = Gathered()
    gathered.take(client.get_output().columns)
    client.abort([first, 999], CLIENT)
    finish(client, gathered)
    assert gathered.ended == {first, second}
    assert len(gathered.tokens[first]) < 50
    assert gathered.tokens[second] == answer_of(2)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (make_entry(1, prompt=[5] * 200), InvalidArgument),
        (make_entry(1, prompt=[100_000]), InvalidArgument),
        (make_entry(1, temperature=-1.0), InvalidArgument),
    ],
)
def test_what_is_wrong_is_refused_and_leaves_nothing(entry, error) -> None:
    client = in_process_client()
    with pytest.raises(error):
        client.add(entry)
    assert client.num_in_flight == 0


def test_an_adapter_is_refused_by_name() -> None:
    entry = make_entry(1)
    entry.adapter = "mine"
    with pytest.raises(Unimplemented, match="adapter"):
        in_process_client().add(entry)


def test_more_requests_than_a_session_takes_are_refused() -> None:
    client = in_process_client(max_commands=3)
    handles = [client.add(make_entry(number)) for number in range(1, 4)]
    with pytest.raises(ResourceExhausted, match="full"):
        client.add(make_entry(4))
    assert finish(client).ended == set(handles)


def test_the_loss_of_the_device_is_raised_as_it_is_and_the_engine_is_dead_then() -> None:
    def fail(plan) -> None:
        if plan.request_ids:
            raise DeviceLost("in the step")

    client = in_process_client(FakeExecutor(fail))
    client.add(make_entry(1))
    with pytest.raises(DeviceLost):
        client.get_output()
    for call in (client.get_output, lambda: client.add(make_entry(2)), lambda: client.abort([1], CLIENT)):
        with pytest.raises(EngineDead, match="broken off"):
            call()


def test_closing_frees_the_device_once_and_ends_the_client() -> None:
    executor = FakeExecutor()
    client = in_process_client(executor)
    client.add(make_entry(1))
    client.close()
    client.close()
    assert executor.is_shut_down
    assert client.num_in_flight == 0
    with pytest.raises(EngineDead, match="closed"):
        client.add(make_entry(2))


def test_a_stop_token_of_the_request_is_distinguished_from_the_models_own() -> None:
    client = in_process_client()
    handle = client.add(make_entry(3, stop_token_ids=[answer_of(3)[1]]))
    columns = no_rows()
    while client.num_in_flight:
        columns = client.get_output().columns
    ending = columns.endings[list(columns.handles).index(handle)]
    assert ending.stop_token_id == answer_of(3)[1]
    assert ending.eos_token_id is None
    assert output_pb2.FinishReason.Name(output_pb2.FINISH_REASON_STOP).endswith(ending.reason.name)
