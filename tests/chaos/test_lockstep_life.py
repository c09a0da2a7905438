"""Ranks of a lockstep group are killed, asked to end, paused and put to sleep; no answer changes by it."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from benchmarks.rig import faults
from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess, free_port, log_instant
from tests.system.checkpoints import VOCAB_SIZE, make_checkpoint
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import utility_pb2
from triptych_kit.channel import open_channel

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]

NUM_RANKS = 2
NUM_STREAMS = 16
NUM_TOKENS = 160
SERVES_AGAIN_LIMIT_S = 2.0
# Far below the 20 s that an engine has for its requests.
_EXIT_LIMIT_S = 10.0
_LIMIT_S = 60.0
_FORMED, _LEFT = "lockstep group formed", "left the lockstep group"
_MISMATCH_EXIT = 2


@dataclass(slots=True)
class Stream:
    """One greedy request past any end, and the tokens that came of it."""

    prompt: tuple[int, ...]
    rank: int | None = None
    num_tokens: int = NUM_TOKENS
    token_ids: list[int] = field(default_factory=list)
    instants: list[float] = field(default_factory=list)

    async def read(self, channel: grpc.aio.Channel) -> None:
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=self.prompt),
            sampling=sampling_pb2.SamplingParams(
                temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True
            ),
        )
        if self.rank is not None:
            request.data_parallel_rank = self.rank
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for event in stub.Generate(request, timeout=_LIMIT_S):
            if event.HasField("delta"):
                self.token_ids += event.delta.token_ids
                self.instants.append(time.time())


@dataclass(slots=True)
class Group:
    """A coordinator, a frontend, two engines with half of a mixture's experts each, and what they answer."""

    fleet: Fleet
    channel: grpc.aio.Channel
    folder: Path
    undisturbed: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @property
    def engines(self) -> list[ServiceProcess]:
        return self.fleet.of("engine")

    async def ask(self, streams: Sequence[Stream]) -> None:
        await asyncio.gather(*(stream.read(self.channel) for stream in streams))

    def wrong(self, streams: Sequence[Stream]) -> list[int]:
        """Which of these were answered otherwise than while undisturbed."""
        return [
            index
            for index, stream in enumerate(streams)
            if stream.token_ids != self.undisturbed[stream.prompt][: stream.num_tokens]
        ]

    def logged(self, rank: int, message: str, *, since: float = 0.0) -> list[dict]:
        """The lines of that message in an engine's log."""
        records = self.engines[rank].log_records()
        return [one for one in records if one["msg"] == message and log_instant(one) >= since]

    async def until_formed(self, rank: int, size: int, *, since: float) -> dict:
        """Wait for the first group of so many that a rank forms after that instant; its line."""
        return await until(
            lambda: [one for one in self.logged(rank, _FORMED, since=since) if one["size"] == size]
        )

    async def until_states(self, state: str) -> None:
        async with asyncio.timeout(_LIMIT_S):
            for engine in self.engines:
                while (await engine.status()).get("lockstep.state") != state:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def call(self, rank: int, **call: object) -> None:
        """Have an operator's call done by an engine."""
        request = admin_pb2.UtilityRequest(call=utility_pb2.UtilityCall(**call))
        async with open_channel(self.engines[rank].admin_address) as channel:
            await admin_pb2_grpc.AdminServiceStub(channel).Utility(request, timeout=_LIMIT_S)

    async def pause(self, rank: int) -> None:
        pause = utility_pb2.PauseCall(mode=utility_pb2.PAUSE_MODE_KEEP, clear_cache=False)
        await self.call(rank, pause=pause)

    async def resume(self, rank: int) -> None:
        await self.call(rank, resume=utility_pb2.ResumeCall())


