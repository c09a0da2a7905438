"""The coordinator dies, stands still, is flooded or cut off, and no client notices. Gaps are printed.

How long gaps may be is measured by `python -m benchmarks chaos`, on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio
import pytest
import pytest_asyncio

from benchmarks.rig import faults
from benchmarks.rig.history import Oracle
from benchmarks.rig.outage import (
    FAULTS,
    NUM_ENGINES,
    Rig,
    engine_flags,
    frontend_flags,
    judge,
    rig,
    stretch,
)
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess, StartFailed
from benchmarks.rig.streams import Load, make_cases
from tests.chaos.faults import partition
from tests.chaos.proxy import Direction, TcpProxy
from tests.system.checkpoints import make_checkpoint
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.channel import open_channel

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]

LEASE_S = 3.0
# So long that the coordinator gives up an engine without reports.
OUTAGE_S = 4.0
CALM_S = 1.0
_LIMIT_S = 60.0
_STRIKES = {fault.name: fault.strike for fault in FAULTS}


@dataclass(frozen=True, slots=True)
class Outage:
    """A stack, and the proxies over which its services reach the coordinator, by their names."""

    rig: Rig
    proxies: dict[str, TcpProxy]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Outage]:
    async with AsyncExitStack() as proxying:
        proxies: dict[str, TcpProxy] = {}

        async def over_a_proxy(name: str, coordinator: ServiceProcess) -> str:
            proxies[name] = await proxying.enter_async_context(TcpProxy(coordinator.address))
            return proxies[name].address

        async with rig(tmp_path_factory.mktemp("outage"), route=over_a_proxy) as stack:
            yield Outage(stack, proxies)
            # Else no goodbye could be sent.
            for proxy in proxies.values():
                proxy.release()


@pytest.mark.parametrize("fault", sorted(_STRIKES))
async def test_no_stream_notices_what_happens_to_the_coordinator(outage: Outage, fault: str) -> None:
    async def strike() -> None:
        observed = await _STRIKES[fault](outage.rig.coordinator, OUTAGE_S)
        print(f"\n{fault}: {observed}", end="")

    await _unnoticed(outage.rig, fault, strike)


@pytest.mark.parametrize(
    ("name", "fact", "num_left"),
    [("engine-0", "num_engines", NUM_ENGINES - 1), ("frontend-0", "num_frontends", 0)],
)
async def test_streams_survive_a_partition_between_one_service_and_the_coordinator(
    outage: Outage, name: str, fact: str, num_left: int
) -> None:
    async def strike() -> None:
        # An engine's lease ends meanwhile; the frontends that have a stream to it use it all the same.
        given_up = _until(outage.rig.coordinator, lambda status: status[fact] == num_left)
        await partition(outage.proxies[name], given_up, Direction.IN, Direction.OUT)
        await _until(outage.rig.coordinator, lambda status: status[fact] == num_left + 1)

    await _unnoticed(outage.rig, f"{name} cut off", strike)


async def test_of_two_coordinators_the_one_that_started_later_is_believed(outage: Outage) -> None:
    older = outage.rig.coordinator
    newer = outage.rig.fleet.twin(older, "newer", same_port=False)
    led = [outage.proxies[name] for name in ("engine-0", "frontend-0")]

    async def strike() -> None:
        await newer.start()
        _lead(led, newer)
        # Each has an engine that the other does not know; frontends keep what they have a stream to.
        await _until(newer, lambda status: (status["num_engines"], status["num_frontends"]) == (1, 1))
        await _until(older, lambda status: (status["num_engines"], status["num_frontends"]) == (1, 0))
        # As long as a new coordinator gives engines to register before it announces them.
        await asyncio.sleep(LEASE_S)
        _lead(led, older)
        await _until(older, lambda status: status["num_refused_as_stale"] != 0)
        # The newer one cannot be reached any more, so in the end all turn to the one that is left.
        await _until(older, lambda status: (status["num_engines"], status["num_frontends"]) == (2, 1))

    try:
        await _unnoticed(outage.rig, "two coordinators", strike)
    finally:
        await newer.stop()


async def test_a_second_coordinator_on_the_port_is_refused_without_effect(outage: Outage) -> None:
    twin = outage.rig.fleet.twin(outage.rig.coordinator, "same-port", same_port=True)

    async def strike() -> None:
        with pytest.raises(StartFailed, match="in use"):
            await twin.start()

    await _unnoticed(outage.rig, "second", strike)
    assert twin.exit_status == 2


async def test_an_engine_that_dies_while_the_coordinator_stands_still_is_not_used(outage: Outage) -> None:
    stack, load = outage.rig, Load(label="dead-engine")
    engine = stack.fleet["engine-1"]
    load.send(stack.channel, stack.cases)
    await faults.stop(stack.coordinator)
    await faults.kill(engine)
    await load.finish()
    # The coordinator still holds it for a member when it goes on: what a frontend sees itself wins.
    await faults.resume(stack.coordinator)
    later = Load(label="dead-engine-later")
    later.send(stack.channel, stack.cases)
    await later.finish()
    await stack.fleet.start()
    await stack.until_known()
    await stack.fleet.until_routed()
    assert stack.oracle.violations(load.records) == []
    assert stack.oracle.violations(later.records) == []


async def test_services_that_start_without_a_coordinator_find_each_other_when_it_comes(tmp_path):
    cases = make_cases(16, num_tokens=32)
    async with Fleet(tmp_path) as fleet:
        coordinator = fleet.add(ServicePlan("coordinator", 0))
        engines = [
            fleet.add(ServicePlan("engine", index, engine_flags(index, coordinator.address)))
            for index in range(NUM_ENGINES)
        ]
        by_hand = tuple(f"--engine={engine.address}" for engine in engines)
        observed, knowing = (
            fleet.add(ServicePlan("frontend", index, (*frontend_flags(coordinator.address), *more)))
            for index, more in enumerate([(), by_hand])
        )
        await fleet.start([*(engine.name for engine in engines), knowing.name])
        await observed.start()
        # One whose engines are configured by hand serves without a coordinator.
        oracle = Oracle(await _answers(knowing, cases, "by-hand"))
        assert not await fleet.routes_all(observed)
        await coordinator.start()
        began_at = asyncio.get_running_loop().time()
        await fleet.until_routed()
        found_s = asyncio.get_running_loop().time() - began_at
        records = await _answers(observed, cases, "configured")
    print(f"\nabsent at the start: everything found {found_s:.2f} s after the coordinator listened")
    assert oracle.violations(records) == []


async def _unnoticed(stack: Rig, label: str, strike: Callable[[], Awaitable[None]]) -> None:
    """Strike under streams: all have to say what they say undisturbed, and no engine may be out of use."""
    async with stack.streams(label.replace(" ", "")) as watched:
        async with stretch(watched, is_outage=False):
            await asyncio.sleep(CALM_S)
        async with stretch(watched, is_outage=True):
            await strike()
            rebuilt_s = await stack.until_known()
    verdict = judge(watched, stack.oracle)
    gaps = (verdict.calm_p999_s, verdict.calm_max_s, verdict.outage_p999_s, verdict.outage_max_s)
    calm_p999, calm_max, outage_p999, outage_max = (round(gap * 1000) for gap in gaps)
    print(
        f"\n{label}: {verdict.num_streams} streams, whole after {rebuilt_s:.2f} s; gaps p99.9 and max in ms:"
        f" calm {calm_p999} {calm_max}, outage {outage_p999} {outage_max}"
    )
    assert list(map(str, verdict.violations)) == []
    assert watched.max_num_lost == 0


async def _answers(frontend: ServiceProcess, cases, label: str):
    async with open_channel(frontend.address, profile="public") as channel:
        load = Load(label=label)
        load.send(channel, cases)
        return await load.finish()


def _lead(proxies: Sequence[TcpProxy], coordinator: ServiceProcess) -> None:
    """Processes on the other side find this coordinator from now on."""
    for proxy in proxies:
        proxy.lead_to(coordinator.address)
        proxy.cut()


async def _until(process: ServiceProcess, holds: Callable[[dict[str, float | str]], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not holds(await process.status()):  # noqa: ASYNC110  Another process has no event to wait for.
            await asyncio.sleep(0.05)


# A lockstep group without its coordinator: it begins waves when it stands idle, and none comes back.

NUM_RANKS = 2
NUM_TOKENS = 24
_PROMPT = tuple(range(20, 36))
_CALL_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Group:
    """A coordinator, one frontend, and two engines with half of a mixture's experts each."""

    fleet: Fleet
    channel: grpc.aio.Channel

    @property
    def coordinator(self) -> ServiceProcess:
        return self.fleet["coordinator-0"]

    async def ask(self, rank: int, label: str) -> list[int]:
        """One greedy request to one rank while all stand idle; its tokens."""
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=_PROMPT),
            sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
            cache_salt=label,
            data_parallel_rank=rank,
        )
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        events = stub.Generate(request, timeout=_CALL_LIMIT_S)
        return [token_id async for event in events for token_id in event.delta.token_ids]

    async def paused_wave(self, *, after: int = 0) -> member_pb2.WaveState:
        """The group's wave as its coordinator knows it, once both ranks stand idle, and another wave was."""
        async with open_channel(self.coordinator.address) as channel, asyncio.timeout(_LIMIT_S):
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            while True:
                answer = await stub.GetTopology(coordinator_pb2.GetTopologyRequest(), timeout=_LIMIT_S)
                waves = [state for state in answer.topology.waves if not state.engines_running]
                states = [state for state in waves if state.wave > after]
                if states and len(answer.topology.engines) == NUM_RANKS:
                    return states[0]
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def group(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Group]:
    model = await asyncio.to_thread(make_checkpoint, "mixtral", tmp_path_factory.mktemp("mixtral"))
    async with Fleet(tmp_path_factory.mktemp("logs")) as fleet:
        coordinator = fleet.add(ServicePlan("coordinator", 0))
        await fleet.start()
        known = f"--coordinator={coordinator.address}"
        for rank in range(NUM_RANKS):
            flags = (str(model), "--num-threads=1", "--device=cpu", known, *_rank_flags(rank))
            fleet.add(ServicePlan("engine", rank, flags))
        frontend = fleet.add(ServicePlan("frontend", 0, (known, "--text-workers=1")))
        await fleet.start()
        await fleet.until_routed()
        async with open_channel(frontend.address, profile="public") as channel:
            yield Group(fleet, channel)


