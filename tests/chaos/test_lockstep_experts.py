"""Two engines with half of a mixture's experts each answer as one with all, also when one is killed."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from safetensors.torch import load_file

from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess, log_instant
from tests.system.checkpoints import MAX_POSITIONS, VOCAB_SIZE, make_checkpoint
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_kit.channel import open_channel

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]

NUM_STREAMS = 64
NUM_TOKENS = 48
STREAM_LIMIT_S = 120.0
# Less than what an engine waits for another: it is not that wait which ends.
LEAVE_LIMIT_S = 3.5
_FORMED = "lockstep group formed"


@dataclass
class Stream:
    """One request, greedy and past any end, and the tokens that came of it."""

    prompt: tuple[int, ...]
    num_tokens: int
    rank: int | None
    token_ids: list[int] = field(default_factory=list)
    instants: list[float] = field(default_factory=list)

    async def read(self, channel: grpc.aio.Channel, label: str) -> None:
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=self.prompt),
            sampling=sampling_pb2.SamplingParams(
                temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True
            ),
            cache_salt=label,
        )
        if self.rank is not None:
            request.data_parallel_rank = self.rank
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for event in stub.Generate(request, timeout=STREAM_LIMIT_S):
            if event.HasField("delta"):
                self.token_ids += event.delta.token_ids
                self.instants.append(time.monotonic())


@dataclass
class Served:
    """A fleet with a frontend, and the model that it serves."""

    fleet: Fleet
    channel: grpc.aio.Channel
    folder: Path
    labels: itertools.count = field(default_factory=itertools.count)

    @property
    def engines(self) -> list[ServiceProcess]:
        return self.fleet.of("engine")

    async def ask(self, streams: Sequence[Stream]) -> list[list[int]]:
        """All at once; what each was answered with."""
        label = f"load-{next(self.labels)}"
        await asyncio.gather(*(stream.read(self.channel, label) for stream in streams))
        return [stream.token_ids for stream in streams]

    def formed(self) -> list[list[dict]]:
        """By engine, what it has logged of the groups that it formed."""
        return [
            [record for record in engine.log_records() if record["msg"] == _FORMED] for engine in self.engines
        ]

    async def until_formed(self, engines: Sequence[int], size: int, limit_s: float = 60.0) -> None:
        """Wait until the last group that these have formed is of so many."""
        async with asyncio.timeout(limit_s):
            while True:
                formed = self.formed()
                if all(formed[index] and formed[index][-1]["size"] == size for index in engines):
                    return
                # Another process has no event to wait for.
                await asyncio.sleep(0.05)


async def _start(folder: Path, model: Path, num_engines: int) -> Served:
    folder.mkdir()
    fleet = Fleet(folder)
    coordinator = fleet.add(ServicePlan("coordinator", 0))
    await fleet.start()
    known = f"--coordinator={coordinator.address}"
    for index in range(num_engines):
        flags = [str(model), "--num-threads=1", "--device=cpu", known]
        if num_engines > 1:
            flags += [
                f"--data-parallel-rank={index}", f"--data-parallel-size={num_engines}", "--expert-parallel"
            ]  # fmt: skip
        fleet.add(ServicePlan("engine", index, tuple(flags)))
    frontend = fleet.add(ServicePlan("frontend", 0, (known, "--text-workers=1")))
    await fleet.start()
    await fleet.until_routed()
    return Served(fleet, open_channel(frontend.address, profile="public"), model)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, list[int]]:
    """What an engine with all experts answers to every prompt."""
    served = await _start(tmp_path_factory.mktemp("alone") / "logs", model, 1)
    try:
        streams = [*streams_of(NUM_STREAMS), long_stream()]
        answers = await served.ask(streams)
    finally:
        await served.channel.close(None)
        await served.fleet.stop()
    return {stream.prompt: answer for stream, answer in zip(streams, answers, strict=True)}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    served = await _start(tmp_path_factory.mktemp("pair") / "logs", model, 2)
    await served.until_formed((0, 1), 2)
    yield served
    await served.channel.close(None)
    await served.fleet.stop()


def streams_of(count: int, *, ranks: Sequence[int | None] = (None,)) -> list[Stream]:
    """So many prompts, the same ones each time, for these ranks in turn."""
    choose = random.Random(7)
    turns = itertools.cycle(ranks)
    return [
        Stream(
            tuple(choose.randrange(16, VOCAB_SIZE) for _ in range(choose.randint(4, 64))),
            NUM_TOKENS,
            next(turns),
        )
        for _ in range(count)
    ]


def long_stream(rank: int | None = None) -> Stream:
    prompt = tuple(random.Random(9).randrange(16, VOCAB_SIZE) for _ in range(8))
    return Stream(prompt, MAX_POSITIONS - len(prompt), rank)


def differing(streams: Sequence[Stream], expected: dict[tuple, list[int]]) -> list[int]:
    return [index for index, stream in enumerate(streams) if stream.token_ids != expected[stream.prompt]]


async def test_each_engine_holds_half_of_the_expert_bytes(pair):
    weights = load_file(pair.folder / "model.safetensors")
    total = sum(tensor.nbytes for name, tensor in weights.items() if ".experts." in name)
    held = [records[-1]["expert_bytes"] for records in pair.formed()]
    print(f"\nexpert bytes: {total} in all, held {held}")
    assert held == [total // 2, total // 2]


async def test_requests_at_one_rank_then_at_both_are_answered_as_by_one_engine(pair, expected):
    distinct = {token for answer in expected.values() for token in answer}
    assert len(distinct) >= 20
    for ranks in ((1,), (0, 1)):
        streams = streams_of(NUM_STREAMS, ranks=ranks)
        started_at = time.monotonic()
        await pair.ask(streams)
        print(f"\nranks {ranks}: {NUM_STREAMS} streams in {time.monotonic() - started_at:.1f} s")
        assert differing(streams, expected) == []


async def test_one_busy_rank_generates_for_long_while_the_other_takes_part(pair, expected):
    streams = [long_stream(rank) for rank in (0, 0, 1)]
    started_at = time.monotonic()
    for stream in streams:
        await pair.ask([stream])
    duration_s = time.monotonic() - started_at
    print(f"\n{1000 * duration_s / sum(len(stream.token_ids) for stream in streams):.2f} ms a token")
    assert sum(len(stream.token_ids) for stream in streams) >= 1000
    assert differing(streams, expected) == []


async def test_a_rank_that_is_killed_in_a_wave_costs_no_stream(pair, expected):
    streams = [*streams_of(NUM_STREAMS, ranks=(0, None, None)), long_stream(0)]
    asking = asyncio.ensure_future(pair.ask(streams))
    async with asyncio.timeout(STREAM_LIMIT_S):
        # Streams have no event to wait for.
        while min(len(stream.token_ids) for stream in streams) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    victim, survivor = pair.engines[1], pair.engines[0]
    num_formed = len(pair.formed()[0])
    killed_at = time.time()
    victim.send(signal.SIGKILL)
    await asking
    records = [record for record in survivor.log_records() if log_instant(record) >= killed_at]
    left = next(record for record in records if record["msg"] == "left the lockstep group")
    formed = next(record for record in records if record["msg"] == _FORMED)
    left_s, formed_s = log_instant(left) - killed_at, log_instant(formed) - killed_at
    print(f"\nleft after {left_s:.3f} s, met again after {formed_s:.3f} s")
    gaps = [max(b - a for a, b in itertools.pairwise(stream.instants)) for stream in streams]
    print(f"longest gap {max(gaps):.3f} s")
    assert left_s < LEAVE_LIMIT_S
    assert (len(pair.formed()[0]), formed["size"]) == (num_formed + 1, 1)
    assert differing(streams, expected) == []
    await pair.fleet.start([victim.name])
    await pair.fleet.until_routed()
    await pair.until_formed((0, 1), 2)
    again = streams_of(16, ranks=(0, 1))
    await pair.ask(again)
    assert differing(again, expected) == []
