"""A lockstep group without its coordinator: it begins waves when it stands idle, and none comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import pytest
import pytest_asyncio

from benchmarks.rig import faults
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from service_kit.channel import open_channel
from tests.system.checkpoints import make_checkpoint
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc, member_pb2

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]

NUM_RANKS = 2
NUM_TOKENS = 24
_PROMPT = tuple(range(20, 36))
_CALL_LIMIT_S = 60.0
_LIMIT_S = 60.0


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
async def test_an_idle_group_begins_waves_without_its_coordinator_and_none_comes_back(
    group: Group, strike: Callable[[ServiceProcess, Callable[[], Awaitable[None]]], Awaitable[None]]
) -> None:
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
