"""What the load measures, and what it sends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from benchmarks.load import StreamTimes, WrongLength, percentile, run_streams, tokens_per_second
from tests.benchmarks.fakes import CountingInference
from triptych.api.v1 import inference_pb2_grpc


@asynccontextmanager
async def _connected(service: CountingInference) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_each_token_of_a_message_has_its_time():
    service = CountingInference()
    async with _connected(service) as channel:
        streams = await run_streams(channel, [[1, 2], [3, 4], [5, 6]], 5)
    assert [len(stream.token_times) for stream in streams] == [5, 5, 5]
    assert all(gap >= 0 for stream in streams for gap in stream.gaps_s)


async def test_streams_are_greedy_and_go_on_past_the_end_token():
    service = CountingInference()
    async with _connected(service) as channel:
        await run_streams(channel, [[7, 8]], 3)
    assert list(service.requests[0].token_ids.ids) == [7, 8]
    assert service.requests[0].sampling.ignore_eos
    assert service.requests[0].sampling.temperature == 0


async def test_a_stream_that_ends_early_is_an_error():
    async with _connected(CountingInference(missing=1)) as channel:
        with pytest.raises(WrongLength, match="after 2 tokens, 3"):
            await run_streams(channel, [[1]], 3)


def test_the_rate_counts_from_the_first_request_to_the_last_token():
    streams = [StreamTimes(0.0, (1.0, 2.0)), StreamTimes(0.5, (1.0, 4.0))]
    assert tokens_per_second(streams) == 1.0


def test_percentiles_lie_between_neighbours():
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
