"""Requests for adapters over gRPC, and a process that sends many of them.

Answers `{"adapters": [...], "open": N}` when each has been answered: when the first token of each came, by
the clock of `time.perf_counter`, or null after an error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Self

from triptych_kit.process.setup import prepare_process

prepare_process("client")

import grpc.aio  # noqa: E402  Its import reads what the line above has set.

from benchmarks.rig.lines import Line, answer_lines, send_line  # noqa: E402
from triptych.api.v1 import generate_pb2, inference_pb2_grpc  # noqa: E402
from triptych.common.v1 import sampling_pb2  # noqa: E402
from triptych_kit.channel import open_channel  # noqa: E402

_PROMPT_TOKENS = 32
_TOKENS = 16
_LIMIT_S = 600.0


class AdapterClient:
    """One connection to a frontend."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, profile="public")
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self.first_error = ""

    async def __aenter__(self) -> Self:
        # What is sent before there is a connection goes out in any order.
        await self._channel.channel_ready()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close(None)

    async def first_token(self, adapter: str, seed: int) -> float | None:
        """When the first token of a whole answer came; None after an error."""
        first = None
        try:
            async for _ in self.tokens(adapter, _TOKENS, seed):
                first = first or time.perf_counter()
        except grpc.aio.AioRpcError as error:
            self.first_error = self.first_error or f"{error.code().name}: {error.details()}"
            return None
        return first

    async def tokens(self, adapter: str, num_tokens: int, seed: int) -> AsyncIterator[int]:
        """How many come with each message. adapter: "" for the plain model."""
        draw = random.Random(seed)
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=draw.choices(range(10, 1000), k=_PROMPT_TOKENS)),
            sampling=sampling_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0),
            adapter=adapter,
        )
        async for response in self._stub.Generate(request, timeout=_LIMIT_S):
            if num_new := len(response.delta.token_ids):
                yield num_new


async def _serve(address: str) -> None:
    async with AdapterClient(address) as client:

        async def answer(line: Line) -> Line:
            slots = asyncio.Semaphore(line["open"])

            async def ask(name: str, seed: int) -> float | None:
                async with slots:
                    return await client.first_token(name, seed)

            names = enumerate(line["adapters"])
            firsts = await asyncio.gather(*(ask(name, index) for index, name in names))
            return {"firsts": firsts, "first_error": client.first_error}

        send_line({})
        await answer_lines(answer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    asyncio.run(_serve(parser.parse_args().address))
