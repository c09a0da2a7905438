"""Requests that lose their engine: they go on in another one, and their clients get what they would have."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import pytest

from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.failover import (
    MAX_HELD,
    MAX_PLANNED_MOVES,
    EngineRequirements,
    Failover,
    Migration,
    RetryBudget,
)
from frontend_svc.generation.poison import Content
from frontend_svc.generation.suspects import PoisonQuarantine, Suspect, Turn, in_order
from frontend_svc.output.loss import Loss, LossKind
from frontend_svc.text.tokenize.id_column import id_column
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    TOKENIZER,
    WAIT_S,
    Client,
    FakeEngine,
    FakeRequest,
    Script,
    answer,
    details_of,
    read_all,
    serving,
    serving_one,
)
from tests.frontend_svc.token_source import TokenSource, whole_output
from triptych.api.v1 import embedding_pb2, generate_pb2, model_pb2, request_pb2
from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych.engine.v1 import engine_pb2, session_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import ServiceError, Unavailable
from triptych_kit.telemetry.traces import recent_spans, setup_telemetry, shutdown_telemetry

CASES = {
    "greedy": {"temperature": 0.0, "seed": 5},
    "seeded": {"temperature": 1.0, "seed": 12345},
    "several": {"n": 4, "seed": 99},
    "stop": {"stop": ["on the mat"], "seed": 6},
    "withheld": {"stop": [" the mat 日x", "zz"], "seed": 6},
    "logprobs": {"logprobs": 2, "seed": 31, "n": 2},
    "prompt": {"prompt_logprobs": 1, "seed": 8},
    "least": {"min_tokens": 12, "stop": [" the"], "seed": 17},
    "most": {"max_tokens": 5, "seed": 3},
    "final": {"output_kind": sampling_pb2.OUTPUT_KIND_FINAL_ONLY, "seed": 4, "n": 2, "logprobs": 0},
}


@dataclass
class ReadOutput:
    """All that a client received of one output."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple] = field(default_factory=list)
    finished: bytes = b""


async def read_outputs(call) -> tuple[bytes, dict[int, ReadOutput]]:
    """What the stream of a request says of its prompt and its outputs, with their pieces put together."""
    prompt = b""
    outputs: dict[int, ReadOutput] = {}
    async for response in call:
        kind = response.WhichOneof("event")
        if kind == "started":
            received = response.started.prompt_logprobs
            prompt = repr(
                (
                    response.started.num_prompt_tokens,
                    list(received.token_ids),
                    [None if math.isnan(one) else one for one in received.logprobs],
                    list(received.texts),
                )
            ).encode()
            continue
        event = response.delta if kind == "delta" else response.finished
        output = outputs.setdefault(event.output_index, ReadOutput())
        assert not output.finished
        if kind == "finished":
            event.usage.num_cached_tokens = 0
            event.ClearField("stats")
            output.finished = event.SerializeToString(deterministic=True)
            continue
        output.ids += event.token_ids
        output.text += event.text
        received = event.logprobs
        tops = received.top or [output_pb2.TopLogprobs()] * len(received.token_ids)
        top = [(list(one.token_ids), list(one.logprobs), list(one.texts)) for one in tops]
        output.logprobs += zip(
            received.token_ids, received.logprobs, received.ranks, received.texts, top, strict=True
        )
    return prompt, outputs


@pytest.mark.parametrize("has_died", [True, False])
async def test_requests_that_are_cut_anywhere_produce_what_they_would_have(has_died):
    cuts = {f"{name}:{cut}": cut for name in CASES for cut in range(-1, 15)}
    source = TokenSource(
        lambda request: None if request.entry.attempt else cuts.get(request.entry.external_request_id)
    )
    first, second = FakeEngine(source), FakeEngine(source, dp_rank=1, is_ready=False)
    async with serving(first, second, reconnect_window_s=WAIT_S) as (client, frontend):
        undisturbed = {name: await read_outputs(client.generate(**asked)) for name, asked in CASES.items()}
        calls = {
            request_id: client.generate(request_id=request_id, **CASES[request_id.split(":")[0]])
            for request_id in cuts
        }
        await first.wait_for_requests(17 * sum(asked.get("n", 1) for asked in CASES.values()))
        second.become_ready()
        await client.until_engines_are_ready(2)
        (first.die if has_died else first.leave)()
        wrong = [
            request_id
            for request_id, call in calls.items()
            if await read_outputs(call) != undisturbed[request_id.split(":")[0]]
        ]
        assert frontend.status()["num_moved_requests"] > len(CASES)
        assert frontend.status()["num_quarantined_requests"] == 0
    assert wrong == []
    assert source.faults == []


async def until_sampled(client: Client, request_id: str, num_tokens: int) -> None:
    """Wait until the frontend has so many tokens of a request."""
    async with asyncio.timeout(WAIT_S):
        while True:
            received = await client.request.GetRequest(request_pb2.GetRequestRequest(request_id=request_id))
            if received.usage.num_completion_tokens == num_tokens:
                return


async def test_what_is_sent_again_is_the_request_as_it_was_and_the_output_so_far():
    source = TokenSource(lambda request: None if request.entry.attempt else 3)
    first, second = FakeEngine(source), FakeEngine(source, dp_rank=1, is_ready=False)
    asked = {
        "seed": 5, "max_tokens": 30, "min_tokens": 11, "frequency_penalty": 0.5, "bad_words": ["dog"],
        "cache_salt": "salt", "priority": 3, "max_draft_tokens": 2,
    }  # fmt: skip
    async with serving(first, second, reconnect_window_s=WAIT_S) as (client, _):
        stream = aiter(client.generate("the cat", request_id="mine", timeout=WAIT_S, **asked))
        await until_sampled(client, "mine", 3)
        second.become_ready()
        await client.until_engines_are_ready(2)
        first.die()
        (moved,) = await second.wait_for_requests(1)
        started_at = await client.request.GetRequest(request_pb2.GetRequestRequest(request_id="mine"))
        (finished,) = [one.finished async for one in stream if one.HasField("finished")]
    (origin,) = first.requests
    before, after = origin.entry, moved.entry
    assert moved.output == whole_output(before)[0][:3]
    assert (before.attempt, after.attempt, started_at.num_attempts) == (0, 1, 2)
    assert after.age_ms >= before.age_ms
    assert 0 < after.remaining_ms <= before.remaining_ms
    assert (finished.usage.num_cached_tokens, finished.stats.num_migrations) == (16, 1)
    for entry in (before, after):
        for name in ("handle", "attempt", "output_token_ids", "age_ms", "remaining_ms", "trace_context"):
            entry.ClearField(name)
    assert before == after