async def until(look: Callable[[], list]) -> dict:
    """Wait until there is something to be seen, as another process has no event to wait for; the first."""
    async with asyncio.timeout(_LIMIT_S):
        while not (seen := look()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return seen[0]


def prompts() -> Iterator[tuple[int, ...]]:
    choose = random.Random(11)
    while True:
        yield tuple(choose.randrange(16, VOCAB_SIZE) for _ in range(choose.randint(4, 48)))


def streams_of(*ranks: int | None) -> list[Stream]:
    """The same prompts each time, for these ranks in turn."""
    source = prompts()
    return [Stream(next(source), ranks[index % len(ranks)]) for index in range(NUM_STREAMS)]


def flags_of(model: Path, coordinator: ServiceProcess, rank: int, *more: str) -> tuple[str, ...]:
    group = (f"--data-parallel-rank={rank}", f"--data-parallel-size={NUM_RANKS}", "--expert-parallel")
    alone = ("--num-threads=1", "--device=cpu", f"--coordinator={coordinator.address}")
    return (str(model), *alone, *group, *more)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def group(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Group]:
    folder = tmp_path_factory.mktemp("life")
    model = await asyncio.to_thread(make_checkpoint, "mixtral", folder / "mixtral")
    async with Fleet(folder) as fleet:
        coordinator = fleet.add(ServicePlan("coordinator", 0))
        await fleet.start()
        for rank in range(NUM_RANKS):
            fleet.add(ServicePlan("engine", rank, flags_of(model, coordinator, rank)))
        known = (f"--coordinator={coordinator.address}", "--text-workers=1")
        frontend = fleet.add(ServicePlan("frontend", 0, known))
        await fleet.start()
        await fleet.until_routed()
        async with open_channel(frontend.address, profile="public") as channel:
            group = Group(fleet, channel, folder)
            streams = streams_of(0, 1)
            await group.ask(streams)
            group.undisturbed = {stream.prompt: stream.token_ids for stream in streams}
            assert len({token for stream in streams for token in stream.token_ids}) >= 20
            yield group


async def _begin(group: Group, streams: Sequence[Stream]) -> asyncio.Future[None]:
    """Ask, and return when every stream has begun."""
    asking = asyncio.ensure_future(group.ask(streams))
    await until(lambda: [1] if all(len(stream.token_ids) >= 4 for stream in streams) else [])
    return asking


async def _answers_itself(group: Group, rank: int) -> None:
    """Assert that this very engine gives the answers that were given before."""
    before = float((await group.engines[rank].status())["num_finished"])
    streams = streams_of(rank)
    await group.ask(streams)
    assert group.wrong(streams) == []
    assert (await group.engines[rank].status())["num_finished"] == before + NUM_STREAMS


async def test_a_rank_killed_in_a_wave_costs_nothing_and_serves_again_when_it_is_restarted(group):
    streams = streams_of(0, None)
    asking = await _begin(group, streams)
    group.fleet.keep("engine-1", max_restarts=1)
    killed_at = time.time()
    await faults.kill(group.engines[1])
    formed = await group.until_formed(0, 1, since=killed_at)
    await asking
    survivors = [stream for stream in streams if stream.rank == 0]
    met_s = log_instant(formed) - killed_at
    again_s = min(min(one for one in s.instants if one > killed_at + met_s) for s in survivors) - killed_at
    print(f"\nwithout it: met after {met_s:.3f} s, a token after {again_s:.3f} s")
    assert again_s < SERVES_AGAIN_LIMIT_S
    assert group.wrong(streams) == []
    rejoined = await group.until_formed(1, NUM_RANKS, since=killed_at)
    await group.fleet.until_routed()
    print(f"with it again after {log_instant(rejoined) - killed_at:.1f} s")
    await _answers_itself(group, 1)


async def test_a_rank_killed_while_all_stand_idle_is_met_again_without_a_wave(group):
    await group.until_states("paused")
    group.fleet.keep("engine-1", max_restarts=1)
    killed_at = time.time()
    await faults.kill(group.engines[1])
    await group.until_formed(0, NUM_RANKS, since=killed_at)
    (left,) = group.logged(0, _LEFT, since=killed_at)
    # A step would have found it in other words.
    assert "has ended" in left["cause"]
    print(f"\nleft after {log_instant(left) - killed_at:.2f} s")
    await group.fleet.until_routed()
    await _answers_itself(group, 1)


async def test_a_terminated_rank_lets_the_others_go_on_before_it_ends(group):
    streams = streams_of(0, 1)
    asking = await _begin(group, streams)
    signalled_at = time.time()
    group.engines[1].send(signal.SIGTERM)
    assert await group.engines[1].ended() == 0
    print(f"\nended after {time.time() - signalled_at:.2f} s")
    await asking
    assert group.wrong(streams) == []
    await group.until_formed(0, 1, since=signalled_at)
    assert [group.logged(rank, _LEFT, since=signalled_at) for rank in range(NUM_RANKS)] == [[], []]
    await group.fleet.start(["engine-1"])
    await group.until_formed(0, NUM_RANKS, since=signalled_at)
    await group.fleet.until_routed()
    await _answers_itself(group, 1)


def _changed(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_a_rank_that_would_compute_something_else_ends_with_both_hashes(group):
    other = await asyncio.to_thread(_changed, group.folder / "mixtral", group.folder / "other")
    apart = "--data-parallel-group=apart"
    coordinator = group.fleet["coordinator-0"]
    plans = [
        flags_of(group.folder / "mixtral", coordinator, 0, apart),
        flags_of(group.folder / "mixtral", coordinator, 1, apart, "--dtype=bfloat16"),
        flags_of(other, coordinator, 1, apart),
    ]
    first, *others = (
        ServiceProcess(ServicePlan("engine", 10 + index, flags), free_port(), group.folder / f"apart-{index}")
        for index, flags in enumerate(plans)
    )
    await first.start()
    try:
        await until(lambda: [one for one in first.log_records() if one["msg"].startswith("loaded")])
        for engine in others:
            await engine.start()
            assert await engine.ended() == _MISMATCH_EXIT
            (line,) = (
                text
                for text in engine.log_file.read_text().splitlines()
                if text.startswith("triptych engine:")
            )
            hashes = {text for text in line.split("'") if len(text) == 64}
            print(f"\n{line}")
            assert len(hashes) == 2
    finally:
        await first.stop()


async def test_ranks_sleep_when_all_stand_still_and_not_before(group):
    sleep = utility_pb2.SleepCall(level=1, mode=utility_pb2.PAUSE_MODE_KEEP)
    await group.pause(0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await group.call(0, sleep=sleep)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "pause all of them first" in (refused.value.details() or "")
    await group.pause(1)
    await group.until_states("quiet")
    for rank in range(NUM_RANKS):
        await group.call(rank, sleep=sleep)
    stream = Stream(next(prompts()), 0)
    asking = asyncio.create_task(stream.read(group.channel))
    for rank in range(NUM_RANKS):
        await group.call(rank, wake=utility_pb2.WakeCall())
        await group.resume(rank)
    await asyncio.wait_for(asking, _LIMIT_S)
    assert group.wrong([stream]) == []


async def _put_in_place(group: Group, folder: Path, ranks: Sequence[int], *, paused: Sequence[int]) -> None:
    """Other weights in these ranks, while all ranks of the group are paused."""
    for rank in paused:
        await group.pause(rank)
    for rank in ranks:
        async with asyncio.timeout(_LIMIT_S):
            while (await group.engines[rank].status())["lockstep.state"] != "quiet":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await group.call(rank, update_weights=utility_pb2.UpdateWeightsCall(path=str(folder)))
    for rank in paused:
        await group.resume(rank)


async def test_a_rank_with_other_weights_than_its_group_ends_and_the_others_serve_on(group):
    model = group.folder / "mixtral"
    # Twice the logits: other weights, which choose the same tokens.
    other = await asyncio.to_thread(_changed, model, group.folder / "newer")
    # Those of the other one could go on nowhere: no engine has its weights then.
    streams, changed_at = streams_of(0), time.time()
    asking = await _begin(group, streams)
    await _put_in_place(group, other, [0], paused=range(NUM_RANKS))
    # They are as many with either weights: those of the first hold.
    assert await group.engines[1].ended(_LIMIT_S) == _MISMATCH_EXIT
    await asking
    assert group.wrong(streams) == []
    await group.until_formed(0, 1, since=changed_at)
    returned_at = time.time()
    await group.engines[1].start()
    assert await group.engines[1].ended(_LIMIT_S) == _MISMATCH_EXIT
    (logged,) = group.logged(1, "ranks with different weights do not meet", since=returned_at)
    print(f"\n{logged['cause']}")
    await group.until_formed(0, 1, since=returned_at)
    await _answers_itself(group, 0)
    await _put_in_place(group, model, [0], paused=[0])
    returned_at = time.time()
    await group.fleet.start(["engine-1"])
    await group.until_formed(0, NUM_RANKS, since=returned_at)
    await group.fleet.until_routed()
    await _answers_itself(group, 1)


async def test_ranks_that_all_end_leave_together(group):
    streams = streams_of(0, 1)
    asking = await _begin(group, streams)
    signalled_at = time.time()
    for engine in group.engines:
        engine.send(signal.SIGTERM)
    assert [await engine.ended(_EXIT_LIMIT_S) for engine in group.engines] == [0] * NUM_RANKS
    await asking
    print(f"\nall ended after {time.time() - signalled_at:.2f} s")
    assert group.wrong(streams) == []
    assert [group.logged(rank, _LEFT, since=signalled_at) for rank in range(NUM_RANKS)] == [[], []]
