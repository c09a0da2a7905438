"""Streams of one account over gRPC, and a process that keeps many of them open.

Answers `{"keep": N}` when it has begun to keep N streams open, each replaced by another at its end; any line
has the counters so far as its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Self

import uvloop

from triptych_kit.process.setup import prepare_process

prepare_process("client")

import grpc.aio  # noqa: E402  Its import reads what the line above has set.

from benchmarks.rig.lines import Line, answer_lines, send_line  # noqa: E402
from benchmarks.rig.streams import FIRST_MARKER_ID, FIRST_PLAIN_ID  # noqa: E402
from triptych.api.v1 import generate_pb2, inference_pb2_grpc  # noqa: E402
from triptych.common.v1 import sampling_pb2  # noqa: E402

PROMPT_TOKENS = 32
_LIMIT_S = 600.0
_NUM_CHANNELS = 8
_AGAIN_S = 0.2  # after a refusal


@dataclass(slots=True)
class Stream:
    """Instants of the tokens of a stream, in seconds after it was sent."""

    first_s: float
    gaps_s: list[float]


class Account:
    """Sends with the key of an account, on channels that are opened once."""

    def __init__(self, address: str, key: str, *, num_channels: int = 1, seed: int = 0) -> None:
        self._channels = [
            grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            for _ in range(num_channels)
        ]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._rng = random.Random(seed)
        self.num_tokens = 0
        self.num_begun = 0  # streams that the server has answered

    async def stream(self, num_tokens: int) -> Stream:
        """Read a stream of `num_tokens` to its end. Raises AioRpcError."""
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(
                ids=self._rng.choices(range(FIRST_PLAIN_ID, FIRST_MARKER_ID), k=PROMPT_TOKENS)
            ),
            sampling=sampling_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        stub = self._rng.choice(self._stubs)
        sent_at = time.perf_counter()
        arrivals_s: list[float] = []
        call = stub.Generate(request, timeout=_LIMIT_S, metadata=self._metadata)
        await call.initial_metadata()
        self.num_begun += 1
        async for response in call:
            if num_new := len(response.delta.token_ids):
                arrivals_s.append(time.perf_counter() - sent_at)
                self.num_tokens += num_new
        return Stream(arrivals_s[0], [after - before for before, after in pairwise(arrivals_s)])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for channel in self._channels:
            await channel.close(None)


@dataclass(slots=True)
class Counters:
    """num_begun: streams answered since the number to keep was set."""

    num_tokens: int = 0
    num_begun: int = 0
    num_ended: int = 0
    refused: list[str] = field(default_factory=list)


class Keeper:
    def __init__(self, account: Account, num_tokens: int) -> None:
        self._account, self._num_tokens = account, num_tokens
        self._counters = Counters()
        self._tasks: list[asyncio.Task[None]] = []

    async def answer(self, line: Line) -> Line:
        if "keep" in line:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._account.num_begun = 0
            self._tasks = [asyncio.ensure_future(self._repeat()) for _ in range(line["keep"])]
        self._counters.num_tokens = self._account.num_tokens
        self._counters.num_begun = self._account.num_begun
        return asdict(self._counters)

    async def _repeat(self) -> None:
        while True:
            try:
                await self._account.stream(self._num_tokens)
                self._counters.num_ended += 1
            except grpc.aio.AioRpcError as error:
                self._counters.refused = [*self._counters.refused, f"{error.code().name}: {error.details()}"][
                    -3:
                ]
                await asyncio.sleep(_AGAIN_S)


async def _serve(options: argparse.Namespace) -> None:
    account = Account(options.address, options.key, num_channels=_NUM_CHANNELS, seed=options.seed)
    send_line({})
    await answer_lines(Keeper(account, options.tokens).answer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