async def test_outputs_of_a_group_that_have_ended_are_not_sent_again():
    source = TokenSource(
        lambda request: (None, 2, None, 0)[request.entry.group_index] if not request.entry.attempt else None
    )
    first, second = FakeEngine(source), FakeEngine(source, dp_rank=1, is_ready=False)
    async with serving(first, second, reconnect_window_s=WAIT_S) as (client, _):
        call = client.generate(n=4, seed=1, request_id="mine")
        requests = await first.wait_for_requests(4)
        await until_sampled(
            client, "mine", 2 + sum(len(whole_output(requests[index].entry)[0]) for index in (0, 2))
        )
        second.become_ready()
        await client.until_engines_are_ready(2)
        await first.kill()
        outputs = (await read_outputs(call))[1]
    assert [request.entry.group_index for request in second.requests] == [1, 3]
    whole = {one.entry.group_index: whole_output(one.entry)[0] for one in first.requests}
    assert {index: output.ids for index, output in outputs.items()} == whole


async def test_a_restart_of_the_only_engine_costs_no_request():
    source = TokenSource(lambda request: None if request.entry.attempt else 2)
    engine = FakeEngine(source)
    async with serving(engine, reconnect_window_s=WAIT_S) as (client, frontend):
        running = [client.generate(seed=seed) for seed in range(3)]
        await engine.wait_for_requests(3)
        await engine.kill()
        await client.wait_ready(is_ready=False)
        engine.script = TokenSource()
        new = [client.generate(seed=seed) for seed in range(3)]
        async with asyncio.timeout(WAIT_S):
            while frontend.engines.failover.num_held < 6:
                await client.wait_ready(is_ready=False)
        await engine.start(engine.address)
        outputs = [(await read_outputs(call))[1] for call in (*running, *new)]
    assert outputs[:3] == outputs[3:]
    assert frontend.engines.failover.num_held == 0
    assert source.faults == []


async def test_without_any_engine_for_the_reconnect_window_requests_end_with_the_loss():
    engine = FakeEngine(TokenSource(lambda request: 2))
    async with serving(engine, reconnect_window_s=0.3) as (client, _):
        call = client.generate()
        await engine.wait_for_requests(1)
        await engine.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        with pytest.raises(grpc.aio.AioRpcError) as new:
            await read_all(client.generate())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "ENGINE_LOST" in details_of(caught.value)
    assert "RetryInfo" in details_of(caught.value)
    assert "NO_ENGINE_READY" in details_of(new.value)


async def test_new_requests_that_wait_for_an_engine_have_a_limit_and_all_others_are_served():
    async with serving_one(reconnect_window_s=WAIT_S) as (engine, client, frontend):
        await engine.kill()
        await client.wait_ready(is_ready=False)
        calls = [client.generate([5, 6]) for _ in range(MAX_HELD)]
        async with asyncio.timeout(WAIT_S):
            while frontend.engines.failover.num_held < MAX_HELD:
                await client.wait_ready(is_ready=False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate([5, 6]))
        engine.script = answer("back")
        await engine.start(engine.address)
        assert {(await read_all(call))[1] for call in calls} == {"back"}
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "RetryInfo" in details_of(caught.value)


async def test_a_frontend_that_never_saw_an_engine_answers_at_once():
    async with serving(FakeEngine(is_ready=False), waits_ready=False) as (client, frontend):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
        assert frontend.engines.failover.num_held == 0
    assert "NO_ENGINE_READY" in details_of(caught.value)


async def test_abort_cancel_and_deadline_end_a_request_that_waits():
    engine = FakeEngine(TokenSource(lambda request: 2))
    async with serving(engine, reconnect_window_s=WAIT_S) as (client, frontend):
        aborted = client.generate(request_id="mine", n=2)
        late = client.generate(timeout=3.0)
        gone = client.generate()
        await engine.wait_for_requests(4)
        # A kill loses what is not written yet, and it is not computed again.
        received, num_received = aiter(aborted), 0
        while num_received < 4:
            num_received += len((await anext(received)).delta.token_ids)
        await engine.kill()
        async with asyncio.timeout(WAIT_S):
            while frontend.engines.failover.num_held < 3:
                await client.wait_ready(is_ready=False)
        gone.cancel()
        await client.request.Abort(request_pb2.AbortRequest(request_id="mine"))
        outputs = (await read_outputs(received))[1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(late)
        async with asyncio.timeout(WAIT_S):
            await frontend.drain()
        assert frontend.engines.failover.num_held == 0
        assert frontend.status()["num_suspect_requests"] == 0
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    ends = [generate_pb2.Finished.FromString(one.finished) for one in outputs.values()]
    assert [end.reason for end in ends] == [output_pb2.FINISH_REASON_ABORT] * 2
    assert [end.usage.num_completion_tokens for end in ends] == [2, 2]


async def test_three_moves_are_the_most():
    source = TokenSource(lambda request: 1)

    def emit_one_and_die(engine: FakeEngine, request: FakeRequest) -> None:
        source(engine, request)
        engine.die()

    engines = [FakeEngine(emit_one_and_die, dp_rank=rank) for rank in range(2)]
    async with serving(*engines, reconnect_window_s=WAIT_S) as (client, frontend):
        await client.until_engines_are_ready(2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate(seed=1))
        assert frontend.status()["num_moved_requests"] == 3
    assert "ENGINE_LOST" in details_of(caught.value)
    assert sorted(request.entry.attempt for engine in engines for request in engine.requests) == [0, 1, 2, 3]
    assert source.faults == []


async def test_poison_that_is_sent_again_is_refused_with_its_incident_and_kills_nothing():
    prompt = "the dog"
    poison, num_deaths = TOKENIZER.encode(prompt).ids, 0
    source = TokenSource()

    def die_of_poison(engine: FakeEngine, request: FakeRequest) -> None:
        nonlocal num_deaths
        if request.prompt == poison:
            num_deaths += 1
            engine.die()
        else:
            source(engine, request)

    async def refused(client: Client, **changes: object) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate(prompt, max_tokens=8, **changes))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "QUARANTINED" in details_of(caught.value)
        [incident] = re.findall(r'key: "incident_id"\s+value: "(\w+)"', details_of(caught.value))
        return incident, caught.value.details() or ""

    async with serving(*[FakeEngine(die_of_poison, dp_rank=rank) for rank in range(3)]) as (client, frontend):
        await client.until_engines_are_ready(3)
        incident, message = await refused(client)
        assert f"incident {incident}" in message
        for changes in ({"request_id": "another"}, {"temperature": 0.5, "seed": 3}, {"n": 2}):
            assert (await refused(client, **changes))[0] == incident
        await read_all(client.generate("the cat", max_tokens=8))
        assert frontend.status()["num_quarantined_requests"] == 1
    assert num_deaths == 2


