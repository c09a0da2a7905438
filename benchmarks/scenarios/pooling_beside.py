"""Embeddings beside streams on one engine: what the streams feel of them, and that their ids do not change.

    python -m benchmarks pooling_beside --model M1 --json benchmarks/results/pooling_beside.json

An engine that generates and embeds (`--runner generate --convert embed`) and a frontend, over gRPC. In turns,
streams of the same prompts run alone, and beside one request for the vectors of many prompts, sent when all
streams have begun. Promised: every stream has the ids that it has alone, and the 99th percentile of the gaps
between its messages is higher by at most the time of one chunk, a step with as many tokens as one may have.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from benchmarks.report import Report, Row, percentile, print_table
from benchmarks.rig.processes import Fleet, ServicePlan
from triptych.api.v1 import embedding_pb2, embedding_pb2_grpc, generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_kit.channel import open_channel

_LIMIT_S = 600.0
_PROMPT_TOKENS = 32
# Of a prompt that is embedded.
_LENGTHS = (16, 256)
_IDS = range(10, 1000)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder of a decoder")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--embeddings", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    parser.add_argument("--chunk", type=int, default=2048, help="--max-num-batched-tokens of the engine")
    parser.add_argument("--turns", type=int, default=5)


def run(options: argparse.Namespace) -> Report:
    row = asyncio.run(_measure(options))
    print_table([row])
    shortfalls = []
    if row["changed_streams"]:
        shortfalls.append(f"{row['changed_streams']} streams have other ids beside embeddings")
    if float(str(row["added_p99_ms"])) > float(str(row["chunk_ms"])):
        shortfalls.append(f"the p99 gap is {row['added_p99_ms']} ms more, a chunk takes {row['chunk_ms']} ms")
    settings = {"model": options.model.name, "turns": options.turns, "chunk": options.chunk}
    return Report("pooling_beside", settings, [row], shortfalls)


async def _measure(options: argparse.Namespace) -> Row:
    flags = (
        str(options.model), "--num-threads=1", "--runner=generate", "--convert=embed",
        f"--max-num-batched-tokens={options.chunk}", "--no-enable-prefix-caching",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(Path(folder)) as fleet:
            engine = fleet.add(ServicePlan("engine", 0, flags))
            limits = ("--text-workers=1", f"--engine={engine.address}")
            frontend = fleet.add(ServicePlan("frontend", 0, limits))
            await fleet.start()
            await fleet.until_routed()
            async with open_channel(frontend.address, profile="public") as channel:
                return await _Client(channel, options).measure()


@dataclass(slots=True)
class _Streams:
    """What streams of one turn received: their ids, and when messages with tokens came."""

    ids: list[list[int]]
    instants: list[list[float]]
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Gaps that ended within a time, or that held all of it."""
        return [
            1000 * (later - earlier)
            for instants in self.instants
            for earlier, later in itertools.pairwise(instants)
            if later >= begin and earlier <= end
        ]


class _Client:
    def __init__(self, channel: grpc.aio.Channel, options: argparse.Namespace) -> None:
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self._options = options

    async def measure(self) -> Row:
        await self._turn(embeds=True)  # warms up
        quiet: list[float] = []
        loaded: list[float] = []
        took_s: list[float] = []
        chunks_ms: list[float] = []
        first: list[list[int]] | None = None
        num_changed = 0
        for turn in range(self._options.turns):
            chunks_ms.append(await self._chunk_ms(turn))
            for embeds in (False, True):
                streams, begin, end = await self._turn(embeds=embeds)
                first = first or streams.ids
                num_changed += sum(one != other for one, other in zip(first, streams.ids, strict=True))
                p99 = percentile(streams.gaps_ms(begin, end), 99)
                (loaded if embeds else quiet).append(p99)
                if embeds:
                    took_s.append(end - begin)
        return {
            "streams": self._options.streams,
            "embeddings": self._options.embeddings,
            "changed_streams": num_changed,
            "embeddings_s": statistics.median(took_s),
            "quiet_p99_ms": statistics.median(quiet),
            "beside_p99_ms": statistics.median(loaded),
            "added_p99_ms": statistics.median(more - less for more, less in zip(loaded, quiet, strict=True)),
            "chunk_ms": statistics.median(chunks_ms),
        }

    async def _turn(self, *, embeds: bool) -> tuple[_Streams, float, float]:
        """The streams of a turn, and when the measured part of it began and ended."""
        num_streams = self._options.streams
        streams = _Streams([[] for _ in range(num_streams)], [[] for _ in range(num_streams)])
        tasks = [asyncio.create_task(self._stream(index, streams)) for index in range(num_streams)]
        await streams.begun.wait()
        begin = time.perf_counter()
        if embeds:
            await self._embedding.Embed(self._embed_request(), timeout=_LIMIT_S)
        end = time.perf_counter() if embeds else float("inf")
        await asyncio.gather(*tasks)
        return streams, begin, end

    async def _stream(self, index: int, streams: _Streams) -> None:
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=_drawn(index, _PROMPT_TOKENS)),
            sampling=sampling_pb2.SamplingParams(
                max_tokens=self._options.tokens, ignore_eos=True, temperature=0.0
            ),
        )
        async for response in self._inference.Generate(request, timeout=_LIMIT_S):
            if response.delta.token_ids:
                streams.ids[index].extend(response.delta.token_ids)
                streams.instants[index].append(time.perf_counter())
                if all(streams.instants):
                    streams.begun.set()

    async def _chunk_ms(self, seed: int) -> float:
        """The time of the vector of one prompt of a chunk's length on an engine that does nothing else."""
        request = embedding_pb2.EmbedRequest(inputs=[_input(_drawn(-1 - seed, self._options.chunk))])
        began_at = time.perf_counter()
        await self._embedding.Embed(request, timeout=_LIMIT_S)
        return 1000 * (time.perf_counter() - began_at)

    def _embed_request(self) -> embedding_pb2.EmbedRequest:
        choose = random.Random(0)
        lengths = [choose.randint(*_LENGTHS) for _ in range(self._options.embeddings)]
        return embedding_pb2.EmbedRequest(
            inputs=[_input(_drawn(1000 + index, length)) for index, length in enumerate(lengths)]
        )


def _drawn(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(_IDS, k=count)


def _input(token_ids: Sequence[int]) -> embedding_pb2.PoolingInput:
    return embedding_pb2.PoolingInput(token_ids=generate_pb2.TokenIds(ids=token_ids))
