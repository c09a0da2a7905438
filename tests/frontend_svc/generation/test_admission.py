"""The limits of what may wait."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from frontend_svc.generation.admission import Admission
from tests.frontend_svc.fakes import (
    MAX_MODEL_LEN,
    TOKENIZER,
    FakeEngine,
    answer,
    details_of,
    read_all,
    serving,
    serving_one,
)
from triptych_kit.errors import ResourceExhausted
from triptych_kit.security.identity import UNRESTRICTED as ALONE
from triptych_kit.security.identity import Identity, Role, TenantLimits


def test_a_full_queue_refuses_with_the_limit_and_a_time_to_retry():
    admission = Admission(2, 100)
    with admission.queue(ALONE), admission.queue(ALONE):
        expected = pytest.raises(ResourceExhausted, match="2 requests wait already, the limit is 2")
        with expected as caught, admission.queue(ALONE):
            pass
        assert caught.value.retry_after_ms
    assert admission.num_queued == 0


def test_a_first_output_releases_the_slot_once():
    admission = Admission(1, 100)
    with admission.queue(ALONE) as ticket:
        admission.leave_queue(ticket)
        with admission.queue(ALONE):
            assert admission.num_queued == 1
    assert admission.num_queued == 0


def test_prompt_tokens_are_limited_together_but_one_prompt_always_fits():
    admission = Admission(10, 100)
    with admission.queue(ALONE) as first:
        admission.add_prompt(first, 150)
        with admission.queue(ALONE) as second, pytest.raises(ResourceExhausted, match="prompt tokens"):
            admission.add_prompt(second, 1)
    with admission.queue(ALONE) as third:
        admission.add_prompt(third, 100)


def of_tenant(tenant: str, weight: int = 1) -> Identity:
    return Identity(f"key-of-{tenant}", frozenset((Role.CLIENT,)), tenant, TenantLimits(weight=weight))


def test_a_tenant_has_its_share_of_a_queue_that_another_has_filled():
    admission = Admission(8, 100)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(admission.queue(of_tenant("a")))
        with pytest.raises(ResourceExhausted, match=r"8 requests wait already, the limit is 8$"):
            stack.enter_context(admission.queue(of_tenant("a")))
        for _ in range(6):
            stack.enter_context(admission.queue(of_tenant("b", weight=3)))
        share = r"14 requests wait already, the limit is 8 \(the account 'b' has 6, its share is 6\)"
        with pytest.raises(ResourceExhausted, match=share):
            stack.enter_context(admission.queue(of_tenant("b", weight=3)))
        with pytest.raises(ResourceExhausted, match="the account 'a' has 8, its share is 2"):
            stack.enter_context(admission.queue(of_tenant("a")))
    assert admission.num_queued == 0


def test_a_tenant_has_its_share_of_the_prompt_tokens_too():
    admission = Admission(10, 100)
    with admission.queue(of_tenant("a")) as first, admission.queue(of_tenant("b")) as second:
        admission.add_prompt(first, 150)
        with pytest.raises(ResourceExhausted, match="the account 'b' has 0, its share is 50"):
            admission.add_prompt(second, 51)
        admission.add_prompt(second, 50)


async def refusal(call) -> tuple[grpc.StatusCode, str, str]:
    """The status a call is refused with, its words and its details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    return caught.value.code(), caught.value.details() or "", details_of(caught.value)


async def test_a_full_queue_refuses_before_it_looks_at_the_request():
    # Each of these is wrong, or costs a lot, and is refused for neither.
    expensive = "organization " * 100_000
    async with serving_one(max_queued_requests=2) as (engine, client, _):
        waiting = [client.generate(), client.generate()]
        requests = list(await engine.wait_for_requests(2))
        for call in (client.generate(""), client.generate(model="gpt-9"), client.generate(expensive)):
            code, words, details = await refusal(call)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2 requests wait already, the limit is 2" in words
            assert "QUEUE_FULL" in details and "RetryInfo" in details
        for call in waiting:
            call.cancel()
        await engine.wait(lambda: all(request.abort_reason is not None for request in requests))
        # What was refused has left nothing behind: both places are free.
        engine.script = answer("y")
        assert (await read_all(client.generate()))[1] == "y"


async def test_too_many_prompt_tokens_are_refused_until_a_first_token_came():
    engine = FakeEngine()
    num_waiting = MAX_MODEL_LEN - 100
    async with serving(engine, max_queued_prompt_tokens=num_waiting + 50) as (client, frontend):
        first = client.generate([5] * num_waiting)
        (request,) = await engine.wait_for_requests(1)
        code, words, details = await refusal(client.generate([5] * 51))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{num_waiting} prompt tokens wait already, 51 more exceed" in words
        assert "QUEUE_FULL" in details and "RetryInfo" in details
        assert (len(engine.requests), frontend.requests.admission.num_queued) == (1, 1)
        engine.script = answer("y")
        assert (await read_all(client.generate([5] * 50)))[1] == "y"
        engine.step({request: [5]})
        await first.read()
        assert (await read_all(client.generate([5] * 51)))[1] == "y"
        first.cancel()
        await engine.wait(lambda: request.abort_reason is not None)


async def test_text_counts_by_its_tokens():
    text = "the cat sat on the mat"
    num_tokens = len(TOKENIZER.encode(text).ids)
    async with serving_one(max_queued_prompt_tokens=num_tokens + 1) as (engine, client, _):
        first = client.generate([5])
        await engine.wait_for_requests(1)
        second = client.generate(text)
        requests = list(await engine.wait_for_requests(2))
        code, words, _ = await refusal(client.generate([5]))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{num_tokens + 1} prompt tokens wait already" in words
        for call in (first, second):
            call.cancel()
        await engine.wait(lambda: all(request.abort_reason is not None for request in requests))