async def test_poison_that_is_cancelled_and_sent_again_kills_two_engines():
    poison, num_deaths = TOKENIZER.encode("dog").ids, 0
    source = TokenSource()

    def die_of_poison(engine: FakeEngine, request: FakeRequest) -> None:
        nonlocal num_deaths
        if request.prompt == poison:
            num_deaths += 1
            engine.is_ready = False
            engine.die()
        else:
            source(engine, request)

    engines = [FakeEngine(die_of_poison, dp_rank=rank) for rank in range(4)]
    async with serving(*engines, reconnect_window_s=WAIT_S) as (client, frontend):
        await client.until_engines_are_ready(4)
        # So that a cancelled request has no time to be sent to another engine.
        frontend.engines.failover.jitter_s = lambda suspect: WAIT_S
        call = client.generate("dog")
        async with asyncio.timeout(WAIT_S):
            while frontend.status()["num_engines"] and num_deaths == 0:
                await client.model.ListModels(model_pb2.ListModelsRequest())
        await client.until_engines_are_ready(3)
        call.cancel()
        async with asyncio.timeout(WAIT_S):
            while frontend.status()["num_open_requests"]:
                await client.model.ListModels(model_pb2.ListModelsRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate("dog", temperature=0.3))
        await read_all(client.generate("the cat"))
    assert "QUARANTINED" in details_of(caught.value)
    assert num_deaths == 2


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_poison_whose_client_leaves_before_its_engine_dies_kills_two_engines(is_aborted):
    poison, num_deaths = TOKENIZER.encode("dog").ids, 0
    source = TokenSource()

    def die_of_poison(engine: FakeEngine, request: FakeRequest) -> None:
        nonlocal num_deaths
        if request.prompt != poison:
            source(engine, request)
        elif num_deaths:
            num_deaths += 1
            engine.is_ready = False
            engine.die()

    engines = [FakeEngine(die_of_poison, dp_rank=rank) for rank in range(4)]
    async with serving(*engines, reconnect_window_s=WAIT_S) as (client, frontend):
        await client.until_engines_are_ready(4)
        call = client.generate("dog", request_id="mine")
        async with asyncio.timeout(WAIT_S):
            while not any(engine.requests for engine in engines):
                await client.model.ListModels(model_pb2.ListModelsRequest())
            if is_aborted:
                await client.request.Abort(request_pb2.AbortRequest(request_id="mine"))
                await read_all(call)
            call.cancel()
            while frontend.status()["num_open_requests"]:
                await client.model.ListModels(model_pb2.ListModelsRequest())
        num_deaths = 1
        [dead] = [engine for engine in engines if engine.requests]
        dead.is_ready = False
        dead.die()
        await client.until_engines_are_ready(3)
        for temperature in (0.0, 0.3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(client.generate("dog", temperature=temperature))
            assert "QUARANTINED" in details_of(caught.value)
        await read_all(client.generate("the cat"))
    assert num_deaths == 2


async def test_a_poison_request_kills_two_engines_and_affects_no_other_request():
    poison = TOKENIZER.encode("dog").ids
    # Before an engine dies half of the innocent have begun and the others have not.
    source = TokenSource(lambda request: None if deaths else 2 * (request.entry.request_seed % 2))
    deaths: list[FakeEngine] = []

    def die_of_poison(engine: FakeEngine, request: FakeRequest) -> None:
        if request.prompt == poison:
            deaths.append(engine)
            engine.die()
        else:
            source(engine, request)

    engines = [FakeEngine(die_of_poison, dp_rank=rank) for rank in range(3)]
    async with serving(*engines, reconnect_window_s=WAIT_S) as (client, frontend):
        await client.until_engines_are_ready(3)
        innocent = [client.generate("the cat", seed=seed) for seed in range(16)]
        async with asyncio.timeout(WAIT_S):
            while sum(len(engine.requests) for engine in engines) < 16:
                await client.model.ListModels(model_pb2.ListModelsRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate("dog"))
        for survivor in [engine for engine in engines if engine not in deaths]:
            for request in [one for one in survivor.requests if not one.entry.attempt]:
                request.entry.output_token_ids = id_column(
                    whole_output(request.entry)[0][: 2 * (request.entry.request_seed % 2)]
                )
                source(survivor, request)
        outputs = [(await read_outputs(call))[1][0].ids for call in innocent]
        assert frontend.status()["num_quarantined_requests"] == 1
        assert frontend.status()["num_suspect_requests"] == 0
    seen = {
        request.entry.request_seed: whole_output(request.entry)[0]
        for one in engines
        for request in one.requests
    }
    assert outputs == [seen[seed] for seed in range(16)]
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "QUARANTINED" in details_of(caught.value)
    assert len(deaths) == 2
    assert source.faults == []


async def test_what_has_begun_goes_on_where_the_model_is_the_very_same_alone():
    source = TokenSource(lambda request: None if request.entry.attempt else request.entry.request_seed)
    first = FakeEngine(source, fingerprint="f")
    others = [FakeEngine(source, fingerprint="other", dp_rank=rank, is_ready=False) for rank in (1, 2)]
    same = FakeEngine(source, fingerprint="f", dp_rank=3, is_ready=False)
    async with serving(first, *others, same, reconnect_window_s=WAIT_S) as (client, frontend):
        begun, fresh = client.generate(seed=2), client.generate(seed=0)
        await first.wait_for_requests(2)
        for other in others:
            other.become_ready()
        await client.until_engines_are_ready(3)
        await first.kill()
        await read_all(fresh)
        assert frontend.engines.failover.num_held == 1
        same.become_ready()
        await read_all(begun)
    assert [request.entry.request_seed for other in others for request in other.requests] == [0]
    assert [request.entry.request_seed for request in same.requests] == [2]
    assert source.faults == []


async def test_requests_end_once_the_budget_for_sending_again_is_empty():
    source = TokenSource(lambda request: None if request.entry.attempt else 1)
    engines = [FakeEngine(source, dp_rank=rank) for rank in range(2)]
    async with serving(*engines, reconnect_window_s=WAIT_S) as (client, frontend):
        await client.until_engines_are_ready(2)
        while frontend.engines.failover.budget.take():
            pass
        call = client.generate(data_parallel_rank=0)
        await engines[0].wait_for_requests(1)
        engines[0].die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "RETRY_BUDGET_EMPTY" in details_of(caught.value)
    assert "RetryInfo" in details_of(caught.value)


async def test_pooling_goes_on_elsewhere_too():
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1], inline=b"\0\0\x80?")
    tasks = ("embed",)
    first = FakeEngine(supported_tasks=tasks)

    def pool(engine: FakeEngine, request: FakeRequest) -> None:
        engine.pool(request, tensor)

    others = [FakeEngine(pool, supported_tasks=tasks, dp_rank=rank, is_ready=False) for rank in (1, 2)]
    async with serving(first, *others, reconnect_window_s=WAIT_S) as (client, _):
        inputs = [embedding_pb2.PoolingInput(prompt="the cat") for _ in range(5)]
        call = client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=inputs), timeout=WAIT_S)
        answered = asyncio.ensure_future(call)
        await first.wait_for_requests(5)
        for other in others:
            other.become_ready()
        await client.until_engines_are_ready(3)
        await first.kill()
        response = await answered
    assert [one.inline for one in response.embeddings] == [tensor.inline] * 5
    assert [request.entry.attempt for other in others for request in other.requests] == [1] * 5


