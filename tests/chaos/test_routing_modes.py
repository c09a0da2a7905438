"""Where frontends stand in front of data-parallel ranks: one for all, one for each, one for each node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from benchmarks.rig.processes import LOOPBACK
from tests.system.stack import WAIT_LIMIT_S, EngineView, Stack, address_of
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel
from triptych_kit.process.child import Child

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module")]

# Two nodes of two ranks each: loopback has more than one address, and is given a second one of IPv6.
_OTHER_HOST = "fd00::2" if ":" in LOOPBACK else "127.0.0.2"
_HOSTS = (LOOPBACK, LOOPBACK, _OTHER_HOST, _OTHER_HOST)
_NUM_REQUESTS = 100
# As many as the model has room for: seconds, where to send the requests takes milliseconds.
_LONG_TOKENS = 2000


class Ranks:
    """Four engines that know one coordinator, and frontends in front of them."""

    def __init__(self, stack: Stack, coordinator: Child, engines: list[EngineView]) -> None:
        self._stack = stack
        self._known = f"--coordinator={address_of(coordinator)}"
        self._engines = engines

    async def start_frontends(self, num_engines: int, *labels: Sequence[str]) -> list[Child]:
        """One frontend for each of `labels`; returns when each can use so many engines."""
        frontends = []
        for index, wanted in enumerate(labels):
            flags = ("--port=0", "--text-workers=1", self._known, f"--index={index}")
            chosen = [f"--engine-label={label}" for label in wanted]
            frontends.append(await self._stack.start("frontend", *flags, *chosen, index=index))
        for frontend in frontends:
            await _until_routed(frontend, num_engines)
        return frontends

    async def running_by_rank(self, frontend: Child, num_requests: int) -> list[int]:
        """Send requests at once that last; how many each rank runs when all do.

        One that ended early would leave its rank free for another.
        """
        stub = inference_pb2_grpc.InferenceServiceStub(self._stack.channel(frontend))
        request = generate_pb2.GenerateRequest(prompt="Once upon a time", sampling=_sampling(_LONG_TOKENS))
        calls = [stub.Generate(request, timeout=WAIT_LIMIT_S) for _ in range(num_requests)]
        counts: list[int] = []
        async with asyncio.timeout(WAIT_LIMIT_S):
            while sum(counts) < num_requests:
                counts = [(await engine.stats()).num_running for engine in self._engines]
        for call in calls:
            assert call.cancel(), "a request ended before all of them ran"
        for engine in self._engines:
            await engine.until_idle()
        return counts

    async def finished_by_rank(self, frontends: Sequence[Child], num_requests: int) -> list[int]:
        """Send requests at once, to each frontend in turn; how many each rank has finished of them."""
        before = [(await engine.until_idle()).num_finished for engine in self._engines]
        stubs = [inference_pb2_grpc.InferenceServiceStub(self._stack.channel(one)) for one in frontends]
        request = inference_pb2.GenerateUnaryRequest(
            request=generate_pb2.GenerateRequest(prompt="Once upon a time", sampling=_sampling(32))
        )
        answers = await asyncio.gather(
            *(
                stubs[index % len(stubs)].GenerateUnary(request, timeout=WAIT_LIMIT_S)
                for index in range(num_requests)
            )
        )
        texts = {output.text for answer in answers for output in answer.outputs}
        assert len(texts) == 1 and all(len(answer.outputs) == 1 for answer in answers)
        after = [(await engine.until_idle()).num_finished for engine in self._engines]
        return [last - first for first, last in zip(before, after, strict=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks() -> AsyncIterator[Ranks]:
    async with Stack() as stack:
        coordinator = await stack.start("coordinator", "--port=0")
        known = f"--coordinator={address_of(coordinator)}"
        starts = []
        for rank, host in enumerate(_HOSTS):
            flags_of_rank = (
                f"--data-parallel-rank={rank}",
                f"--data-parallel-size={len(_HOSTS)}",
                f"--host={host}",
                *(("--insecure",) if host != LOOPBACK else ()),
            )
            flags = (str(embedded_model()), "--port=0", "--num-threads=1", known, *flags_of_rank)
            starts.append(stack.start("engine", *flags, index=rank))
        engines = await asyncio.gather(*starts)
        for engine in engines:
            await stack.ready("engine", engine)
        yield Ranks(stack, coordinator, [stack.engine(engine) for engine in engines])


async def test_internal_one_frontend_spreads_a_burst_and_a_load_over_all_ranks(ranks: Ranks) -> None:
    frontends = await ranks.start_frontends(4, ())
    assert await ranks.running_by_rank(frontends[0], 8) == [2, 2, 2, 2]
    counts = await ranks.finished_by_rank(frontends, _NUM_REQUESTS)
    assert sum(counts) == _NUM_REQUESTS and min(counts) > _NUM_REQUESTS / 6


async def test_external_each_rank_serves_what_its_own_frontend_gets(ranks: Ranks) -> None:
    frontends = await ranks.start_frontends(1, *([f"dp_rank={rank}"] for rank in range(4)))
    assert await ranks.finished_by_rank(frontends, _NUM_REQUESTS) == [25, 25, 25, 25]
    assert await ranks.finished_by_rank(frontends[2:3], 3) == [0, 0, 3, 0]


async def test_hybrid_each_nodes_frontend_spreads_over_the_ranks_of_its_node(ranks: Ranks) -> None:
    frontends = await ranks.start_frontends(2, [f"host={LOOPBACK}"], [f"host={_OTHER_HOST}"])
    counts = await ranks.finished_by_rank(frontends, _NUM_REQUESTS)
    assert counts[0] + counts[1] == counts[2] + counts[3] == _NUM_REQUESTS / 2
    assert min(counts) > _NUM_REQUESTS / 6


def _sampling(max_tokens: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


async def _until_routed(frontend: Child, num_engines: int) -> None:
    async with open_channel(address_of(frontend), profile="public") as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                info = await stub.GetServerInfo(model_pb2.GetServerInfoRequest(), timeout=WAIT_LIMIT_S)
                if [engine.state for engine in info.engines].count("ready") == num_engines:
                    return
                # Another process has no event to wait for.
                await asyncio.sleep(0.05)
