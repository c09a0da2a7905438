"""Many prompts in one call: each ends on its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from frontend_svc.generation.answers.batch import MAX_BATCH_ITEMS, stream_batch
from frontend_svc.generation.answers.generate import GenerateAnswers
from frontend_svc.generation.caller import Caller
from tests.frontend_svc.fakes import (
    TOKENIZER,
    WAIT_S,
    FakeEngine,
    FakeRequest,
    answer,
    make_request,
    serving,
    serving_one,
)
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import error_pb2
from triptych_kit.errors import InvalidArgument, ResourceExhausted

CALLER = Caller("call", "", "", lambda: None)
Responses = dict[int, list[generate_pb2.GenerateResponse]]


async def read_batch(messages) -> tuple[Responses, dict[int, error_pb2.ErrorStatus]]:
    """Messages by item, and errors by item; nothing comes of an item after its error."""
    responses: Responses = defaultdict(list)
    errors: dict[int, error_pb2.ErrorStatus] = {}
    async for message in messages:
        assert message.item_index not in errors
        if message.HasField("error"):
            errors[message.item_index] = message.error
        else:
            responses[message.item_index].append(message.response)
    return responses, errors


def batch(*requests: generate_pb2.GenerateRequest) -> inference_pb2.GenerateBatchRequest:
    return inference_pb2.GenerateBatchRequest(requests=requests)


def text_of(responses: list[generate_pb2.GenerateResponse]) -> str:
    assert [one.position for one in responses] == list(range(1, len(responses) + 1))
    assert responses[0].WhichOneof("event") == "started"
    assert responses[-1].WhichOneof("event") == "finished"
    return "".join(one.delta.text for one in responses)


def echo(engine: FakeEngine, request: FakeRequest) -> None:
    answer("", token_ids=request.prompt)(engine, request)


async def test_items_end_on_their_own_and_a_refused_one_leaves_the_others_alone():
    prompts = ["the cat", "a mat", "sat on the organization"]
    async with serving(FakeEngine(echo)) as (client, frontend):
        asked = [make_request(prompts[0]), make_request(""), *map(make_request, prompts[1:])]
        responses, errors = await read_batch(client.inference.GenerateBatch(batch(*asked), timeout=WAIT_S))
        assert len(frontend.requests.open) == 0
    assert [text_of(responses[index]) for index in (0, 2, 3)] == prompts
    (error,) = errors.values()
    status = status_pb2.Status.FromString(error.details)
    bad_request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad_request) for detail in status.details)
    assert (list(errors), error.code) == ([1], grpc.StatusCode.INVALID_ARGUMENT.value[0])
    assert [violation.field for violation in bad_request.field_violations] == ["prompt"]
    assert error.message


@pytest.mark.parametrize("num_items", [0, MAX_BATCH_ITEMS + 1])
async def test_a_batch_of_no_or_too_many_items_is_refused_whole(num_items):
    async with serving(FakeEngine()) as (client, _):
        call = client.inference.GenerateBatch(batch(*[make_request([5])] * num_items), timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_batch(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{num_items} items, must be 1..{MAX_BATCH_ITEMS}" in caught.value.details()


async def test_the_largest_batch_ends_whole():
    async with serving(FakeEngine(echo)) as (client, _):
        asked = [make_request([5 + index % 50, 7]) for index in range(MAX_BATCH_ITEMS)]
        responses, errors = await read_batch(client.inference.GenerateBatch(batch(*asked), timeout=60))
    assert not errors
    for index, request in enumerate(asked):
        ids = [token_id for one in responses[index] for token_id in one.delta.token_ids]
        assert ids[:-1] == list(request.token_ids.ids)


async def test_more_items_than_the_queue_takes_run_one_after_the_other():
    async with serving(FakeEngine(echo), max_queued_requests=1) as (client, _):
        asked = [make_request("the cat") for _ in range(20)]
        responses, errors = await read_batch(client.inference.GenerateBatch(batch(*asked), timeout=WAIT_S))
    assert not errors
    assert [text_of(responses[index]) for index in range(20)] == ["the cat"] * 20


async def test_a_queue_that_others_fill_refuses_each_item_with_a_time_to_retry():
    async with serving_one(max_queued_requests=1) as (engine, client, _):
        other = client.generate()
        await engine.wait_for_requests(1)
        asked = [make_request("the cat") for _ in range(3)]
        responses, errors = await read_batch(client.inference.GenerateBatch(batch(*asked), timeout=WAIT_S))
        other.cancel()
        await engine.wait(lambda: engine.requests[0].abort_reason is not None)
    assert not responses
    assert {error.code for error in errors.values()} == {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
    assert sorted(errors) == [0, 1, 2]
    details = status_pb2.Status.FromString(errors[0].details).details
    assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)


async def test_cancel_aborts_every_item():
    async with serving_one() as (engine, client, frontend):
        call = client.inference.GenerateBatch(batch(*map(make_request, "abc")), timeout=WAIT_S)
        requests = list(await engine.wait_for_requests(3))
        engine.step({requests[1]: TOKENIZER.encode("x").ids})
        await call.read()
        call.cancel()
        await engine.wait(lambda: all(one.abort_reason is not None for one in requests))
        assert frontend.requests.draining.num_open == 0


async def test_a_drain_waits_for_readers_of_items_that_have_ended():
    async with serving(FakeEngine(echo)) as (client, frontend):
        await client.until_engines_are_ready(1)
        answers = GenerateAnswers(frontend.requests.generation, frontend.requests.resumable)
        messages = answers.batch([make_request([5, 6, 7])], CALLER)
        read = [await anext(messages)]
        draining = asyncio.ensure_future(frontend.drain())
        async with asyncio.timeout(WAIT_S):
            while frontend.requests.draining.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not draining.done()
        read += [message async for message in messages]
        await asyncio.wait_for(draining, WAIT_S)
    assert read[-1].response.HasField("finished")


async def test_an_id_given_twice_and_a_grace_that_cannot_be_are_refused_by_item():
    async with serving(FakeEngine(echo)) as (client, _):
        asked = [make_request("a", request_id="x"), make_request("b", request_id="x")]
        asked.append(make_request("c", orphan_grace_ms=1))
        responses, errors = await read_batch(client.inference.GenerateBatch(batch(*asked), timeout=WAIT_S))
    assert list(responses) == [0]
    assert errors[1].code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    assert "orphan_grace_ms is 1" in errors[2].message


async def test_no_more_than_the_limit_run_at_a_time():
    running, most = 0, 0
    are_all_running = asyncio.Event()

    async def stream_of(request, caller) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 256:
            are_all_running.set()
        await are_all_running.wait()
        yield generate_pb2.GenerateResponse(position=1)
        running -= 1

    async with asyncio.timeout(WAIT_S):
        responses, _ = await read_batch(stream_batch(stream_of, [make_request("x")] * 1000, CALLER))
    assert (len(responses), most) == (1000, 256)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_items_begin_one_a_turn_of_the_event_loop(is_refused):
    turn, turns_of_begins = 0, []
    loop = asyncio.get_running_loop()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if len(turns_of_begins) < 300:
            loop.call_soon(count_turns)

    async def stream_of(request, caller) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        turns_of_begins.append(turn)
        if is_refused:
            raise InvalidArgument("no")
        yield generate_pb2.GenerateResponse(position=1)

    loop.call_soon(count_turns)
    async with asyncio.timeout(WAIT_S):
        await read_batch(stream_batch(stream_of, [make_request("x")] * 300, CALLER))
    assert len(set(turns_of_begins)) == 300


async def test_items_that_wait_for_the_queue_fail_when_nothing_of_theirs_is_in_it():
    num_tries = 0

    async def stream_of(request, caller) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        nonlocal num_tries
        num_tries += 1
        is_first = num_tries == 1
        await asyncio.sleep(0)
        if not is_first:
            raise ResourceExhausted("full", reason="QUEUE_FULL")
        yield generate_pb2.GenerateResponse(position=1)

    async with asyncio.timeout(WAIT_S):
        responses, errors = await read_batch(stream_batch(stream_of, [make_request("x")] * 100, CALLER))
    assert (list(responses), len(errors)) == ([0], 99)
    assert num_tries < 500


async def test_a_fault_of_ours_ends_the_call_and_every_item():
    closed = []

    async def stream_of(request, caller) -> AsyncGenerator[generate_pb2.GenerateResponse, None]:
        try:
            yield generate_pb2.GenerateResponse(position=1)
            if request.prompt == "bad":
                raise RuntimeError("a bug")
            await asyncio.Event().wait()
        finally:
            closed.append(request.prompt)

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await read_batch(stream_batch(stream_of, [make_request("a"), make_request("bad")], CALLER))
    assert sorted(closed) == ["a", "bad"]


async def test_an_empty_batch_is_refused_before_anything_runs():
    with pytest.raises(InvalidArgument, match="0 items"):
        await read_batch(stream_batch(lambda request, caller: None, [], CALLER))