async def test_a_move_is_an_event_of_the_requests_span():
    setup_telemetry("frontend", instance="0", log_level="error")
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4737", "00f067aa0ba902b7"
    source = TokenSource(lambda request: None if request.entry.attempt else 2)
    first, second = FakeEngine(source), FakeEngine(source, dp_rank=1, is_ready=False)
    async with serving(first, second, reconnect_window_s=WAIT_S) as (client, _):
        call = client.generate(metadata=(("traceparent", f"00-{trace_id}-{parent}-01"),))
        await first.wait_for_requests(1)
        second.become_ready()
        await client.until_engines_are_ready(2)
        first.die()
        await read_all(call)
    spans = recent_spans(trace_id)
    shutdown_telemetry()
    root, *children = spans
    move = next(event for event in root.events if event.name == "resumed_elsewhere")
    assert (move.attributes["triptych.from"], move.attributes["triptych.to"]) == ("engine-0", "engine-1")
    assert move.attributes["triptych.cause"]
    stays = [(span.name, span.attributes.get("triptych.engine")) for span in children]
    assert stays == [
        ("tokenize", None),
        ("engine", "engine-0"),
        ("engine", "engine-1"),
        ("prefill", "engine-0"),
        ("decode", "engine-0"),
        ("prefill", "engine-1"),
        ("decode", "engine-1"),
        ("detokenize", None),
    ]
    attempts = [span for span in children if span.name == "engine"]
    assert [span.attributes["triptych.attempt"] for span in attempts] == [0, 1]
    assert [span.error for span in attempts] == [move.attributes["triptych.cause"], None]
    sent = [engine.requests[0].entry.trace_context.traceparent for engine in (first, second)]
    assert sent == [f"00-{trace_id}-{span.span_id}-01" for span in attempts]


# A request's way from engine to engine, over engines that are plain objects.

LOST = Unavailable("lost")


class Engine:
    """What `Migration` looks at of a client."""

    model = None
    step_limit_s = 5.0

    def __init__(self, address: str) -> None:
        self.address = self.engine_id = address
        self.received: list[str] = []
        self.is_long_at_a_step = False
        self.looks = 0
        self.on_look: Callable[[], None] = lambda: None

    @property
    def step_age_s(self) -> float:
        self.looks += 1
        self.on_look()
        return 9.0 if self.is_long_at_a_step else 0.0


class Engines:
    """A directory with one ready engine at a time, the first that is left."""

    reconnect_window_s = 10.0

    def __init__(self, num_engines: int) -> None:
        self.left = [Engine(f"engine:{index}") for index in range(num_engines)]
        self.num_gone = 0  # lately
        self.is_expected = False  # whether one is to come back

    def pick(
        self, *args: object, is_allowed: Callable[[Engine], bool] = lambda engine: True, **options: object
    ) -> Engine:
        if self.left and is_allowed(self.left[0]):
            return self.left[0]
        raise Unavailable("no engine is ready")

    def ready_for(self, *args: object, **options: object) -> list[Engine]:
        return self.left[:1]

    def expected_until(self, model: object) -> float | None:
        return self.reconnect_window_s if self.is_expected else None

    def num_recent(self, model: object) -> int:
        return len(self.ready_for()) + self.num_gone


class NoChance(random.Random):
    """Moves requests without a delay."""

    def random(self) -> float:
        return 0.0


class NamedRequest:
    """A request of which its name is received."""

    kept_by = None

    def __init__(
        self, name: str, prompt: str, errors: dict[str, ServiceError], changed: asyncio.Event
    ) -> None:
        self.has_begun = False
        self._name, self._prompt, self._errors, self._changed = name, prompt, errors, changed

    def send(self, engine: Engine, attempt: int, on_output: Callable[[], None] | None) -> None:
        engine.received.append(self._name)
        self.on_output = on_output
        self._changed.set()

    def fail(self, error: ServiceError) -> None:
        self._errors[self._name] = error
        self._changed.set()

    def content(self) -> Content:
        return Content("", "m", self._prompt.encode("utf-32-le"))

    def remaining_s(self) -> None:
        return None

    def on_move(self, move: object) -> None:
        pass


class MovesWorld:
    """Requests by name over these engines."""

    def __init__(
        self, *, num_engines: int, probation_s: float = 2.0, chance: random.Random | None = None
    ) -> None:
        self.engines = Engines(num_engines)
        chance = chance or random.Random(3)
        self.failover = Failover(self.engines, FakeClock(), chance, probation_s=probation_s)
        self.requests: dict[str, NamedRequest] = {}
        self.migrations: dict[str, Migration] = {}
        self.errors: dict[str, ServiceError] = {}
        self.changed = asyncio.Event()

    def add(self, name: str, prompt: str = "") -> Migration:
        self.requests[name] = NamedRequest(name, prompt or name, self.errors, self.changed)
        requirements = EngineRequirements(None, RoutingRequest())
        self.migrations[name] = Migration(self.failover, requirements, self.requests[name])
        return self.migrations[name]

    def start(self, name: str, prompt: str = "") -> None:
        self.add(name, prompt).start()

    def lose_first(self, cause: LossKind = LossKind.DEATH, *, had_output: bool = False) -> None:
        """The engine that is used is lost, where not said otherwise before any output of it."""
        lost = self.engines.left.pop(0)
        had = [
            (name, migration)
            for name, migration in self.migrations.items()
            if migration.client is not None and migration.client.address == lost.address
        ]
        for name, migration in had:
            self.requests[name].has_begun = had_output
            if had_output:
                migration.end_probation()
        self.failover.lose_engine(Loss(lost.address, cause, "lost"))
        for _, migration in had:
            migration.lose(cause, LOST)
        self.failover.engines_changed()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


