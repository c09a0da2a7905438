"""Requests that lose their engine: they go on in another one, and their clients get what they would have."""

from __future__ import annotations

import asyncio
import math
import random
import re
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
from frontend_svc.output.loss import LossKind
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
    other = FakeEngine(source, fingerprint="other", dp_rank=1, is_ready=False)
    same = FakeEngine(source, fingerprint="f", dp_rank=2, is_ready=False)
    async with serving(first, other, same, reconnect_window_s=WAIT_S) as (client, frontend):
        begun, fresh = client.generate(seed=2), client.generate(seed=0)
        await first.wait_for_requests(2)
        other.become_ready()
        await client.until_engines_are_ready(2)
        await first.kill()
        await read_all(fresh)
        assert frontend.engines.failover.num_held == 1
        same.become_ready()
        await read_all(begun)
    assert [request.entry.request_seed for request in other.requests] == [0]
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
    second = FakeEngine(
        lambda engine, request: engine.pool(request, tensor), supported_tasks=tasks, dp_rank=1, is_ready=False
    )
    async with serving(first, second, reconnect_window_s=WAIT_S) as (client, _):
        inputs = [embedding_pb2.PoolingInput(prompt="the cat") for _ in range(5)]
        call = client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=inputs), timeout=WAIT_S)
        answered = asyncio.ensure_future(call)
        await first.wait_for_requests(5)
        second.become_ready()
        await client.until_engines_are_ready(2)
        await first.kill()
        response = await answered
    assert [one.inline for one in response.embeddings] == [tensor.inline] * 5
    assert [request.entry.attempt for request in second.requests] == [1] * 5


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

    def __init__(self, address: str) -> None:
        self.address = address
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
        self.num_gone = 0  # and may come back

    def pick(
        self, *args: object, is_allowed: Callable[[Engine], bool] = lambda engine: True, **options: object
    ) -> Engine:
        if self.left and is_allowed(self.left[0]):
            return self.left[0]
        raise Unavailable("no engine is ready")

    def ready_for(self, *args: object, **options: object) -> list[Engine]:
        return self.left[:1]

    def expected_until(self, model: object) -> float | None:
        return None

    @property
    def num_known(self) -> int:
        return len(self.left) + self.num_gone


class NoChance(random.Random):
    """Moves requests without a delay."""

    def random(self) -> float:
        return 0.0


class NamedRequest:
    """A request that is its name."""

    def __init__(self, name: str, errors: dict[str, ServiceError], changed: asyncio.Event) -> None:
        self.has_begun = self.has_output_since_send = False
        self._name, self._errors, self._changed = name, errors, changed

    def send(self, engine: Engine, attempt: int, on_output: Callable[[], None] | None) -> None:
        engine.received.append(self._name)
        self._changed.set()

    def fail(self, error: ServiceError) -> None:
        self._errors[self._name] = error
        self._changed.set()

    def content(self) -> Content:
        return Content("", "m", self._name.encode("utf-32-le"))

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

    def start(self, name: str) -> None:
        self.requests[name] = NamedRequest(name, self.errors, self.changed)
        requirements = EngineRequirements(None, RoutingRequest())
        self.migrations[name] = Migration(self.failover, requirements, self.requests[name])
        self.migrations[name].start()

    def lose_first(self, cause: LossKind = LossKind.DEATH, *, had_output: bool = False) -> None:
        """The engine that is used is lost, where not said otherwise before any output of it."""
        lost = self.engines.left.pop(0)
        for name, migration in list(self.migrations.items()):
            if migration.client is not None and migration.client.address == lost.address:
                request = self.requests[name]
                request.has_begun = request.has_output_since_send = had_output
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

DEATH = LossKind.DEATH


def after_death(
    suspects: PoisonQuarantine, *, num_fresh: int = 0, num_begun: int = 0, address: str = "a"
) -> list[Suspect]:
    """The requests of an engine that died with them, those that had begun first."""
    lost = [Suspect() for _ in range(num_begun + num_fresh)]
    for index, suspect in enumerate(lost):
        assert not suspects.lose(suspect, address, DEATH, had_output=index < num_begun)
    return lost


