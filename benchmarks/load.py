"""Streams of Generate at a chosen concurrency, and when their tokens came. Knows no server process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """When one stream was sent and when its tokens came, in seconds of one clock."""

    sent_at: float
    token_times: tuple[float, ...]  # one for each token; tokens of one message share a time

    @property
    def first_token_s(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Times between a token and the one before it."""
        return [
            later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)
        ]


class WrongLength(Exception):
    """A stream ended with another number of tokens than it was asked for."""


async def run_streams(
    channel: grpc.aio.Channel, prompts: Sequence[Sequence[int]], num_new_tokens: int
) -> list[StreamTimes]:
    """Send all prompts at once and read every stream to its end; greedy, the end token ignored."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return await asyncio.gather(*(_run_stream(stub, prompt, num_new_tokens) for prompt in prompts))


async def _run_stream(
    stub: inference_pb2_grpc.InferenceServiceStub, prompt: Sequence[int], num_new_tokens: int
) -> StreamTimes:
    request = generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True),
    )
    sent_at = time.perf_counter()
    token_times: list[float] = []
    async for response in stub.Generate(request):
        token_times += [time.perf_counter()] * len(response.delta.token_ids)
    if len(token_times) != num_new_tokens:
        raise WrongLength(f"a stream ended after {len(token_times)} tokens, {num_new_tokens} were asked for")
    return StreamTimes(sent_at, tuple(token_times))


def tokens_per_second(streams: Sequence[StreamTimes]) -> float:
    """Tokens of all streams over the time from the first request to the last token."""
    began = min(stream.sent_at for stream in streams)
    ended = max(stream.token_times[-1] for stream in streams)
    return sum(len(stream.token_times) for stream in streams) / (ended - began)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of the values do not exceed, between neighbours linearly."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