async def test_no_suspect_follows_one_whose_step_may_hang_and_the_next_death_identifies_it():
    world = MovesWorld(num_engines=3, probation_s=0.05)
    for name in ("a", "b", "c"):
        world.start(name)
    world.lose_first()
    second = world.engines.left[0]
    second.is_long_at_a_step, second.on_look = True, world.changed.set
    await world.until(lambda: second.looks == 5)
    assert len(second.received) == 1
    world.lose_first()
    (poison,) = second.received
    await world.until(lambda: poison in world.errors)
    assert world.errors[poison].reason == "QUARANTINED"
    third = world.engines.left[0]
    await world.until(lambda: len(third.received) == 2)
    assert poison not in third.received
    world.failover.close()


async def test_others_follow_a_suspect_that_is_merely_slow():
    world = MovesWorld(num_engines=2, probation_s=0.05)
    for name in ("a", "b", "c"):
        world.start(name)
    world.lose_first()
    second = world.engines.left[0]
    await world.until(lambda: len(second.received) == 3)
    assert sorted(second.received) == ["a", "b", "c"]
    world.failover.close()


async def test_a_request_that_is_about_to_be_sent_on_ends_with_the_frontend():
    world = MovesWorld(num_engines=2, probation_s=0.05)
    world.start("a")
    world.lose_first()
    world.failover.close()
    await world.until(lambda: "a" in world.errors)
    assert world.errors["a"] is LOST
    assert world.engines.left[0].received == []


async def test_engines_that_are_drained_use_up_neither_moves_nor_the_budget():
    world = MovesWorld(num_engines=9, chance=NoChance())
    world.start("a")
    for _ in range(5):
        world.lose_first(LossKind.LEFT)
        await world.until(lambda: bool(world.engines.left[0].received))
    assert world.failover.budget.left == 1024
    for _ in range(3):
        world.lose_first(had_output=True)
        await world.until(lambda: bool(world.engines.left[0].received))
        world.migrations["a"].end_probation()
    assert world.failover.budget.left == 1021
    world.lose_first(had_output=True)
    assert world.errors == {"a": LOST}


async def test_planned_moves_have_a_limit_too():
    world = MovesWorld(num_engines=MAX_PLANNED_MOVES + 2, chance=NoChance())
    world.start("a")
    for _ in range(MAX_PLANNED_MOVES):
        world.lose_first(LossKind.LEFT)
        await world.until(lambda: bool(world.engines.left[0].received))
    assert world.errors == {}
    world.lose_first(LossKind.LEFT)
    assert world.errors == {"a": LOST}


async def test_an_engine_that_lives_and_gives_up_a_session_may_do_so_for_a_fault():
    """As one whose step cannot be encoded: where that goes on and on, it is to end."""
    world = MovesWorld(num_engines=5, chance=NoChance())
    world.start("a")
    for _ in range(3):
        world.lose_first(LossKind.DISMISSAL)
        await world.until(lambda: bool(world.engines.left[0].received))
    assert world.failover.budget.left == 1021
    world.lose_first(LossKind.DISMISSAL)
    assert world.errors == {"a": LOST}


async def test_a_request_that_was_held_is_checked_again_before_it_is_sent():
    world = MovesWorld(num_engines=1)
    world.engines.is_expected = True
    [engine], world.engines.left = world.engines.left, []
    for name in ("poison", "suspect", "other"):
        world.start(name)
    world.failover.poison.note_poison([world.requests["poison"].content()])
    world.failover.poison.note_suspect(world.requests["suspect"].content())
    world.engines.left = [engine]
    world.failover.engines_changed()
    await world.until(lambda: "poison" in world.errors and len(engine.received) == 1)
    assert world.errors["poison"].reason == "QUARANTINED"
    assert engine.received == ["other"]
    world.requests["other"].on_output()
    await world.until(lambda: engine.received == ["other", "suspect"])
    assert world.migrations["suspect"].suspect.turn is Turn.ALONE
    world.failover.close()


async def test_a_request_that_moves_without_output_is_checked_as_a_new_one():
    world = MovesWorld(num_engines=2, chance=NoChance())
    for name in ("suspect", "other"):
        world.start(name)
    world.failover.poison.note_suspect(world.requests["suspect"].content())
    world.lose_first(LossKind.LEFT)
    second = world.engines.left[0]
    await world.until(lambda: second.received == ["other"])
    world.requests["other"].on_output()
    await world.until(lambda: second.received == ["other", "suspect"])
    assert world.migrations["suspect"].suspect.turn is Turn.ALONE
    world.failover.close()


async def test_a_suspect_that_is_moved_no_more_is_one_when_it_is_sent_again():
    world = MovesWorld(num_engines=2)
    while world.failover.budget.take():
        pass
    world.start("a")
    world.lose_first()
    assert world.errors["a"].reason == "RETRY_BUDGET_EMPTY"
    world.start("a")
    assert world.migrations["a"].suspect.turn is Turn.ALONE
    world.start("b")
    assert world.migrations["b"].suspect.turn is Turn.AT_ONCE
    world.failover.close()


async def test_a_request_of_another_frontend_may_have_killed_its_engine_too():
    world = MovesWorld(num_engines=2)
    world.add("a").take_over(world.engines.left[0], 1)
    world.lose_first()
    assert world.migrations["a"].suspect.turn is Turn.ALONE
    world.failover.close()


async def test_the_last_of_several_engines_is_kept_from_suspects_while_another_may_come_back():
    world = MovesWorld(num_engines=2, chance=NoChance())
    world.start("a")
    world.start("b")
    world.engines.num_gone = 1
    world.lose_first()
    last = world.engines.left[0]
    world.start("c")
    world.start("a again", "a")
    world.requests["c"].on_output()
    for _ in range(5):
        world.failover.engines_changed()
        await asyncio.sleep(0)
    assert last.received == ["c"]
    world.engines.num_gone = 0
    await world.until(lambda: len(last.received) > 1)
    assert set(last.received[1:]) in ({"a", "a again"}, {"a again"}, {"b"})
    world.failover.close()