def send_all(suspects: PoisonQuarantine, waiting: list[Suspect], address: str) -> list[Suspect]:
    """Send as many as may go now, in order; returns them."""
    sent = []
    for suspect in in_order(waiting):
        if suspects.may_go(suspect, address, lambda: 3):
            suspects.send(suspect, address)
            sent.append(suspect)
    for suspect in sent:
        waiting.remove(suspect)
    suspects.settle()
    return sent


def test_requests_without_output_go_one_at_a_time_for_each_engine():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_fresh=3)
    (first,) = send_all(suspects, waiting, "b")
    assert len(send_all(suspects, waiting, "c")) == 1
    assert send_all(suspects, waiting, "b") == []
    suspects.clear(first)
    assert len(send_all(suspects, waiting, "b")) == 1


def test_those_that_had_begun_go_before_them_in_groups_that_double():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_begun=9, num_fresh=2)
    sizes, turns = [], []
    while waiting:
        sent = send_all(suspects, waiting, "b")
        assert send_all(suspects, waiting, "b") == []
        for suspect in sent[1:]:
            suspects.clear(suspect)
            assert send_all(suspects, waiting, "b") == []
        turns += [suspect.turn for suspect in sent[:1]]
        suspects.clear(sent[0])
        sizes.append(len(sent))
    assert sizes == [1, 2, 4, 2, 1, 1]
    assert turns == [Turn.IN_GROUP] * 4 + [Turn.ALONE] * 2


def test_the_one_suspect_of_two_dead_engines_is_quarantined_and_no_other():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_fresh=2)
    (first,) = send_all(suspects, waiting, "b")
    others = [Suspect(), Suspect()]
    assert suspects.lose(first, "b", DEATH, had_output=False)
    assert not any(suspects.lose(other, "b", DEATH, had_output=True) for other in others)
    assert (first.num_deaths, others[0].num_deaths) == (2, 1)


def test_of_several_suspects_none_is_quarantined_and_each_goes_alone():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_begun=3)
    (first,) = send_all(suspects, waiting, "b")
    suspects.clear(first)
    both = send_all(suspects, waiting, "b")
    assert len(both) == 2
    assert not any(suspects.lose(suspect, "b", DEATH, had_output=False) for suspect in both)
    assert {suspect.turn for suspect in both} == {Turn.ALONE}
    (alone,) = send_all(suspects, both, "c")
    assert suspects.lose(alone, "c", DEATH, had_output=False)


def test_output_clears_a_request_whatever_it_was_present_at():
    suspects = PoisonQuarantine()
    (suspect,) = after_death(suspects, num_fresh=1)
    suspects.send(suspect, "b")
    suspects.clear(suspect)
    assert (suspect.turn, suspect.num_deaths) == (Turn.AT_ONCE, 0)
    assert not suspects.lose(suspect, "b", DEATH, had_output=True)


@pytest.mark.parametrize("kind", [LossKind.SILENCE, LossKind.LEFT, LossKind.REFUSED])
def test_only_deaths_count(kind):
    suspects = PoisonQuarantine()
    innocent, (suspect,) = Suspect(), after_death(suspects, num_fresh=1)
    suspects.send(suspect, "b")
    assert not suspects.lose(innocent, "b", kind, had_output=False)
    assert not suspects.lose(suspect, "b", kind, had_output=False)
    assert (innocent.turn, innocent.num_deaths) == (Turn.AT_ONCE, 0)
    assert (suspect.turn, suspect.num_deaths, suspects.num_on_probation) == (Turn.ALONE, 1, 0)


def test_a_suspect_without_output_for_long_lets_others_pass_and_stays_a_suspect():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_fresh=2)
    (slow,) = send_all(suspects, waiting, "b")
    suspects.pass_over(slow)
    (other,) = send_all(suspects, waiting, "b")
    assert not suspects.lose(slow, "b", DEATH, had_output=False)
    assert not suspects.lose(other, "b", DEATH, had_output=False)


