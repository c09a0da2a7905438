"""A drain that is cut: every call ends with an error, but what another frontend can continue stays there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc
import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.engines.adoption.test_takeover import (
    GRACE_MS,
    begun_at,
    doomed,
    read_some,
    replayed,
    rest_of,
    resume_request,
)
from tests.frontend_svc.fakes import AT_LENGTH, WAIT_S, Client, FakeEngine, make_request, serving, serving_one
from tests.frontend_svc.generation.test_failover import read_outputs
from tests.frontend_svc.token_source import TokenSource
from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2,
    embedding_pb2,
    generate_pb2,
    inference_pb2,
    tokenize_pb2,
    tokenizer_pb2,
)
from triptych.engine.v1 import engine_pb2
from triptych_kit.errors import from_rpc_error

# Longer than a text may take: what waits behind it waits for the cut.
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% if a < 0 %}a{% endif %}{% endfor %}{% endfor %}"
)
USER = chat_message_pb2.ChatMessage(
    role=chat_message_pb2.CHAT_ROLE_USER, parts=[chat_message_pb2.ChatPart(text="the cat")]
)
DRAINING = (grpc.StatusCode.UNAVAILABLE, "DRAINING", "this frontend is shutting down", 1000)


async def read_to_end(call) -> None:
    while await call.read() is not EOF:
        pass


async def ending_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str, str, int | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, WAIT_S)
    error = from_rpc_error(caught.value)
    return error.code, error.reason, error.message, error.retry_after_ms


async def until_open(frontend: Frontend, num_calls: int) -> None:
    async with asyncio.timeout(WAIT_S):
        # A call that has been taken has no event: nothing of the frontend waits for it.
        while frontend.servers.public.num_calls < num_calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def waiting_calls(client: Client) -> dict[str, Awaitable[object]]:
    """A call of each kind, of which none ends by itself."""
    chat = chat_message_pb2.ChatRequest(messages=[USER])
    template = tokenizer_pb2.ApplyChatTemplateRequest(messages=[USER])
    # By ids, so that they need no worker and are in the engine.
    request = make_request([5, 6])
    pooled = embedding_pb2.PoolingInput(token_ids={"ids": [5, 6]})
    return {
        "Generate": read_to_end(client.generate([5, 6])),
        "Generate with a grace": read_to_end(client.generate([5, 6], orphan_grace_ms=GRACE_MS)),
        "GenerateUnary": client.inference.GenerateUnary(inference_pb2.GenerateUnaryRequest(request=request)),
        "GenerateBatch": read_to_end(
            client.inference.GenerateBatch(inference_pb2.GenerateBatchRequest(requests=[request, request]))
        ),
        "Embed": client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=[pooled])),
        "Rerank": client.embedding.Rerank(embedding_pb2.RerankRequest(query=pooled, documents=[pooled])),
        "ApplyChatTemplate": client.tokenizer.ApplyChatTemplate(template),
        # These wait for the one worker that texts have.
        "Generate of a text": read_to_end(client.generate("the cat")),
        "Tokenize": client.tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text="the cat")),
        "Chat": read_to_end(client.chat.Chat(chat)),
        "ChatUnary": client.chat.ChatUnary(chat_pb2.ChatUnaryRequest(request=chat)),
    }


async def test_every_waiting_call_ends_with_an_error_that_permits_a_retry_elsewhere():
    engine = FakeEngine(chat_template=ENDLESS, supported_tasks=("generate", "embed", "token_embed"))
    async with serving(engine, text_time_limit_s=600.0) as (client, frontend):
        calls = waiting_calls(client)
        endings = asyncio.gather(*map(ending_of, calls.values()))
        await engine.wait_for_requests(8)
        await until_open(frontend, len(calls))
        await asyncio.wait_for(frontend.cut(), WAIT_S)
        assert dict(zip(calls, await endings, strict=True)) == dict.fromkeys(calls, DRAINING)
        assert await ending_of(client.tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text="a"))) == DRAINING
        assert frontend.requests.draining.num_open == 0
    assert [one.abort_reason for one in engine.requests] == [engine_pb2.ABORT_REASON_CLIENT] * 8
    assert engine.goodbyes == ["the frontend stops"]


async def test_a_call_that_no_drain_waits_for_ends_with_an_error():
    engine = FakeEngine(chat_template=ENDLESS)
    async with serving(engine, text_time_limit_s=600.0) as (client, frontend):
        template = tokenizer_pb2.ApplyChatTemplateRequest(messages=[USER])
        ending = asyncio.ensure_future(ending_of(client.tokenizer.ApplyChatTemplate(template)))
        await until_open(frontend, 1)
        await asyncio.wait_for(frontend.drain(), WAIT_S)
        await asyncio.wait_for(frontend.end_calls(), WAIT_S)
        assert await ending == DRAINING


async def test_a_request_that_waits_for_an_engine_ends_with_an_error_too():
    async with serving_one(reconnect_window_s=600.0) as (engine, client, frontend):
        ending = asyncio.ensure_future(ending_of(read_to_end(client.generate([5, 6]))))
        await engine.wait_for_requests(1)
        await engine.kill()
        async with asyncio.timeout(WAIT_S):
            while not frontend.engines.failover.num_held:  # noqa: ASYNC110  Nor has one that is held.
                await asyncio.sleep(0.001)
        await asyncio.wait_for(frontend.cut(), WAIT_S)
        assert await ending == DRAINING


async def test_a_stream_with_a_grace_goes_on_elsewhere_and_one_without_is_aborted():
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            kept, unkept = first.client.generate(orphan_grace_ms=GRACE_MS), first.client.generate()
            requests = await engine.wait_for_requests(2)
            engine.step({one: [5] for one in requests})
            read = await read_some(kept, 2)
            await read_some(unkept, 2)
            await first.cut()
            assert await ending_of(kept.read()) == DRAINING
            assert await ending_of(unkept.read()) == DRAINING
        (adopted,) = [one for one in requests if one.entry.resume_state]
        (aborted,) = [one for one in requests if not one.entry.resume_state]
        rest = asyncio.ensure_future(rest_of(client, read))
        await engine.wait(lambda: adopted.num_adoptions == 1)
        engine.step({adopted: [6]}, finished={adopted: AT_LENGTH})
        assert [list(one.delta.token_ids) for one in await rest] == [[6], []]
    assert (adopted.num_aborts, aborted.num_aborts) == (0, 1)
    assert aborted.abort_reason == engine_pb2.ABORT_REASON_CLIENT


async def test_whatever_a_client_has_read_at_the_cut_it_gets_the_rest_and_no_token_is_computed_twice():
    source = TokenSource(lambda request: None if request.num_adoptions else 3)
    engine = FakeEngine(TokenSource())
    fields = {"seed": 5, "n": 2, "logprobs": 1}
    async with serving(engine) as (client, _):
        _, expected = await read_outputs(client.generate(**fields))
        engine.script = source
        async with doomed(engine) as first:
            calls = [first.client.generate(orphan_grace_ms=GRACE_MS, **fields) for _ in range(4)]
            heads = await asyncio.gather(*(read_some(call, 1 + index) for index, call in enumerate(calls)))
            await first.cut()
            # What was on its way to the client still counts as read.
            for call, head in zip(calls, heads, strict=True):
                assert await ending_of(read_into(call, head)) == DRAINING
        for head in heads:
            messages = head + await rest_of(client, head)
            assert [one.position for one in messages] == list(range(1, len(messages) + 1))
            assert (await read_outputs(replayed(messages)))[1] == expected
    assert source.faults == []
    assert {one.num_adoptions for one in engine.requests[2:]} == {1}


async def test_a_stream_whose_token_was_never_sent_is_not_left_running():
    engine = FakeEngine()
    async with serving(engine), doomed(engine) as first:
        call = first.client.generate(orphan_grace_ms=GRACE_MS)
        (request,) = await engine.wait_for_requests(1)
        await first.cut()
        assert await ending_of(call.read()) == DRAINING
        await engine.wait(lambda: request.abort_reason is not None)


async def test_a_stream_that_was_adopted_is_left_again():
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            _, request, read = await begun_at(first, engine)
        async with doomed(engine) as second:
            resumed = second.client.inference.Resume(resume_request(read), timeout=WAIT_S)
            await engine.wait(lambda: request.num_adoptions == 1)
            engine.step({request: [6]})
            read.append((await resumed.read()).response)
            await second.cut()
            assert await ending_of(resumed.read()) == DRAINING
        rest = asyncio.ensure_future(rest_of(client, read))
        await engine.wait(lambda: request.num_adoptions == 2)
        engine.step({request: [7]}, finished={request: AT_LENGTH})
        read += await rest
    assert [token_id for message in read for token_id in message.delta.token_ids] == [5, 6, 7]
    assert request.num_aborts == 0


async def test_a_frontend_that_drains_adopts_nothing_and_asks_no_engine():
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            _, request, read = await begun_at(first, engine)
            await first.cut()
        async with doomed(engine) as second:
            await second.drain()
            resumed = second.client.inference.Resume(resume_request(read), timeout=WAIT_S)
            assert await ending_of(resumed.read()) == DRAINING
        assert engine.num_asked_adoptions == 0
        rest = asyncio.ensure_future(rest_of(client, read))
        await engine.wait(lambda: request.num_adoptions == 1)
        engine.step({request: [6]}, finished={request: AT_LENGTH})
        assert [list(one.delta.token_ids) for one in await rest] == [[6], []]


async def test_an_adoption_that_the_cut_overtakes_is_left_to_the_next_frontend():
    async with serving_one() as (engine, client, _):
        async with doomed(engine) as first:
            _, request, read = await begun_at(first, engine)
            async with doomed(engine) as second:
                # The first frontend still has it, so that the second one asks again and again.
                resumed = second.client.inference.Resume(resume_request(read), timeout=WAIT_S)
                await engine.wait(lambda: engine.num_asked_adoptions >= 1)
                cut = asyncio.ensure_future(second.cut())
                await first.cut()
                await cut
                assert await ending_of(resumed.read()) == DRAINING
        num_adoptions = request.num_adoptions
        rest = asyncio.ensure_future(rest_of(client, read))
        await engine.wait(lambda: request.num_adoptions > num_adoptions)
        engine.step({request: [6]}, finished={request: AT_LENGTH})
        assert [list(one.delta.token_ids) for one in await rest] == [[6], []]
    assert request.num_aborts == 0


async def read_into(call, read: list[generate_pb2.GenerateResponse]) -> None:
    while (message := await call.read()) is not EOF:
        read.append(message)