async def test_suspects_go_one_by_one_however_long_they_wait():
    world = MovesWorld(num_engines=2, probation_s=60, chance=NoChance())
    world.engines.reconnect_window_s = 0.02
    for name in ("a", "b"):
        world.start(name)
    world.lose_first()
    second = world.engines.left[0]
    await world.until(lambda: len(second.received) == 1)
    await asyncio.sleep(0.05)
    assert len(second.received) == 1
    world.requests[second.received[0]].on_output()
    await world.until(lambda: len(second.received) == 2)
    assert sorted(second.received) == ["a", "b"]
    assert world.errors == {}
    world.failover.close()


async def test_a_suspect_waits_for_its_turn_a_limited_number_of_times():
    world = MovesWorld(num_engines=2, probation_s=60, chance=NoChance())
    world.engines.reconnect_window_s = 0.005
    for name in ("a", "b"):
        world.start(name)
    world.lose_first()
    await world.until(lambda: bool(world.errors))
    assert list(world.errors.values()) == [LOST]
    world.failover.close()


async def test_a_new_request_waits_for_an_engine_that_is_expected_back_and_its_error_says_when_to_retry():
    world = MovesWorld(num_engines=1)
    world.failover.poison.note_suspect(world.add("a").suspect.content)
    world.start("a")
    world.start("b")
    assert world.engines.left[0].received == ["a"]
    world.engines.is_expected = True
    world.migrations["b"].give_up()
    assert world.errors == {}
    world.engines.is_expected = False
    world.migrations["b"].give_up()
    error = world.errors["b"]
    assert (error.reason, error.retry_after_ms) == ("ENGINES_BUSY", 1000)
    world.failover.close()


# Requests that have begun, and that the engine they are sent on to does not take.

REFUSALS = [
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
]
WHY = "logprobs is 50, it takes 0 to 20"


def refusing(code: grpc.StatusCode) -> Script:

    def script(engine, request):
        rejected = engine_pb2.AddRejected(handle=request.handle, attempt=request.entry.attempt)
        rejected.status.code, rejected.status.message = code.value[0], WHY
        request.session.send(add_rejected=rejected)

    return script


def ending_with(token_id: int) -> Script:
    """A script that ends each request with one more token."""
    return lambda engine, request: engine.step({request: [token_id]}, finished={request: AT_LENGTH})


async def lose_first(client: Client, engines: Sequence[FakeEngine]) -> None:
    """The first engine dies for good when the others are there."""
    for engine in engines[1:]:
        engine.become_ready()
    await client.until_engines_are_ready(len(engines))
    engines[0].is_ready = False
    engines[0].die()


async def make_second_choice(client: Client, frontend, engine: FakeEngine) -> None:
    """Have `engine` say that it is busy, so that others are preferred."""
    await engine.wait(lambda: bool(engine.sessions))
    engine.sessions[0].send(stats=session_pb2.Stats(num_running=8, num_waiting=2))
    async with asyncio.timeout(WAIT_S):
        while not any(
            one.requests.account.info().num_running for one in frontend.engines.directory.clients()
        ):
            await client.model.ListModels(model_pb2.ListModelsRequest())


@pytest.mark.parametrize("code", REFUSALS)
async def test_what_has_begun_goes_past_an_engine_that_refuses_it_for_whatever_reason(code):
    engines = [
        FakeEngine(),
        FakeEngine(refusing(code), dp_rank=1, is_ready=False),
        FakeEngine(ending_with(6), dp_rank=2, is_ready=False),
    ]
    async with serving(*engines) as (client, frontend):
        call = client.generate(request_id="mine")
        (request,) = await engines[0].wait_for_requests(1)
        engines[0].step({request: [5]})
        await until_sampled(client, "mine", 1)
        await make_second_choice(client, frontend, engines[2])
        await lose_first(client, engines)
        assert (await read_all(call))[2] == [5, 6]
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]
    assert engines[2].requests[0].output == [5]


async def test_an_output_that_has_not_begun_goes_on_with_its_group():
    engines = [
        FakeEngine(),
        FakeEngine(refusing(REFUSALS[0]), dp_rank=1, is_ready=False),
        FakeEngine(ending_with(6), dp_rank=2, is_ready=False),
    ]
    async with serving(*engines) as (client, frontend):
        call = client.generate(request_id="mine", n=2)
        _, second = await engines[0].wait_for_requests(2)
        engines[0].step({second: [5]})
        await until_sampled(client, "mine", 1)
        await make_second_choice(client, frontend, engines[2])
        await lose_first(client, engines)
        assert sorted((await read_all(call))[2]) == [5, 6, 6]
    assert [request.output for request in engines[2].requests] == [[], [5]]


@pytest.mark.parametrize("code", REFUSALS[:2])
async def test_a_begun_request_that_no_engine_takes_is_not_blamed_on_its_client(code):
    engines = [
        FakeEngine(),
        FakeEngine(refusing(code), dp_rank=1, is_ready=False),
        FakeEngine(refusing(code), dp_rank=2, is_ready=False),
    ]
    async with serving(*engines) as (client, _):
        call = client.generate(request_id="mine")
        (request,) = await engines[0].wait_for_requests(1)
        engines[0].step({request: [5]})
        await until_sampled(client, "mine", 1)
        await lose_first(client, engines)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert WHY in (caught.value.details() or "")
    assert "NOT_CONTINUED" in details_of(caught.value)
    assert "RetryInfo" in details_of(caught.value)
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]


# Which requests may go where after an engine died, and which may go nowhere any more.

ENGINES = ("b", "c", "d")


