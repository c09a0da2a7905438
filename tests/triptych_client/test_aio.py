"""The asyncio client where it waits in ways of its own; the rest is the blocking client's source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from tests.triptych_client.fakes import REFUSED, STREAM_FOREVER, FakeFrontend, serve
from triptych_client.aio import Client
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Finished, Started, Usage


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest_asyncio.fixture
async def client(frontend: FakeFrontend) -> AsyncIterator[Client]:
    with serve(frontend) as address:
        async with Client(address) as client:
            yield client


async def cancelled_in(frontend: FakeFrontend) -> bool:
    return await asyncio.to_thread(frontend.cancelled.wait, 10)


async def test_a_stream_is_started_deltas_and_finished(client: Client) -> None:
    events = [event async for event in client.generate([5, 6], request_id="mine")]
    assert events == [
        Started("mine", "tiny", 7, 3, (5, 6)),
        Delta(1, "other", (), None),
        Finished(0, "length", None, Usage(7, 3, 2)),
    ]


async def test_leaving_the_block_cancels_the_request(client: Client, frontend: FakeFrontend) -> None:
    async with client.generate(STREAM_FOREVER) as stream:
        assert isinstance(await anext(stream), Started)
        assert isinstance(await anext(stream), Delta)
    assert await cancelled_in(frontend)
    assert [event async for event in stream] == []


async def test_closing_wakes_a_reader_without_an_error(client: Client, frontend: FakeFrontend) -> None:
    stream = client.generate(STREAM_FOREVER)
    has_text = asyncio.Event()

    async def read() -> list[str]:
        texts = []
        async for text in stream.text_deltas():
            texts.append(text)
            has_text.set()
        return texts

    reader = asyncio.create_task(read())
    await asyncio.wait_for(has_text.wait(), timeout=10)
    await stream.aclose()
    assert await asyncio.wait_for(reader, timeout=10) == ["a"]
    assert await cancelled_in(frontend)


async def test_cancelling_the_task_cancels_the_request(client: Client, frontend: FakeFrontend) -> None:
    stream = client.generate(STREAM_FOREVER)
    assert isinstance(await anext(stream), Started)
    assert isinstance(await anext(stream), Delta)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await cancelled_in(frontend)


async def test_a_refusal_keeps_its_details(client: Client) -> None:
    with pytest.raises(TriptychError, match="one field is wrong") as caught:
        await anext(client.generate(REFUSED))
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in caught.value.field_violations] == ["sampling.temperature"]
    with pytest.raises(TriptychError, match="one field is wrong"):
        await client.generate_unary(REFUSED)


async def test_the_deadline_is_an_error(client: Client, frontend: FakeFrontend) -> None:
    # The deadline is the stream's, not that of the first connection.
    await client.connect()
    with pytest.raises(TriptychError) as caught:
        async for _ in client.generate(STREAM_FOREVER, timeout_s=1.0):
            pass
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await cancelled_in(frontend)


async def test_no_server_is_not_reached() -> None:
    with serve(FakeFrontend()) as address:
        pass
    async with Client(address) as client:
        assert not await client.is_ready()
        with pytest.raises(TriptychError, match=r"was not reached within 0.2 s"):
            await client.connect(timeout_s=0.2)


async def test_everything_else(client: Client) -> None:
    await client.connect()
    assert await client.tokenize("ab", add_special_tokens=False) == [97, 98]
    assert await client.detokenize([97, 98]) == "ab"
    assert [model.name for model in await client.list_models()] == ["tiny"]
    assert (await client.server_info()).version == "1.2.3"
    assert await client.is_ready()