async def _kill_and_restart(coordinator: ServiceProcess, meanwhile: Callable[[], Awaitable[None]]) -> None:
    await faults.kill(coordinator)
    await meanwhile()
    await coordinator.start()


async def _freeze(coordinator: ServiceProcess, meanwhile: Callable[[], Awaitable[None]]) -> None:
    await faults.stop(coordinator)
    await meanwhile()
    await faults.resume(coordinator)


@pytest.mark.parametrize("strike", [_kill_and_restart, _freeze], ids=["killed", "frozen"])
async def test_an_idle_group_begins_waves_without_its_coordinator_and_none_comes_back(group, strike):
    undisturbed = await group.ask(0, f"{strike.__name__}-before")
    before = await group.paused_wave()
    answers: list[list[int]] = []

    async def ask_both_ranks() -> None:
        answers.extend([await group.ask(rank, f"{strike.__name__}-{rank}") for rank in range(NUM_RANKS)])

    await strike(group.coordinator, ask_both_ranks)
    # It may not have read yet what came while it stood still.
    after = await group.paused_wave(after=before.wave)
    print(
        f"\nwave {before.wave} before, {after.wave} after; generation {before.generation}, {after.generation}"
    )
    assert len(undisturbed) == NUM_TOKENS
    assert answers == [undisturbed] * NUM_RANKS
    assert after.generation >= before.generation


def _rank_flags(rank: int) -> tuple[str, ...]:
    return (f"--data-parallel-rank={rank}", f"--data-parallel-size={NUM_RANKS}", "--expert-parallel")
