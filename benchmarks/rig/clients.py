"""Clients of a frontend in a process of their own: streams that never end, and long prompts beside them.

Each line of the input is answered with a line of counters as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import uvloop

from triptych_kit.process.setup import prepare_process

prepare_process("client")

import grpc.aio  # noqa: E402  Its import reads what the line above has set.

from benchmarks.rig.lines import send_line  # noqa: E402
from benchmarks.rig.synthetic_engine import FIRST_PLAIN_ID, VOCAB_SIZE  # noqa: E402
from triptych.api.v1 import (  # noqa: E402
    chat_message_pb2,
    chat_pb2_grpc,
    generate_pb2,
    inference_pb2_grpc,
)
from triptych.common.v1 import sampling_pb2  # noqa: E402

_PROMPT_TOKENS = 32
_CHAT_LOGPROBS = 5
_WORDS = ("the", "river", "stone", "bridge", "walks", "quietly", "over", "seven", "old", "mountains", "again")


@dataclass
class Counters:
    num_tokens: int = 0
    num_messages: int = 0
    num_begun: int = 0
    num_prompts_done: int = 0
    failures: list[str] = field(default_factory=list)
    prompt_times_s: list[float] = field(default_factory=list)


async def _read(call: grpc.aio.UnaryStreamCall, counters: Counters) -> None:
    begun = False
    try:
        async for response in call:
            num_tokens = len(response.delta.token_ids)
            counters.num_messages += 1
            counters.num_tokens += num_tokens
            if num_tokens and not begun:
                begun = True
                counters.num_begun += 1
        counters.failures.append("a stream ended")
    except grpc.aio.AioRpcError as error:
        counters.failures.append(f"{error.code().name}: {error.details()}")


async def _send_prompts(channel: grpc.aio.Channel, arguments: argparse.Namespace, counters: Counters) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    rng = random.Random(11)
    prompts = [_long_text(rng, arguments.prompt_chars) for _ in range(arguments.prompts)]
    began_at = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for index, prompt in enumerate(prompts):
            due_at = began_at + index * arguments.prompt_seconds / len(prompts)
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            tasks.create_task(_send_prompt(stub, prompt, arguments.prompt_kept, counters))


async def _send_prompt(
    stub: inference_pb2_grpc.InferenceServiceStub, prompt: str, num_kept: int, counters: Counters
) -> None:
    request = generate_pb2.GenerateRequest(prompt=prompt, sampling=sampling_pb2.SamplingParams(max_tokens=1))
    if num_kept:
        request.truncate_prompt_tokens = num_kept
    sent_at = time.monotonic()
    try:
        async for _ in stub.Generate(request):
            pass
        counters.num_prompts_done += 1
        counters.prompt_times_s.append(time.monotonic() - sent_at)
    except grpc.aio.AioRpcError as error:
        counters.failures.append(f"prompt: {error.code().name}: {error.details()}")


def _long_text(rng: random.Random, num_chars: int) -> str:
    words = rng.choices(_WORDS, k=num_chars // 4)
    return " ".join(f"{word}{rng.randrange(100)}" for word in words)[:num_chars]


def _streams(
    channels: Sequence[grpc.aio.Channel], arguments: argparse.Namespace
) -> list[grpc.aio.UnaryStreamCall]:
    rng = random.Random(arguments.seed)
    calls = []
    for index in range(arguments.streams):
        channel = channels[index % len(channels)]
        sampling = sampling_pb2.SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
        if index < arguments.chats:
            sampling.logprobs = _CHAT_LOGPROBS
            text = _long_text(rng, 400)
            part = chat_message_pb2.ChatPart(text=text)
            message = chat_message_pb2.ChatMessage(role=chat_message_pb2.CHAT_ROLE_USER, parts=[part])
            chat = chat_message_pb2.ChatRequest(messages=[message], sampling=sampling)
            calls.append(chat_pb2_grpc.ChatServiceStub(channel).Chat(chat))
        else:
            ids = rng.choices(range(FIRST_PLAIN_ID, VOCAB_SIZE), k=_PROMPT_TOKENS)
            request = generate_pb2.GenerateRequest(
                token_ids=generate_pb2.TokenIds(ids=ids), sampling=sampling
            )
            calls.append(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))
    return calls


def _answer_lines(counters: Counters) -> None:
    send_line({})
    for _ in sys.stdin:
        send_line(asdict(counters))


async def _run(arguments: argparse.Namespace) -> None:
    counters = Counters()
    threading.Thread(target=_answer_lines, args=(counters,), daemon=True).start()
    # Channels alike would share one connection, and one connection has one of several frontend processes.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    channels = [
        grpc.aio.insecure_channel(arguments.address, options=options) for _ in range(arguments.connections)
    ]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    async with asyncio.TaskGroup() as tasks:
        for call in _streams(channels, arguments):
            tasks.create_task(_read(call, counters))
        if arguments.prompts:
            tasks.create_task(_send_prompts(channels[0], arguments, counters))
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--chats", type=int, default=0, help="of the streams, with template and logprobs")
    parser.add_argument("--tokens", type=int, default=500_000, help="more than a measurement takes")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--prompt-chars", type=int, default=100_000)
    parser.add_argument("--prompt-kept", type=int, default=0, help="tokens that are kept of a prompt; 0: all")
    parser.add_argument("--prompt-seconds", type=float, default=0.0, help="to spread the prompts over")
    parser.add_argument("--seed", type=int, default=0)
    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
