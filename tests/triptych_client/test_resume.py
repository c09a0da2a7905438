"""Streams whose connection breaks, against a real frontend behind a proxy that cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.fakes import AT_LENGTH, EOS_ID, TOKENIZER, WAIT_S, FakeEngine, serving
from tests.triptych_client.cutting_proxy import CuttingProxy, cutting_proxy
from triptych.engine.v1 import engine_pb2
from triptych_client.aio import Client
from triptych_client.client import Client as BlockingClient
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Event, Finished, Started
from triptych_client.retry import Attempts, RetryPolicy
from triptych_kit.clock import FakeClock

GRACE_MS = 5000
TEXT = "the cat sat on the mat 日本 😀."
IDS = [*TOKENIZER.encode(TEXT).ids, EOS_ID]


@asynccontextmanager
async def behind_proxy(engine: FakeEngine) -> AsyncIterator[tuple[Frontend, CuttingProxy, Client]]:
    """A frontend, the proxy before it, and a client that knows the proxy alone."""
    async with serving(engine) as (_, frontend):
        with cutting_proxy(frontend.address) as proxy:
            async with Client(proxy.address) as client:
                yield frontend, proxy, client


def all_ids(events: list[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]


def check_whole(events: list[Event]) -> None:
    """One start, one end, and every token and letter once."""
    assert isinstance(events[0], Started)
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[-1], Finished)
    assert all_ids(events) == IDS[: len(all_ids(events))]
    assert "".join(event.text for event in events if isinstance(event, Delta)) == TEXT


async def test_a_stream_that_is_cut_again_and_again_loses_and_repeats_nothing() -> None:
    engine = FakeEngine()
    async with behind_proxy(engine) as (_, proxy, client):
        stream = client.generate("the cat", orphan_grace_ms=GRACE_MS)
        (request,) = await engine.wait_for_requests(1)
        events: list[Event] = []
        for index, token_id in enumerate(IDS):
            is_last = index == len(IDS) - 1
            engine.step({request: [token_id]}, finished={request: AT_LENGTH} if is_last else None)
            while len(all_ids(events)) <= index:
                events.append(await asyncio.wait_for(anext(stream), WAIT_S))
            if index % 4 == 0:
                await asyncio.to_thread(proxy.cut)
        events += [event async for event in stream]
    check_whole(events)
    assert all_ids(events) == IDS
    assert proxy.num_connections > 2
    assert len(engine.requests) == 1
    assert request.abort_reason is None


async def test_what_was_sampled_while_the_line_was_cut_is_there_afterwards() -> None:
    engine = FakeEngine()
    async with behind_proxy(engine) as (frontend, proxy, client):
        stream = client.generate("the cat", orphan_grace_ms=GRACE_MS)
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: IDS[:1]})
        events: list[Event] = [await anext(stream), await anext(stream)]
        reader = asyncio.create_task(_rest(stream))
        await asyncio.to_thread(proxy.cut, refuses=True)
        for token_id in IDS[1:-1]:
            engine.step({request: [token_id]})
        engine.step({request: IDS[-1:]}, finished={request: AT_LENGTH})
        async with asyncio.timeout(WAIT_S):
            # The frontend has no event for it, either: the request has ended and its log is kept.
            while frontend.requests.draining.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await asyncio.to_thread(proxy.heal)
        events += await reader
    check_whole(events)
    assert all_ids(events) == IDS


async def test_the_blocking_client_resumes_as_well() -> None:
    engine = FakeEngine()
    async with serving(engine) as (_, frontend):
        with cutting_proxy(frontend.address) as proxy, BlockingClient(proxy.address) as client:
            stream = client.generate("the cat", orphan_grace_ms=GRACE_MS)
            (request,) = await engine.wait_for_requests(1)
            events: list[Event] = []
            for index, token_id in enumerate(IDS):
                is_last = index == len(IDS) - 1
                engine.step({request: [token_id]}, finished={request: AT_LENGTH} if is_last else None)
                while len(all_ids(events)) <= index:
                    events.append(await asyncio.wait_for(asyncio.to_thread(next, stream), WAIT_S))
                if index == 2:
                    await asyncio.to_thread(proxy.cut)
            events += await asyncio.to_thread(list, stream)
    check_whole(events)
    assert proxy.num_connections == 2


async def test_a_stream_that_the_frontend_forgot_ends_with_what_broke_it() -> None:
    engine = FakeEngine()
    async with behind_proxy(engine) as (frontend, proxy, client):
        stream = client.generate("the cat", orphan_grace_ms=GRACE_MS)
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: IDS[:1]})
        await anext(stream)
        await asyncio.to_thread(proxy.cut, refuses=True)
        await frontend.requests.resumable.close()
        await asyncio.to_thread(proxy.heal)
        with pytest.raises(TriptychError) as caught:
            await _rest(stream)
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    assert isinstance(caught.value.__cause__, TriptychError)
    assert caught.value.__cause__.status is grpc.StatusCode.NOT_FOUND


async def test_without_a_grace_a_cut_ends_the_stream_and_the_request() -> None:
    engine = FakeEngine()
    async with behind_proxy(engine) as (_, proxy, client):
        stream = client.generate("the cat")
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: IDS[:1]})
        await anext(stream)
        await asyncio.to_thread(proxy.cut)
        with pytest.raises(TriptychError) as caught:
            await _rest(stream)
        await engine.wait(lambda: request.abort_reason is not None)
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    assert len(engine.requests) == 1


async def test_a_cut_before_the_first_message_is_another_attempt() -> None:
    engine = FakeEngine()
    async with behind_proxy(engine) as (_, proxy, client):
        stream = client.generate("the cat", request_id="mine")
        reader = asyncio.create_task(anext(stream))
        (lost,) = await engine.wait_for_requests(1)
        await asyncio.to_thread(proxy.cut)
        _, request = await engine.wait_for_requests(2)
        engine.step({request: IDS[:1]}, finished={request: AT_LENGTH})
        assert isinstance(await reader, Started)
        assert all_ids(await _rest(stream)) == IDS[:1]
        await engine.wait(lambda: lost.abort_reason is not None)


@pytest.mark.parametrize("close", [True, False])
async def test_a_resumable_stream_that_is_left_is_aborted_and_not_kept(close: bool) -> None:
    engine = FakeEngine()
    async with behind_proxy(engine) as (frontend, _, client):
        stream = client.generate("the cat", orphan_grace_ms=GRACE_MS)
        (request,) = await engine.wait_for_requests(1)
        engine.step({request: IDS[:1]})
        async with stream:
            await anext(stream)
            if close:
                await stream.aclose()
        await engine.wait(lambda: request.abort_reason is not None)
        assert frontend.requests.draining.num_open == 0
    assert request.abort_reason == engine_pb2.ABORT_REASON_CLIENT


async def _rest(stream: AsyncIterator[Event]) -> list[Event]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in stream]


# When a call is made again: by status, by count, by the server's word and within the deadline.

POLICY = RetryPolicy(max_attempts=4, first_backoff_s=0.1, max_backoff_s=0.3, max_retry_after_s=5.0)


def failure(status: grpc.StatusCode, retry_after_ms: int | None = None) -> TriptychError:
    return TriptychError(status, "no", retry_after_ms=retry_after_ms)


UNAVAILABLE = failure(grpc.StatusCode.UNAVAILABLE)
EXHAUSTED, EXISTS = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_only_what_may_pass_is_tried_again(status: grpc.StatusCode) -> None:
    assert POLICY.is_retried(failure(status), 1) == (status is grpc.StatusCode.UNAVAILABLE)
    assert POLICY.is_retried(failure(status, 10), 1) == (
        status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    )


@pytest.mark.parametrize(
    ("message", "is_retried"),
    [
        ("CANCELLED", True),
        ("Received RST_STREAM with error code 8", True),
        ("Locally cancelled by application!", False),
        ("Channel closed!", False),
    ],
)
def test_what_a_server_that_stops_has_not_looked_at_is_tried_again(message: str, is_retried: bool) -> None:
    error = TriptychError(grpc.StatusCode.CANCELLED, message)
    assert POLICY.is_retried(error, 1) == is_retried
    cancelled = TriptychError(grpc.StatusCode.CANCELLED, message, reason="CANCELLED")
    assert not POLICY.is_retried(cancelled, 1)


def test_the_own_id_of_an_earlier_attempt_is_waited_out() -> None:
    assert not POLICY.is_retried(failure(EXISTS), 1)
    assert POLICY.is_retried(failure(EXISTS), 2)


def test_the_wait_doubles_to_its_limit_and_chance_halves_it() -> None:
    assert [POLICY.backoff_s(number, 1.0) for number in (1, 2, 3, 4, 10_000)] == [0.1, 0.2, 0.3, 0.3, 0.3]
    assert POLICY.backoff_s(2, 0.0) == 0.1


def test_attempts_end_with_the_last_error() -> None:
    attempts = Attempts(POLICY, None, draw=lambda: 1.0)
    assert [attempts.next_after_s(UNAVAILABLE) for _ in range(3)] == [0.1, 0.2, 0.3]
    with pytest.raises(TriptychError) as caught:
        attempts.next_after_s(UNAVAILABLE)
    assert caught.value is UNAVAILABLE


def test_the_server_is_never_asked_earlier_than_it_said() -> None:
    attempts = Attempts(POLICY, None, draw=lambda: 0.0)
    assert attempts.next_after_s(failure(EXHAUSTED, 4000)) == 4.05
    with pytest.raises(TriptychError):
        attempts.next_after_s(failure(EXHAUSTED, 5001))


def test_no_wait_reaches_the_deadline() -> None:
    clock = FakeClock()
    attempts = Attempts(POLICY, 1.0, now=clock.now, draw=lambda: 1.0)
    clock.advance(0.85)
    assert attempts.next_after_s(UNAVAILABLE) == 0.1
    assert attempts.remaining_s(0.1) == pytest.approx(0.05)
    clock.advance(0.1)
    with pytest.raises(TriptychError):
        attempts.next_after_s(UNAVAILABLE)
    clock.advance(0.1)
    assert attempts.remaining_s() == 0.0
