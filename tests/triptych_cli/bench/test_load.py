"""What a load sends, when it waits, and what it notes, against a frontend that answers at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import statistics
from collections.abc import AsyncIterator
from itertools import pairwise

import grpc.aio
import pytest

from tests.triptych_cli.bench.fakes import CountingFrontend, serving
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_cli.bench.config import BenchServeConfig
from triptych_cli.bench.dataset import DatasetError, Turn, check_lengths, draw_conversations, draw_warmup
from triptych_cli.bench.load import LoadGenerator
from triptych_cli.bench.metrics import summarize
from triptych_cli.bench.serve import arrival_offsets
from triptych_cli.bench.transport import GRPCTransport, RequestBuilder
from triptych_kit.clock import FakeClock
from triptych_kit.config import ConfigError, load_config

WAIT_S = 30.0


@contextlib.asynccontextmanager
async def loading(frontend: CountingFrontend, **options) -> AsyncIterator[LoadGenerator]:
    builder = RequestBuilder("fake", sampling_pb2.SamplingParams(ignore_eos=True, temperature=0.5), seed=100)
    async with serving(frontend) as address, grpc.aio.insecure_channel(address) as channel:
        yield LoadGenerator(GRPCTransport([channel], builder), FakeClock(), **options)


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


# When requests are due.

NUM = 20_000


def gaps_of(burstiness: float, rate: float = 50.0) -> list[float]:
    return [later - earlier for earlier, later in pairwise(arrival_offsets(NUM, rate, burstiness, seed=3))]


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_offsets(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_the_first_is_due_at_once_and_none_before_another() -> None:
    offsets = arrival_offsets(100, 10.0, 0.3, seed=1)
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    gaps = gaps_of(burstiness)
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # The coefficient of variation of a gamma distribution is one over the root of its shape.
    spread = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_poisson_process_has_exponential_gaps() -> None:
    gaps = gaps_of(1.0)
    for share in (0.1, 0.5, 0.9):
        bound = -math.log(1 - share) / 50
        assert sum(gap <= bound for gap in gaps) / len(gaps) == pytest.approx(share, abs=0.02)


def test_the_seed_decides() -> None:
    assert arrival_offsets(5, 1.0, 1.0, seed=1) == arrival_offsets(5, 1.0, 1.0, seed=1)
    assert arrival_offsets(5, 1.0, 1.0, seed=1) != arrival_offsets(5, 1.0, 1.0, seed=2)


# What a load asks, by data set and seed.

VOCAB_SIZE = 97


def draw(**options):
    return draw_conversations(BenchServeConfig(**options), VOCAB_SIZE, left_out=[0, 96])


def test_the_seed_decides_ids_and_lengths() -> None:
    same = {"num_requests": 5, "range_ratio": 0.5}
    assert draw(seed=1, **same) == draw(seed=1, **same)
    assert draw(seed=1, **same) != draw(seed=2, **same)


@pytest.mark.parametrize("dataset", ["random", "shared-prefix", "multi-turn"])
def test_ids_are_of_the_vocabulary_and_not_left_out(dataset: str) -> None:
    ids = {each for turns in draw(dataset=dataset) for turn in turns for each in turn.token_ids}
    assert ids == set(range(1, 96))


def test_lengths_vary_by_the_ratio_and_reach_its_bounds() -> None:
    turns = [turns[0] for turns in draw(num_requests=2000, input_len=20, output_len=10, range_ratio=0.2)]
    assert {len(turn.token_ids) for turn in turns} == set(range(16, 25))
    assert {turn.num_output_tokens for turn in turns} == set(range(8, 13))


def test_without_a_ratio_lengths_are_exact() -> None:
    assert {len(turns[0].token_ids) for turns in draw(input_len=33)} == {33}


def test_prefixes_are_shared_in_turns_and_suffixes_are_not() -> None:
    prompts = [
        tuple(turns[0].token_ids)
        for turns in draw(
            dataset="shared-prefix", num_requests=9, num_prefixes=3, prefix_len=40, suffix_len=8
        )
    ]
    prefixes = [prompt[:40] for prompt in prompts]
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len(set(prefixes)) == 3
    assert len({prompt[40:] for prompt in prompts}) == 9
    assert {len(prompt) for prompt in prompts} == {48}


def test_conversations_have_so_many_turns_and_the_last_what_is_left() -> None:
    conversations = draw(dataset="multi-turn", num_requests=11, turns=4, turn_len=5)
    assert [len(turns) for turns in conversations] == [4, 4, 3]
    assert {len(turn.token_ids) for turns in conversations for turn in turns} == {5}


def test_warm_up_prompts_are_like_the_first_and_not_among_them() -> None:
    config = BenchServeConfig(input_len=30, warmup=2, num_requests=50)
    warmup = draw_warmup(config, VOCAB_SIZE)
    prompts = [list(turns[0].token_ids) for turns in draw_conversations(config, VOCAB_SIZE)]
    assert [len(turn.token_ids) for turn in warmup] == [30, 30]
    assert all(list(turn.token_ids) not in prompts for turn in warmup)


def test_what_the_model_cannot_hold_is_refused_with_both_numbers() -> None:
    conversations = draw(dataset="multi-turn", num_requests=4, turns=4, turn_len=50, output_len=50)
    check_lengths(conversations, 400)
    with pytest.raises(DatasetError, match="would have 400 tokens, the model takes 399"):
        check_lengths(conversations, 399)


def test_a_vocabulary_without_ids_is_refused() -> None:
    with pytest.raises(DatasetError, match="leaves none"):
        draw_conversations(BenchServeConfig(), 1, left_out=[0])


# What the options of a load accept.


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num-requests=0", "--num-requests is 0"),
        ("--connections=0", "connections is 0"),
        ("--rate=0", "rate is 0"),
        ("--rate=nan", "'nan' is not a number"),
        ("--burstiness=0", "burstiness is 0"),
        ("--range-ratio=1", "--range-ratio is 1"),
        ("--timeout-s=inf", "--timeout-s is inf"),
        ("--warmup=-1", "warmup"),
        ("--plot=a.pdf", ".png"),
        ("--slo=latency=3", "ttft_ms"),
        ("--dataset=sharegpt", "multi-turn"),
        ("--requests=3", "--num-requests"),
    ],
)
def test_what_cannot_work_is_refused_by_name(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(BenchServeConfig, [flag], service="bench", env={})


def test_infinity_is_a_rate_and_bounds_add_up() -> None:
    arguments = ["--rate", "inf", "--slo", "ttft_ms=200", "--slo", "e2e_ms=900,tpot_ms=50"]
    config = load_config(BenchServeConfig, arguments, service="bench", env={}).config
    assert math.isinf(config.rate)
    level = config.service_level()
    assert level is not None
    assert (level.ttft_ms, level.tpot_ms, level.e2e_ms) == (200, 50, 900)


def test_every_option_has_a_help_text() -> None:
    fields = dataclasses.fields(BenchServeConfig)
    assert [field.name for field in fields if len(field.metadata.get("help", "").split()) < 2] == []
