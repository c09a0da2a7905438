"""What a load sends, when it waits, and what it notes, against a frontend that answers at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from launcher.bench.dataset import Turn
from launcher.bench.load import LoadGenerator, RequestBuilder
from launcher.bench.metrics import summarize
from service_kit.clock import FakeClock
from tests.launcher.bench.fakes import CountingFrontend, serving
from triptych.common.v1 import output_pb2, sampling_pb2

WAIT_S = 30.0


@contextlib.asynccontextmanager
async def loading(frontend: CountingFrontend, **options) -> AsyncIterator[LoadGenerator]:
    builder = RequestBuilder("fake", sampling_pb2.SamplingParams(ignore_eos=True, temperature=0.5), seed=100)
    async with serving(frontend) as address, grpc.aio.insecure_channel(address) as channel:
        yield LoadGenerator([channel], builder, FakeClock(), **options)


async def run(load: LoadGenerator, conversations: list[list[Turn]]) -> None:
    async with asyncio.timeout(WAIT_S):
        await load.run(conversations, [0.0] * len(conversations))


def singles(num_requests: int, num_tokens: int = 5) -> list[list[Turn]]:
    return [[Turn([1, 2, 3], num_tokens)] for _ in range(num_requests)]


async def test_messages_are_stamped_and_their_tokens_counted() -> None:
    async with loading(CountingFrontend()) as load:
        await run(load, singles(3))
    for timeline in load.timelines:
        assert timeline.token_counts == [2, 2, 1]
        assert len(timeline.token_times) == 3
        assert (timeline.code, timeline.num_prompt_tokens, timeline.num_cached_tokens) == ("OK", 3, 1)


async def test_requests_carry_prompt_sampling_and_a_seed_of_their_own() -> None:
    frontend = CountingFrontend()
    async with loading(frontend) as load:
        await run(load, singles(3))
    assert sorted(request.sampling.seed for request in frontend.requests) == [100, 101, 102]
    for request in frontend.requests:
        assert (request.model, list(request.token_ids.ids)) == ("fake", [1, 2, 3])
        assert (request.sampling.temperature, request.sampling.ignore_eos) == (0.5, True)
        assert request.sampling.max_tokens == 5


async def test_a_turn_goes_on_from_all_that_was_said() -> None:
    frontend = CountingFrontend()
    async with loading(frontend) as load:
        await run(load, [[Turn([9, 8], 3), Turn([7], 2), Turn([6], 1)]])
    prompts = [list(request.token_ids.ids) for request in frontend.requests]
    assert prompts == [[9, 8], [9, 8, 0, 0, 0, 7], [9, 8, 0, 0, 0, 7, 1, 1, 6]]
    assert [timeline.num_prompt_tokens for timeline in load.timelines] == [2, 6, 9]


async def test_a_conversation_ends_with_a_failed_turn_and_says_how_many_were_left() -> None:
    frontend = CountingFrontend(refused=frozenset({1}))
    async with loading(frontend) as load:
        await run(load, [[Turn([1], 1)] * 4])
    assert [timeline.code for timeline in load.timelines] == ["OK", "RESOURCE_EXHAUSTED"]
    assert load.num_unsent == 2


async def test_without_a_limit_all_are_in_flight_together() -> None:
    frontend = CountingFrontend(waits_for_peers=20)
    async with loading(frontend) as load:
        await run(load, singles(20))
    assert frontend.max_in_flight == 20


async def test_no_more_are_in_flight_than_the_limit_and_all_are_sent() -> None:
    frontend = CountingFrontend(waits_for_peers=4)
    async with loading(frontend, concurrency=4) as load:
        await run(load, singles(19))
    assert (frontend.max_in_flight, len(frontend.requests)) == (4, 19)


async def test_a_failure_is_noted_with_code_and_message_and_the_others_go_on() -> None:
    async with loading(CountingFrontend(refused=frozenset({1, 3}))) as load:
        await run(load, singles(5))
    summary = summarize(load.timelines)
    assert summary.failures == {"RESOURCE_EXHAUSTED": 2}
    assert summary.num_completed == 3
    assert {each.message for each in load.timelines if each.code != "OK"} == {
        "request 1 is one too many",
        "request 3 is one too many",
    }


@pytest.mark.parametrize(
    ("frontend", "code"),
    [
        (CountingFrontend(reason=output_pb2.FINISH_REASON_ABORT), "FINISH_REASON_ABORT"),
        (CountingFrontend(reason=output_pb2.FINISH_REASON_ERROR), "FINISH_REASON_ERROR"),
        (CountingFrontend(ends_early=True), "INCOMPLETE"),
    ],
    ids=["aborted", "error", "no end"],
)
async def test_an_output_that_was_given_up_is_a_failure(frontend: CountingFrontend, code: str) -> None:
    async with loading(frontend) as load:
        await run(load, singles(1))
    assert [timeline.code for timeline in load.timelines] == [code]


async def test_after_a_cancel_there_is_what_came_until_then() -> None:
    frontend = CountingFrontend(hangs=True, waits_for_peers=3)
    async with loading(frontend) as load:
        task = asyncio.ensure_future(load.run(singles(3), [0.0] * 3))
        async with asyncio.timeout(WAIT_S):
            # What the load has noted has no event; each turn of the loop may bring it.
            while sum(timeline.num_tokens for timeline in load.timelines) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    summary = summarize(load.timelines)
    assert (summary.num_interrupted, summary.num_completed, summary.num_failed) == (3, 0, 0)


async def test_a_request_on_its_own_is_not_among_those_of_the_run() -> None:
    async with loading(CountingFrontend()) as load:
        timeline = await load.send_one(Turn([1], 4), 0)
    assert (timeline.code, timeline.num_tokens, load.timelines) == ("OK", 4, [])


async def test_a_limited_request_is_due_when_a_slot_gets_free() -> None:
    frontend = CountingFrontend()
    async with loading(frontend, concurrency=1) as load:
        await run(load, singles(3))
    # The clock stands still, so nothing can have been late.
    assert [timeline.lateness_ms for timeline in load.timelines] == [0.0, 0.0, 0.0]
