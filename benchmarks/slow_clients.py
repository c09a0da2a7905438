"""Many clients in a process of their own, which all read or, once each has begun, all stop reading.

Run by benchmarks/slow_readers.py. Prints `begun` when each stream has had its first message. Those that stop
stop the whole process, so that nothing takes their bytes from the network any more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal

import grpc.aio

from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

_PROMPT_TOKENS = 16
# Every so many streams asks for log probabilities, which make its messages long.
_TOLD_EVERY = 5


async def main() -> None:
    """Open the streams, tell when all have begun, then read on or stop."""
    options = _parse()
    channels = [grpc.aio.insecure_channel(options.address) for _ in range(options.channels)]
    begun: list[asyncio.Future[None]] = []
    streams = []
    for index in range(options.num):
        stub = inference_pb2_grpc.InferenceServiceStub(channels[index % options.channels])
        begun.append(asyncio.get_running_loop().create_future())
        request = new_request(index, options.vocab_size, options.tokens)
        streams.append(asyncio.ensure_future(_read(stub, request, begun[-1])))
    await asyncio.gather(*begun)
    print("begun", flush=True)
    if options.stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.gather(*streams, return_exceptions=True)


def new_request(index: int, vocab_size: int, num_tokens: int) -> generate_pb2.GenerateRequest:
    """A greedy request of a random prompt."""
    prompt = random.Random(index).choices(range(10, vocab_size), k=_PROMPT_TOKENS)
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    if index % _TOLD_EVERY == 0:
        sampling.logprobs = 5
    return generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling=sampling)


async def _read(
    stub: inference_pb2_grpc.InferenceServiceStub,
    request: generate_pb2.GenerateRequest,
    begun: asyncio.Future[None],
) -> None:
    with contextlib.suppress(grpc.RpcError):
        async for _ in stub.Generate(request):
            if not begun.done():
                begun.set_result(None)
    if not begun.done():
        begun.set_result(None)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--num", type=int, required=True)
    parser.add_argument("--channels", type=int, default=10)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--stops", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