class QuarantineWorld:
    """Requests on engines a to d; b to d are left."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.quarantine = PoisonQuarantine(self.clock)
        self.num_requests = 0

    def request(self, account: str = "", turn: Turn = Turn.AT_ONCE) -> Suspect:
        self.num_requests += 1
        made = Suspect(Content(account, "m", self.num_requests.to_bytes(4, "little")))
        made.turn = turn
        return made

    def send(self, request: Suspect, address: str, ready: Sequence[str] = ENGINES) -> bool:
        """Send it if it may go there."""
        if not self.quarantine.may_go(request, address, lambda: ready):
            return False
        return self.quarantine.send(request, address, yields_at=self.clock.now() + 5)

    def send_all(self, waiting: list[Suspect], address: str) -> list[Suspect]:
        """Send as many as may go now, in order; returns them."""
        sent = [request for request in in_order(waiting) if self.send(request, address)]
        for request in sent:
            waiting.remove(request)
        self.quarantine.settle()
        return sent

    def after_death(self, *accounts: str) -> list[Suspect]:
        """The requests of an engine that died before any output for them."""
        lost = [self.request(account) for account in accounts]
        assert all(self.send(request, "a") for request in lost)
        self.quarantine.lose_engine("a", is_dead=True)
        assert not any(request.incident_id for request in lost)
        return lost


@pytest.fixture
def scene() -> QuarantineWorld:
    return QuarantineWorld()


def test_requests_without_output_go_one_at_a_time_for_each_engine(scene: QuarantineWorld):
    waiting = scene.after_death("", "", "")
    (first,) = scene.send_all(waiting, "b")
    assert len(scene.send_all(waiting, "c")) == 1
    assert scene.send_all(waiting, "b") == []
    scene.quarantine.clear(first)
    assert len(scene.send_all(waiting, "b")) == 1


def test_those_that_had_begun_go_before_them_in_groups_that_double(scene: QuarantineWorld):
    waiting = scene.after_death("", "") + [scene.request(turn=Turn.IN_GROUP) for _ in range(9)]
    sizes, turns = [], []
    while waiting:
        sent = scene.send_all(waiting, "b")
        assert scene.send_all(waiting, "b") == []
        sizes.append(len(sent))
        turns.append(sent[0].turn)
        for request in sent:
            scene.quarantine.clear(request)
    assert sizes == [1, 2, 4, 2, 1, 1]
    assert turns == [Turn.IN_GROUP] * 4 + [Turn.ALONE] * 2


def test_the_one_suspect_of_two_dead_engines_is_quarantined_and_no_other(scene: QuarantineWorld):
    first, second = scene.after_death("", "")
    assert scene.send(first, "b")
    scene.quarantine.lose_engine("b", is_dead=True)
    assert (bool(first.incident_id), first.num_deaths) == (True, 2)
    assert (second.incident_id, second.num_deaths, second.turn) == ("", 1, Turn.ALONE)
    assert [entry.incident_id for entry in scene.quarantine.record.entries()] == [first.incident_id]


def test_of_a_group_none_is_quarantined_and_each_goes_alone(scene: QuarantineWorld):
    group = [scene.request(turn=Turn.IN_GROUP) for _ in range(3)]
    (first,) = scene.send_all(group, "b")
    scene.quarantine.clear(first)
    assert [scene.send(request, "b") for request in group] == [True, True]
    scene.quarantine.lose_engine("b", is_dead=True)
    assert [(request.incident_id, request.turn) for request in group] == [("", Turn.ALONE)] * 2
    (alone,) = scene.send_all(group, "c")
    scene.quarantine.lose_engine("c", is_dead=True)
    assert alone.incident_id


def test_output_clears_a_request_whatever_it_was_present_at(scene: QuarantineWorld):
    (suspect,) = scene.after_death("")
    assert scene.quarantine.record.check(suspect.content)
    assert scene.send(suspect, "b")
    scene.quarantine.clear(suspect)
    assert (suspect.turn, suspect.num_deaths) == (Turn.AT_ONCE, 0)
    assert not scene.quarantine.record.check(suspect.content)
    scene.quarantine.lose_engine("b", is_dead=True)
    assert suspect.incident_id == ""


def test_only_deaths_count(scene: QuarantineWorld):
    innocent, (suspect,) = scene.request(), scene.after_death("")
    assert scene.send(innocent, "b") and scene.send(suspect, "c")
    for address in ENGINES:
        scene.quarantine.lose_engine(address, is_dead=False)
    assert (innocent.turn, innocent.num_deaths) == (Turn.AT_ONCE, 0)
    assert (suspect.turn, suspect.num_deaths, suspect.incident_id) == (Turn.ALONE, 1, "")
    assert scene.quarantine.num_on_probation == 0


def test_a_suspect_without_output_for_long_lets_others_pass_and_stays_a_suspect(scene: QuarantineWorld):
    slow, other = scene.after_death("", "")
    assert scene.send(slow, "b")
    scene.quarantine.pass_over(slow)
    assert scene.send(other, "b")
    scene.quarantine.lose_engine("b", is_dead=True)
    assert (slow.incident_id, other.incident_id) == ("", "")


def test_a_suspect_that_is_slow_and_alone_all_the_same_is_the_cause(scene: QuarantineWorld):
    (slow,) = scene.after_death("")
    assert scene.send(slow, "b")
    scene.quarantine.pass_over(slow)
    scene.quarantine.lose_engine("b", is_dead=True)
    assert slow.incident_id


def test_an_account_with_a_slow_suspect_has_no_second_engine(scene: QuarantineWorld):
    slow, next_one, other = scene.after_death("a", "a", "b")
    assert scene.send(slow, "b")
    scene.quarantine.pass_over(slow)
    assert not scene.send(next_one, "c")
    assert scene.send(other, "b")
    assert not scene.send(next_one, "b")
    scene.quarantine.clear(slow)
    assert scene.send(next_one, "c")


def test_a_suspect_waits_for_a_request_without_output_until_its_engine_would_be_known_to_hang(
    scene: QuarantineWorld,
):
    queued, (suspect,) = scene.request(), scene.after_death("")
    assert scene.send(queued, "b")
    assert not scene.send(suspect, "b")
    scene.clock.advance(5)
    assert scene.send(suspect, "b")
    scene.quarantine.lose_engine("b", is_dead=True)
    assert (suspect.incident_id, queued.turn) == ("", Turn.ALONE)


def test_one_that_ends_gives_its_slot_to_the_next(scene: QuarantineWorld):
    first, second = scene.after_death("", "")
    assert scene.send(first, "b")
    scene.quarantine.remove(first)
    assert scene.send(second, "b")


def test_new_requests_avoid_an_engine_on_which_a_likely_cause_runs(scene: QuarantineWorld):
    (alone,) = scene.after_death("")
    assert scene.send(alone, "b")
    assert not scene.send(scene.request(), "b")
    assert scene.send(scene.request(), "c")
    scene.quarantine.clear(alone)
    assert scene.send(scene.request(), "b")


def test_new_requests_avoid_an_engine_that_a_likely_cause_waits_for_however_often_it_tries(
    scene: QuarantineWorld,
):
    fresh, (suspect,) = scene.request(), scene.after_death("")
    assert scene.send(fresh, "b")
    for _ in range(3):
        assert not scene.send(suspect, "b", ["b"])
        scene.quarantine.reserve(suspect, ["b"])
        scene.quarantine.settle()
        assert not scene.send(scene.request(), "b")
    scene.quarantine.clear(fresh)
    assert scene.send(suspect, "b", ["b"])


def test_a_likely_cause_takes_an_idle_engine_although_another_is_reserved_for_it(scene: QuarantineWorld):
    (suspect,) = scene.after_death("")
    for address in ("b", "c"):
        assert scene.send(scene.request(), address)
    scene.quarantine.reserve(suspect, ["b", "c"])
    scene.quarantine.lose_engine("c", is_dead=False)
    assert scene.send(suspect, "c", ["b", "c"])
    assert scene.send(scene.request(), "b")


def test_an_engine_that_no_likely_cause_waits_for_any_more_is_free(scene: QuarantineWorld):
    (suspect,) = scene.after_death("")
    scene.quarantine.reserve(suspect, ["b"])
    scene.quarantine.settle()
    assert not scene.send(scene.request(), "b")
    scene.quarantine.settle()
    assert scene.send(scene.request(), "b")


def test_none_is_the_cause_where_another_without_output_was_on_the_engine(scene: QuarantineWorld):
    (suspect,) = scene.after_death("")
    adopted = scene.request()
    assert scene.send(suspect, "b")
    scene.quarantine.take_over(adopted, "b", yields_at=5)
    scene.quarantine.lose_engine("b", is_dead=True)
    assert (suspect.incident_id, adopted.incident_id) == ("", "")
    assert {suspect.turn, adopted.turn} == {Turn.ALONE}


def test_one_engine_of_several_is_left_to_others_of_each_model(scene: QuarantineWorld):
    first, second, third, other = scene.after_death("", "", "", "")
    assert scene.send(first, "b") and scene.send(second, "c")
    assert not scene.send(third, "d")
    assert scene.send(scene.request(), "d")
    assert scene.send(other, "e", ["e", "f"])


def test_suspects_of_an_account_have_one_engine_at_a_time_and_run_there_together(scene: QuarantineWorld):
    first, second, third = scene.after_death("a", "a", "b")
    assert scene.send(first, "b")
    assert not scene.send(second, "c")
    assert not scene.send(third, "b")
    assert scene.send(second, "b")
    scene.quarantine.lose_engine("b", is_dead=True)
    assert first.incident_id == second.incident_id != ""
    assert third.incident_id == ""


def test_an_account_lets_others_have_their_turn(scene: QuarantineWorld):
    first, second, other = scene.after_death("a", "a", "b")
    assert scene.send(first, "b", ["b"])
    scene.clock.advance(1)
    assert not scene.send(second, "b", ["b"])
    scene.quarantine.clear(first)
    assert scene.send(other, "b", ["b"])


def test_a_prompt_that_was_answered_before_is_no_likely_cause(scene: QuarantineWorld):
    known = scene.request("a")
    scene.quarantine.record.innocent.add(known.content)
    assert scene.send(known, "b")
    scene.quarantine.lose_engine("b", is_dead=True)
    assert known.turn is Turn.IN_GROUP
    assert not scene.quarantine.record.check(scene.request("a").content)


def test_a_request_that_has_left_its_engine_is_a_likely_cause_until_its_time_is_over(scene: QuarantineWorld):
    left, (suspect,) = scene.request("a"), scene.after_death("b")
    assert scene.send(left, "b")
    scene.quarantine.leave(left)
    scene.clock.advance(100)
    assert not scene.send(suspect, "b")
    scene.quarantine.lose_engine("b", is_dead=True)
    assert scene.quarantine.record.check(scene.request("a").content)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_keys", [True, False])
def test_no_owner_kills_more_than_one_engine_after_its_first_and_no_innocent_is_quarantined(seed, has_keys):
    """Requests of five owners, of which two send poison, over four engines that start again at once."""
    rng, scene = random.Random(seed), QuarantineWorld()
    quarantine, engines = scene.quarantine, ("b", "c", "d", "e")
    waiting: list[Suspect] = []
    running: dict[Suspect, str] = {}
    poison: set[Suspect] = set()
    late_deaths: Counter[str] = Counter()
    num_answered = 0
    for step in range(3000):
        scene.clock.advance(0.05)
        if len(waiting) + len(running) < 24 and step < 2500:
            number = rng.randrange(5)
            request = scene.request(f"owner {number}" if has_keys else "")
            if number < 2 and rng.random() < 0.5:
                if not has_keys:
                    request = Suspect(Content("", "m", bytes([number, 0, 0, 1])))
                poison.add(request)
            waiting.append(request)
        for request in in_order(waiting):
            try:
                if quarantine.record.check(request.content):
                    request.turn = Turn.ALONE
            except ServiceError:
                waiting.remove(request)
                continue
            allowed = [one for one in engines if quarantine.may_go(request, one, lambda: engines)]
            if allowed:
                running[request] = rng.choice(allowed)
                assert quarantine.send(request, running[request], yields_at=scene.clock.now() + 5)
                waiting.remove(request)
            elif request.turn is Turn.ALONE:
                quarantine.reserve(request, engines)
        quarantine.settle()
        for request, address in list(running.items()):
            if running.get(request) != address or rng.random() < 0.7:
                continue
            if request not in poison:
                del running[request]
                quarantine.clear(request)
                num_answered += 1
                continue
            late_deaths[request.owner] += request.turn is Turn.ALONE
            quarantine.lose_engine(address, is_dead=True)
            lost = [one for one, where in running.items() if where == address]
            for one in lost:
                del running[one]
                assert not one.incident_id or one.owner == request.owner
            if rng.random() < 0.8:
                lost = [one for one in lost if one is not request]
            waiting += [one for one in lost if not one.incident_id]
    assert (waiting, running) == ([], {})
    assert num_answered > 500
    assert sorted(late_deaths.values()) == [1, 1]


# The budget for sending requests again.


def test_it_is_full_at_the_start_and_empty_after_as_many_repetitions():
    budget = RetryBudget(FakeClock())
    assert [budget.take() for _ in range(1025)] == [True] * 1024 + [False]
    assert budget.left == 0


def test_ten_requests_that_end_well_or_a_second_give_one_back():
    clock = FakeClock()
    budget = RetryBudget(clock, capacity=2)
    assert (budget.take(), budget.take()) == (True, True)
    for _ in range(9):
        budget.give_back()
    assert not budget.take()
    budget.give_back()
    budget.give_back()
    assert (budget.take(), budget.take()) == (True, False)
    clock.advance(1)
    assert budget.take()


def test_it_never_holds_more_than_at_the_start():
    clock = FakeClock()
    budget = RetryBudget(clock, capacity=2)
    clock.advance(1000)
    budget.give_back()
    assert [budget.take() for _ in range(3)] == [True, True, False]
