"""Streams that go on after their calls broke: nothing lost, nothing twice, nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest

from frontend_svc.engines.adoption.takeover import not_kept
from frontend_svc.generation.answers.resumable import ResumableStreams
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.drain import Drain
from frontend_svc.output.collector import ReaderLimit
from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    EOS_ID,
    TOKENIZER,
    WAIT_S,
    Client,
    FakeEngine,
    answer,
    details_of,
    make_request,
    read_all,
    serving,
    serving_one,
)
from triptych.api.v1 import generate_pb2, inference_pb2, request_pb2
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2
from triptych_kit.errors import Aborted, InvalidArgument, NotFound, OutOfRange, Unavailable

TEXT = " sat on the mat 日本 😀."
GRACE_MS = 5000
Response = generate_pb2.GenerateResponse


def resume(client: Client, token: str, last_position: int):
    return client.inference.Resume(
        inference_pb2.ResumeRequest(resume_token=token, last_position=last_position), timeout=WAIT_S
    )


async def refusal(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def until_gone(frontend: Frontend) -> None:
    """Wait until no stream is kept; a grace is the only thing that can hold it up."""
    async with asyncio.timeout(WAIT_S):
        # The end of a grace has no event: nothing of the frontend waits for it.
        while len(frontend.requests.resumable):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_stream_that_broke_at_any_message_goes_on_without_loss_or_repetition():
    engine = FakeEngine(answer(TEXT))
    async with serving(engine) as (client, _):
        whole = [response async for response in client.generate(orphan_grace_ms=GRACE_MS, seed=1)]
        for num_read in range(1, len(whole) + 1):
            call = client.generate(orphan_grace_ms=GRACE_MS, seed=1)
            read = [await call.read() for _ in range(num_read)]
            call.cancel()
            token = read[0].started.resume_token
            read += [one.response async for one in resume(client, token, num_read)]
            assert [one.position for one in read] == list(range(1, len(read) + 1))
            assert "".join(one.delta.text for one in read) == TEXT
            ids = [token_id for one in read for token_id in one.delta.token_ids]
            assert ids == [*TOKENIZER.encode(TEXT).ids, EOS_ID]
            assert [one.WhichOneof("event") for one in read].count("finished") == 1
    assert all(request.abort_reason is None for request in engine.requests)


async def test_a_request_runs_on_while_its_connection_is_gone_and_goes_on_over_another():
    async with serving_one() as (engine, client, frontend):
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(frontend.address, options=own) as channel:
            call = Client(channel).generate(orphan_grace_ms=GRACE_MS)
            (request,) = await engine.wait_for_requests(1)
            engine.step({request: [5]})
            started, first = await call.read(), await call.read()
        engine.step({request: [6]})
        responses = aiter(resume(client, started.started.resume_token, first.position))
        assert list((await anext(responses)).response.delta.token_ids) == [6]
        engine.step({request: [7]}, finished={request: AT_LENGTH})
        rest = [one.response async for one in responses]
    assert request.abort_reason is None
    assert [list(one.delta.token_ids) for one in rest] == [[7], []]
    assert rest[-1].finished.usage.num_completion_tokens == 3


async def test_at_the_end_of_the_grace_the_request_is_aborted_and_forgotten():
    async with serving_one() as (engine, client, frontend):
        call = client.generate(orphan_grace_ms=50)
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5]})
        token = (await call.read()).started.resume_token
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
        assert (len(frontend.requests.resumable), frontend.requests.draining.num_open) == (0, 0)
        error = await refusal(resume(client, token, 1))
    assert request.abort_reason == engine_pb2.ABORT_REASON_CLIENT
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_without_a_grace_or_before_its_token_was_sent_a_cancel_aborts_at_once():
    async with serving_one() as (engine, client, frontend):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5]})
        assert not (await call.read()).started.resume_token
        unread = client.generate(orphan_grace_ms=GRACE_MS)
        (_, other) = await engine.wait_for_requests(2)
        call.cancel()
        unread.cancel()
        await engine.wait(lambda: None not in (request.abort_reason, other.abort_reason))
        assert (len(frontend.requests.resumable), frontend.requests.draining.num_open) == (0, 0)


async def test_a_second_reader_takes_over_and_the_first_gets_an_error():
    async with serving_one() as (engine, client, _):
        call = client.generate(orphan_grace_ms=GRACE_MS)
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5]})
        responses = aiter(call)
        started, _ = await anext(responses), await anext(responses)
        second = aiter(resume(client, started.started.resume_token, 1))
        assert (await anext(second)).response.position == 2
        error = await refusal(responses)
        engine.step({request: [6]}, finished={request: AT_LENGTH})
        assert [one.response.position async for one in second] == [3, 4]
    assert error.code() is grpc.StatusCode.ABORTED
    assert "RESUMED_ELSEWHERE" in details_of(error)


async def test_streams_that_cannot_be_resumed_are_distinguished():
    async with serving(FakeEngine(answer("x"))) as (client, frontend):
        started, *_ = await read_all(client.generate(orphan_grace_ms=50))
        await until_gone(frontend)
        late = await refusal(resume(client, started.resume_token, 0))
        unknown = await refusal(resume(client, "0" * 32, 0))
        kept, *_ = await read_all(client.generate(orphan_grace_ms=GRACE_MS))
        ahead = await refusal(resume(client, kept.resume_token, 99))
        unary = inference_pb2.GenerateUnaryRequest(request=make_request(orphan_grace_ms=1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.GenerateUnary(unary, timeout=WAIT_S)
        too_long = await refusal(client.generate(orphan_grace_ms=5001))
        negative = await refusal(client.generate(orphan_grace_ms=-1))
        # The one that may be resumed for some seconds more.
        assert len(frontend.requests.resumable) <= 1
    assert unknown.code() is late.code() is grpc.StatusCode.NOT_FOUND
    assert ahead.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "last_position is 99, the last message that was sent has 4" in ahead.details()
    for error in (too_long, negative, caught.value):
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "orphan_grace_ms" in details_of(error)


async def test_the_deadline_of_the_call_ends_the_request_whatever_its_grace():
    async with serving_one() as (engine, client, frontend):
        call = client.generate(orphan_grace_ms=GRACE_MS, timeout=2.0)
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5]})
        assert (await refusal(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await engine.wait(lambda: request.abort_reason is not None)
        assert len(frontend.requests.resumable) == 0
    assert request.abort_reason == engine_pb2.ABORT_REASON_DEADLINE


async def test_an_orphan_can_be_aborted_by_its_id_and_ends_as_aborted_when_resumed():
    async with serving_one() as (engine, client, _):
        call = client.generate(orphan_grace_ms=GRACE_MS, request_id="mine")
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: [5]})
        started, _ = await call.read(), await call.read()
        call.cancel()
        await client.request.Abort(request_pb2.AbortRequest(request_id="mine"), timeout=WAIT_S)
        rest = [one.response async for one in resume(client, started.started.resume_token, 2)]
    assert [one.finished.reason for one in rest] == [output_pb2.FINISH_REASON_ABORT]


class Source:
    """Streams of scripted messages that know whether they were closed."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Response | Exception | None] = asyncio.Queue()
        self.num_taken = 0
        self.num_closed = 0
        self._position = 0
        self._taken = asyncio.Event()

    def push(self, *token_ids: int) -> None:
        """The next message: started without ids, else a delta."""
        self._position += 1
        if token_ids:
            delta = generate_pb2.Delta(token_ids=token_ids)
            self.messages.put_nowait(Response(position=self._position, delta=delta))
        else:
            self.messages.put_nowait(Response(position=self._position, started=generate_pb2.Started()))

    async def taken(self, num_messages: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.num_taken < num_messages:
                self._taken.clear()
                await self._taken.wait()

    async def stream(self, request, caller) -> AsyncGenerator[Response, None]:
        try:
            while (message := await self.messages.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                self.num_taken += 1
                self._taken.set()
                yield message
        finally:
            self.num_closed += 1


CALLER = Caller("call", "", "", lambda: None)


def streams_of(source: Source, drain: Drain | None = None, **limits: int) -> ResumableStreams:
    return ResumableStreams(source.stream, nothing_kept, ReaderLimit(**limits), drain or Drain())


async def nothing_kept(resume, caller, on_adopted) -> AsyncGenerator[Response, None]:
    raise not_kept(resume.resume_token)
    yield


def resumed(streams: ResumableStreams, token: str, last_position: int) -> AsyncGenerator[Response, None]:
    request = inference_pb2.ResumeRequest(resume_token=token, last_position=last_position)
    return streams.resume(request, CALLER)


async def begun(streams: ResumableStreams, grace_ms: int = GRACE_MS):
    """A first reader that has read `started`, and the token."""
    reader = streams.start(make_request(orphan_grace_ms=grace_ms), CALLER)
    started = await anext(reader)
    return reader, started.started.resume_token


async def test_a_dropped_position_is_out_of_range_and_affects_no_other_reader():
    source = Source()
    streams = streams_of(source, max_tokens=3)
    source.push()
    reader, token = await begun(streams)
    for number in range(10):
        source.push(number)
        assert (await anext(reader)).position == number + 2
    with pytest.raises(OutOfRange, match="after last_position 2 are not kept any more, those from 9 on"):
        await anext(resumed(streams, token, 2))
    source.push(10)
    assert (await anext(reader)).position == 12
    await reader.aclose()
    assert [(await anext(resumed(streams, token, position))).position for position in (9, 11)] == [10, 12]
    await streams.close()
    assert (len(streams), source.num_closed) == (0, 1)


async def test_a_full_log_holds_up_its_stream_and_an_orphan_loses_nothing():
    source = Source()
    streams = streams_of(source, max_tokens=3)
    source.push()
    reader, token = await begun(streams)
    for number in range(20):
        source.push(number)
    await source.taken(5)
    await reader.aclose()
    await asyncio.sleep(0)
    assert source.num_taken == 5
    orphan = resumed(streams, token, 1)
    assert [(await anext(orphan)).position for _ in range(20)] == list(range(2, 22))
    await orphan.aclose()
    await streams.close()


async def test_a_reader_that_is_taken_over_is_aborted_and_the_other_stays_the_reader():
    source = Source()
    streams = streams_of(source)
    source.push()
    first, token = await begun(streams)
    waiting = asyncio.ensure_future(anext(first))
    await asyncio.sleep(0)
    second = resumed(streams, token, 0)
    assert (await anext(second)).position == 1
    with pytest.raises(Aborted) as caught:
        await waiting
    assert caught.value.reason == "RESUMED_ELSEWHERE"
    source.push(1)
    assert (await anext(second)).position == 2
    await second.aclose()
    await streams.close()


async def test_the_status_of_a_stream_is_sent_again_after_a_resume():
    source = Source()
    streams = streams_of(source)
    source.push()
    reader, token = await begun(streams)
    source.messages.put_nowait(Unavailable("the engine was lost"))
    for one in (reader, resumed(streams, token, 1)):
        with pytest.raises(Unavailable, match="the engine was lost"):
            await anext(one)
    await streams.close()


async def test_a_request_that_is_refused_at_once_is_not_kept():
    source = Source()
    streams = streams_of(source)
    source.messages.put_nowait(InvalidArgument("wrong"))
    with pytest.raises(InvalidArgument, match="wrong"):
        await begun(streams)
    assert len(streams) == 0


async def test_a_fault_of_ours_is_no_quiet_end():
    source = Source()
    streams = streams_of(source)
    source.push()
    reader, _ = await begun(streams)
    source.messages.put_nowait(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await anext(reader)
    await streams.close()


async def test_of_streams_that_were_read_whole_only_so_many_are_kept():
    source = Source()
    streams = streams_of(source)
    tokens = []
    for _ in range(1025):
        source.messages.put_nowait(Response(position=1, started=generate_pb2.Started()))
        source.messages.put_nowait(None)
        reader, token = await begun(streams)
        tokens.append(token)
        assert [one async for one in reader] == []
    assert len(streams) == 1024
    with pytest.raises(NotFound):
        await anext(resumed(streams, tokens[0], 0))
    assert (await anext(resumed(streams, tokens[1], 0))).position == 1
    assert len(set(tokens)) == 1025 and all(len(token) == 32 for token in tokens)
    await streams.close()


async def test_a_drain_waits_for_readers_of_a_complete_stream_and_for_those_that_resume_it():
    source, drain = Source(), Drain()
    streams = streams_of(source, drain)
    source.push()
    reader, token = await begun(streams)
    source.push(1)
    source.push(2)
    source.messages.put_nowait(None)
    draining = asyncio.ensure_future(drain.run())
    await source.taken(3)
    assert (await anext(reader)).position == 2
    second = resumed(streams, token, 1)
    assert (await anext(second)).position == 2
    await reader.aclose()
    assert not draining.done()
    assert [one.position async for one in second] == [3]
    await asyncio.wait_for(draining, WAIT_S)
    assert drain.num_open == 0
    await streams.close()
