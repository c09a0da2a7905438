"""Streams whose frontend dies: their clients get the rest from another one, and nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from frontend_svc.build import build_frontend
from frontend_svc.config import FrontendConfig
from frontend_svc.engines.adoption.takeover import MAX_RESUME_STATE_BYTES, make_resumable, output_request_id
from frontend_svc.engines.connection.client import EngineState
from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    LONG_HEARTBEAT_S,
    WAIT_S,
    Client,
    FakeEngine,
    FakeRequest,
    make_request,
    serving,
    serving_one,
)
from tests.frontend_svc.generation.test_failover import CASES, read_outputs
from tests.frontend_svc.token_source import TokenSource
from triptych.api.v1 import generate_pb2, inference_pb2, request_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_client.errors import TriptychError
from triptych_client.retry import Attempts, RetryPolicy
from triptych_client.stream_plan import StreamPlan
from triptych_kit.channel import open_channel

GRACE_MS = 5000
Response = generate_pb2.GenerateResponse


class Doomed:
    """A frontend that ends without a word to its clients, and may not come back."""

    def __init__(self, frontend: Frontend, client: Client) -> None:
        self.client = client
        self._frontend = frontend
        self._is_dead = False

    async def drain(self) -> None:
        """Begin to drain it; nothing may run there."""
        await self._frontend.drain()

    async def cut(self) -> None:
        """Cut its drain: its calls end with an error, and its streams to engines end with a goodbye."""
        async with asyncio.timeout(WAIT_S):
            await self._frontend.cut()

    async def die(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            await self._frontend.servers.public.stop(0)
            await self._frontend.close()


def another_frontend(*engines: FakeEngine) -> Frontend:
    addresses = tuple(engine.address for engine in engines)
    config = FrontendConfig(port=0, engine=addresses, text_workers=1, reconnect_window_s=0.2)
    return build_frontend(config, heartbeat_s=LONG_HEARTBEAT_S)


@contextlib.asynccontextmanager
async def doomed(*engines: FakeEngine) -> AsyncIterator[Doomed]:
    """One more frontend of engines that are served already."""
    frontend = another_frontend(*engines)
    address = await frontend.servers.public.start()
    frontend.connect(address)
    async with open_channel(address, profile="public") as channel:
        one = Doomed(frontend, Client(channel))
        try:
            await one.client.until_engines_are_ready(len(engines))
            yield one
        finally:
            await one.die()


def resume_request(read: list[Response]) -> inference_pb2.ResumeRequest:
    """What a client asks for that has read so much, as ours does."""
    plan: StreamPlan[Response] = StreamPlan(
        lambda message: message, Attempts(RetryPolicy(), None), grace_s=5.0
    )
    for message in read:
        plan.take(message)
    broken = TriptychError(grpc.StatusCode.UNAVAILABLE, "broken")
    resume = plan.after_error(broken).resume
    assert resume is not None
    return resume


async def rest_of(client: Client, read: list[Response]) -> list[Response]:
    call = client.inference.Resume(resume_request(read), timeout=WAIT_S)
    return [message.response async for message in call]


async def replayed(messages: list[Response]) -> AsyncGenerator[Response, None]:
    for message in messages:
        copy = Response()
        copy.CopyFrom(message)
        yield copy


async def read_some(call, num_messages: int) -> list[Response]:
    read: list[Response] = []
    while len(read) < num_messages and (message := await call.read()) is not EOF:
        read.append(message)
    return read


# By name: how many tokens the first frontend gets, and how many messages its client reads.
CUTS = {
    f"{name}:{num_tokens}:{num_read}": (name, num_tokens, num_read)
    for name in CASES
    for num_tokens, most_read in ((3, 2), (40, 3))
    for num_read in range(1, most_read + 1)
    if name != "final" or num_tokens == 40
}


async def begun_at(frontend: Doomed, engine: FakeEngine) -> tuple[Any, FakeRequest, list]:
    """A stream with a grace that has had its first token: the call, the request, and what was read."""
    call = frontend.client.generate(orphan_grace_ms=GRACE_MS)
    (request,) = await engine.wait_for_requests(1)
    engine.step({request: [5]})
    return call, request, await read_some(call, 2)


async def test_whatever_a_client_has_read_it_gets_the_rest_from_another_frontend():
    def cut_after(request: FakeRequest) -> int | None:
        cut = CUTS.get(request.entry.external_request_id)
        return None if cut is None or request.num_adoptions else cut[1]

    source = TokenSource(cut_after)
    engine = FakeEngine(source)
    async with serving(engine) as (client, _):
        expected = {name: (await read_outputs(client.generate(**CASES[name])))[1] for name in CASES}
        async with doomed(engine) as first:
            calls = {
                cut: first.client.generate(request_id=cut, orphan_grace_ms=GRACE_MS, **CASES[name])
                for cut, (name, _, _) in CUTS.items()
            }
            heads = await asyncio.gather(*(read_some(call, CUTS[cut][2]) for cut, call in calls.items()))
        rests = await asyncio.gather(*(rest_of(client, head) for head in heads))
        for cut, head, rest in zip(CUTS, heads, rests, strict=True):
            messages = head + rest
            assert [one.position for one in messages] == list(range(1, len(messages) + 1)), cut
            assert (await read_outputs(replayed(messages)))[1] == expected[CUTS[cut][0]], cut
    assert source.faults == []


async def test_a_client_that_gets_all_each_time_gets_all_of_it_from_the_other_frontend():
    engine = FakeEngine(TokenSource())
    cumulative = {"output_kind": sampling_pb2.OUTPUT_KIND_CUMULATIVE, "orphan_grace_ms": GRACE_MS, "seed": 4}
    async with serving(engine) as (client, _):
        whole = [message async for message in client.generate(**cumulative)]
        async with doomed(engine) as first:
            head = await read_some(first.client.generate(**cumulative), 2)
        rest = await rest_of(client, head)
    assert rest[-2].delta == whole[-2].delta
    for finished in (rest[-1].finished, whole[-1].finished):
        finished.ClearField("stats")
    assert rest[-1].finished == whole[-1].finished


async def test_an_adopted_request_goes_on_in_another_engine_when_its_own_dies():
    fields = {"orphan_grace_ms": GRACE_MS, "n": 2, "seed": 31, "logprobs": 1}
    source = TokenSource(lambda request: None if request.entry.attempt else 3)
    first_engine, second_engine = FakeEngine(TokenSource()), FakeEngine(TokenSource())
    async with serving(first_engine, second_engine, reconnect_window_s=5.0) as (client, frontend):
        await client.until_engines_are_ready(2)
        _, expected = await read_outputs(client.generate(**fields))
        first_engine.script = second_engine.script = source
        async with doomed(first_engine) as first:
            read = await read_some(first.client.generate(**fields), 3)
        resumed = aiter(client.inference.Resume(resume_request(read), timeout=WAIT_S))
        requests = [one for one in first_engine.requests if one.num_adoptions]
        while not requests:
            read.append((await anext(resumed)).response)
            requests = [one for one in first_engine.requests if one.num_adoptions]
        await first_engine.kill()
        read += [message.response async for message in resumed]
        _, outputs = await read_outputs(replayed(read))
        assert frontend.engines.failover.num_moved == 1
    assert outputs == expected
    assert [one.entry.attempt for one in second_engine.requests[-2:]] == [1, 1]
    assert {one.entry.request_id for one in second_engine.requests[-2:]} == {
        one.entry.request_id for one in requests
    }
    assert all(one.entry.resume_state == requests[0].entry.resume_state for one in requests)


async def test_a_stream_is_adopted_again_when_its_second_frontend_dies():
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            call = first.client.generate(orphan_grace_ms=GRACE_MS)
            (request,) = await engine.wait_for_requests(1)
            engine.step({request: [5]}, cached={request: 16})
            read = await read_some(call, 2)
        async with doomed(engine) as second:
            resumed = aiter(second.client.inference.Resume(resume_request(read), timeout=WAIT_S))
            await engine.wait(lambda: request.num_adoptions == 1)
            engine.step({request: [6]})
            read.append((await anext(resumed)).response)
        resumed = aiter(client.inference.Resume(resume_request(read), timeout=WAIT_S))
        await engine.wait(lambda: request.num_adoptions == 2)
        engine.step({request: [7]}, finished={request: AT_LENGTH})
        read += [message.response async for message in resumed]
    assert [token_id for message in read for token_id in message.delta.token_ids] == [5, 6, 7]
    assert read[-1].finished.usage.num_completion_tokens == 3
    assert read[-1].finished.usage.num_cached_tokens == 16


async def test_an_adopted_stream_can_be_resumed_aborted_and_looked_up_where_it_is():
    async with serving_one() as (engine, client, frontend):
        async with doomed(engine) as first:
            call = first.client.generate(orphan_grace_ms=GRACE_MS, request_id="mine")
            (request,) = await engine.wait_for_requests(1)
            engine.step({request: [5]})
            read = await read_some(call, 2)
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(frontend.address, options=own) as channel:
            broken = Client(channel).inference.Resume(resume_request(read), timeout=WAIT_S)
            await engine.wait(lambda: request.num_adoptions == 1)
            engine.step({request: [6]})
            read.append((await broken.read()).response)
        assert (frontend.requests.draining.num_open, len(frontend.requests.resumable)) == (1, 1)
        facts = await client.request.GetRequest(request_pb2.GetRequestRequest(request_id="mine"))
        assert facts.usage.num_completion_tokens == 2
        await client.request.Abort(request_pb2.AbortRequest(request_id="mine"), timeout=WAIT_S)
        read += await rest_of(client, read)
        await engine.wait(lambda: request.abort_reason is not None)
        assert engine.num_asked_adoptions == 1
    assert read[-1].finished.reason == output_pb2.FINISH_REASON_ABORT


async def test_at_the_end_of_its_own_grace_an_adopted_request_is_aborted_and_forgotten():
    async with serving_one() as (engine, client, frontend):
        async with doomed(engine) as first:
            call = first.client.generate(orphan_grace_ms=60)
            (request,) = await engine.wait_for_requests(1)
            engine.step({request: [5]})
            read = await read_some(call, 2)
        call = client.inference.Resume(resume_request(read), timeout=WAIT_S)
        await engine.wait(lambda: request.num_adoptions == 1)
        engine.step({request: [6]})
        await call.read()
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
        assert (len(frontend.requests.resumable), frontend.requests.draining.num_open) == (0, 0)


async def test_an_engine_that_has_not_noticed_yet_is_asked_again():
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            _, request, read = await begun_at(first, engine)
            rest = asyncio.ensure_future(rest_of(client, read))
            await engine.wait(lambda: engine.num_asked_adoptions >= 2)
        await engine.wait(lambda: request.num_adoptions == 1)
        engine.step({request: [6]}, finished={request: AT_LENGTH})
        assert [list(message.delta.token_ids) for message in await rest] == [[6], []]


@pytest.mark.parametrize(
    ("features", "feature_set"),
    [(("adopt",), None), ((), session_pb2.FeatureSet(adopt=True)), ((), None)],
    ids=["unknown", "of typed features alone", "an engine that cannot"],
)
async def test_what_no_engine_keeps_is_not_found_and_leaves_nothing(features, feature_set):
    engine = FakeEngine(features=features, feature_set=feature_set)
    async with serving(engine) as (client, frontend):
        received = [inference_pb2.ReceivedOutput(num_tokens=1)]
        request = inference_pb2.ResumeRequest(resume_token="0" * 32, last_position=2, received=received)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.Resume(request, timeout=WAIT_S).read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (len(frontend.requests.resumable), frontend.requests.draining.num_open) == (0, 0)
    assert bool(engine.num_asked_adoptions) == bool(features or feature_set)


async def test_a_client_that_does_not_report_what_it_has_received_cannot_resume_elsewhere():
    async with serving_one() as (engine, client, _):
        request = inference_pb2.ResumeRequest(resume_token="0" * 32, last_position=2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.Resume(request, timeout=WAIT_S).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert engine.num_asked_adoptions == 0


@pytest.mark.parametrize("name", ["num_tokens", "num_characters"])
async def test_a_client_that_claims_more_than_there_is_gets_an_error(name):
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            call = first.client.generate(orphan_grace_ms=GRACE_MS)
            (one,) = await engine.wait_for_requests(1)
            engine.step({one: [5, 6]})
            read = await read_some(call, 2)
        request = resume_request(read)
        (received,) = request.received
        too_many = getattr(received, name) + 100
        setattr(received, name, too_many)
        resumed = client.inference.Resume(request, timeout=WAIT_S)
        await engine.wait(lambda: one.num_adoptions)
        engine.step({one: [7]}, finished={one: AT_LENGTH})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await resumed.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"received.{name} of output 0 is {too_many}, the whole output has " in caught.value.details()


async def test_a_group_of_which_an_unfinished_output_is_gone_is_not_found_and_aborted():
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            call = first.client.generate(orphan_grace_ms=GRACE_MS, n=2)
            requests = list(await engine.wait_for_requests(2))
            engine.step({one: [5] for one in requests})
            read = await read_some(call, 3)
        engine.requests.remove(requests[1])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(client, read)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await engine.wait(lambda: requests[0].abort_reason is not None)


async def test_a_stop_string_behind_the_death_ends_the_output_here_and_in_the_engine():
    engine = FakeEngine(TokenSource(lambda request: 3))
    async with serving(engine) as (client, _):
        async with doomed(engine) as first:
            call = first.client.generate([7], orphan_grace_ms=GRACE_MS, stop=["the"], seed=5, logprobs=0)
            read = await read_some(call, 1)
            engine.script = TokenSource(lambda request: 12)
        rest = await rest_of(client, read)
        (request,) = engine.requests
        if rest[-1].finished.stop_match.string:
            await engine.wait(lambda: request.abort_reason is not None)
    assert rest[-1].finished.stop_match.string == "the"


async def test_engines_are_sent_what_another_frontend_needs_and_no_prompt():
    async with serving_one() as (engine, client, _):
        call = client.generate("a secret", orphan_grace_ms=1234, n=2, truncate_prompt_tokens=2)
        first, second = await engine.wait_for_requests(2)
        engine.step({first: [5]}, finished={first: AT_LENGTH})
        engine.step({second: [5]}, finished={second: AT_LENGTH})
        messages = [message async for message in call]
        plain = client.generate()
        (_, _, unkept) = await engine.wait_for_requests(3)
        engine.step({unkept: [5]}, finished={unkept: AT_LENGTH})
        assert [message async for message in plain]
    token, entries = messages[0].started.resume_token, (first.entry, second.entry)
    assert [entry.request_id for entry in entries] == [output_request_id(token, index) for index in (0, 1)]
    assert [entry.orphan_grace_ms for entry in entries] == [1234, 1234]
    state = generate_pb2.GenerateRequest.FromString(first.entry.resume_state)
    assert second.entry.resume_state == first.entry.resume_state
    assert state.WhichOneof("input") is None and not state.HasField("truncate_prompt_tokens")
    assert state.sampling.seed == first.entry.request_seed
    assert state.request_id == messages[0].started.request_id
    assert (unkept.entry.resume_state, unkept.entry.HasField("orphan_grace_ms")) == (b"", False)


@pytest.mark.parametrize(("job_id", "has_tensors"), [("x" * MAX_RESUME_STATE_BYTES, False), ("", True)])
def test_what_cannot_be_kept_for_another_frontend_ends_with_its_own(job_id, has_tensors):
    entry, request = add_pb2.AddEntry(), make_request(job_id=job_id, orphan_grace_ms=GRACE_MS)
    make_resumable([entry], request, "mine", "0" * 32, has_tensors=has_tensors)
    assert (entry.request_id, entry.resume_state) == (output_request_id("0" * 32, 0), b"")
    assert not entry.HasField("orphan_grace_ms")


# Streams whose frontend is gone, where the engine is not within the next one's reach at once, or leaves.


async def until(condition: Callable[[], bool]) -> None:
    """Return once it is true: turn by turn of the loop, as there is no event for it."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_frontend_that_has_just_begun_looks_until_it_knows_its_engines():
    engine = FakeEngine()
    async with serving(engine):
        async with doomed(engine) as first:
            _, request, read = await begun_at(first, engine)
        frontend = another_frontend(engine)
        address = await frontend.servers.public.start()
        try:
            async with open_channel(address, profile="public") as channel:
                rest = asyncio.ensure_future(rest_of(Client(channel), read))
                await until(lambda: frontend.requests.draining.num_open > 0 or rest.done())
                frontend.connect(address)
                await engine.wait(lambda: request.num_adoptions == 1)
                engine.step({request: [6]}, finished={request: AT_LENGTH})
                assert [list(message.delta.token_ids) for message in await rest] == [[6], []]
        finally:
            await frontend.servers.public.stop(0)
            await frontend.close()


async def test_a_position_that_no_stream_reaches_is_refused_and_no_engine_asked():
    async with serving_one() as (engine, client, _):
        received = [inference_pb2.ReceivedOutput(num_tokens=1)]
        request = inference_pb2.ResumeRequest(
            resume_token="0" * 32, last_position=2**64 - 1, received=received
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.Resume(request, timeout=WAIT_S).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"last_position is {2**64 - 1}, the limit is {2**48}"
    assert engine.num_asked_adoptions == 0


async def test_an_engine_that_leaves_is_asked_too():
    async with serving_one() as (engine, client, frontend):
        await client.until_engines_are_ready(1)
        async with doomed(engine) as first:
            _, request, read = await begun_at(first, engine)
            for session in engine.sessions:
                session.send(draining={})
            (known,) = frontend.engines.directory.clients()
            await until(lambda: known.state is EngineState.DRAINING)
        rest = asyncio.ensure_future(rest_of(client, read))
        await engine.wait(lambda: request.num_adoptions == 1)
        engine.step({request: [6]}, finished={request: AT_LENGTH})
        assert [list(message.delta.token_ids) for message in await rest] == [[6], []]