def test_one_that_ends_gives_its_slot_to_the_next():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_fresh=2)
    (first,) = send_all(suspects, waiting, "b")
    suspects.clear(first)
    assert len(send_all(suspects, waiting, "b")) == 1


def go(suspects: PoisonQuarantine, address: str, num_engines: int = 3) -> Suspect | None:
    """Send a new request to the engine, if it may go there."""
    fresh = Suspect()
    if not suspects.may_go(fresh, address, lambda: num_engines):
        return None
    suspects.send(fresh, address)
    return fresh


def test_new_requests_avoid_an_engine_on_which_a_likely_cause_runs():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_fresh=1)
    (alone,) = send_all(suspects, waiting, "b")
    assert go(suspects, "b") is None
    assert go(suspects, "c") is not None
    suspects.clear(alone)
    assert go(suspects, "b") is not None


def test_a_likely_cause_waits_until_all_others_on_its_engine_have_output_and_new_ones_avoid_it():
    suspects = PoisonQuarantine()
    fresh = go(suspects, "b")
    assert fresh is not None
    waiting = after_death(suspects, num_fresh=1)
    assert send_all(suspects, waiting, "b") == []
    assert go(suspects, "b") is None
    suspects.clear(fresh)
    assert len(send_all(suspects, waiting, "b")) == 1


def test_an_engine_that_a_likely_cause_waited_for_is_free_when_that_has_ended():
    suspects = PoisonQuarantine()
    assert go(suspects, "b") is not None
    assert send_all(suspects, after_death(suspects, num_fresh=1), "b") == []
    suspects.release_reserved()
    assert go(suspects, "b") is not None


def test_none_is_the_cause_where_another_without_output_was_on_the_engine():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_begun=1)
    (suspect,) = send_all(suspects, waiting, "b")
    fresh = go(suspects, "b")
    assert fresh is not None
    assert not suspects.lose(suspect, "b", DEATH, had_output=False)
    assert not suspects.lose(fresh, "b", DEATH, had_output=False)
    assert {suspect.turn, fresh.turn} == {Turn.ALONE}


def test_one_engine_of_several_is_left_to_others():
    suspects = PoisonQuarantine()
    waiting = after_death(suspects, num_fresh=3)
    assert len(send_all(suspects, waiting, "b")) == len(send_all(suspects, waiting, "c")) == 1
    assert send_all(suspects, waiting, "d") == []
    assert go(suspects, "d") is not None


async def test_an_engine_that_a_new_suspect_reserved_is_free_once_it_went_to_another():
    world = MovesWorld(num_engines=2, chance=NoChance())
    failover = world.failover
    world.start("a")
    first = world.engines.left[0]
    assert not failover.suspects.may_go(suspect_alone(), first.address, lambda: 3)
    assert not failover.suspects.may_go(Suspect(), first.address, lambda: 3)
    failover.remove(world.migrations["a"])
    assert failover.suspects.may_go(Suspect(), first.address, lambda: 3)
    failover.close()


def suspect_alone() -> Suspect:
    suspect = Suspect()
    suspect.turn = Turn.ALONE
    return suspect


async def test_the_last_of_several_engines_is_kept_from_a_request_that_was_at_two_deaths():
    world = MovesWorld(num_engines=3, chance=NoChance())
    world.engines.reconnect_window_s = 0.05
    for name in ("a", "b"):
        world.start(name)
    world.lose_first()
    second = world.engines.left[0]
    await world.until(lambda: len(second.received) == 1)
    world.start("c")
    [suspect] = second.received
    migration = world.migrations[suspect]
    migration.suspect.turn, migration.suspect.num_deaths = Turn.ALONE, 1
    third = world.engines.left[1]
    world.engines.num_gone = 1
    # Another without output was there, so none is found to be the cause.
    world.failover.suspects.send(Suspect(), second.address)
    world.lose_first()
    await world.until(lambda: suspect in world.errors)
    assert world.errors[suspect] is LOST
    assert suspect not in third.received
    world.failover.close()


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
