"""What requests that hang or go to a limit cost the others: 32 healthy streams beside them, the real stack.

python -m benchmarks.bad_neighbours --json out.json

Beside the healthy streams come, one phase after the other, prompts over which the tokenizer's regular
expression hangs, chats over which the template loops, and streams whose stop lists are at their limits and
nearly match at each token. Prints the gaps between the messages of the healthy streams in each phase, and the
status and the time of each bad request. Exits with 1 where a gap has grown beyond the goal, where a healthy
stream has other tokens than undisturbed, or where a bad request ended otherwise than it must.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc.aio
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers

from benchmarks.checkpoint import CheckpointShape, make_checkpoint
from benchmarks.load import percentile
from benchmarks.report import Report, Row, print_table
from benchmarks.serving import Served, serving
from triptych.api.v1 import chat_message_pb2, chat_pb2_grpc, generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

GOAL_MS = 20.0
MIN_DISTINCT_IDS = 20
# Steps of some 20 ms, so that processes and not the machine's speed set the pace.
SHAPE = CheckpointShape()
# Each run of letters costs this expression some 17 ms: it tries every way to part it in two.
_HANGING_PATTERN = "(x+x+)+y"
_HANGING_TEXT = ("x" * 20 + " ") * 700
_LOOP_WORD = "loop"
_LOOPING_TEMPLATE = (
    "{% if messages[-1].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
_PROMPT_TOKENS = 16
_FIRST_PLAIN_ID = 16
_STOP_STRINGS, _STOP_CHARS = 16, 256
_FLAGS = ("--max-num-seqs", "128", "--num-threads", "1")
# What a bad request may take beyond the limit of its text, which waits for a worker behind others.
_CALL_LIMIT_S = 60.0


@dataclass(slots=True)
class Healthy:
    """One healthy stream: its tokens, and when its messages with tokens came."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between a message and the one before it."""
        return [1000 * (late - early) for early, late in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a bad request ended, and after how long."""

    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A kind of bad request, how each of them must end, and how to send one."""

    name: str
    status: str
    send: Callable[[grpc.aio.Channel], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one phase showed."""

    phase: str
    streams: list[Healthy]
    ended: list[Ended]

    @property
    def gaps_ms(self) -> list[float]:
        """The gaps of all healthy streams."""
        return [gap for stream in self.streams for gap in stream.gaps_ms]

    @property
    def longest_gap_after_s(self) -> float:
        """How long after the first token of the phase the longest gap began."""
        first = min(stream.times[0] for stream in self.streams)
        pairs = [pair for stream in self.streams for pair in pairwise(stream.times)]
        return max(pairs, key=lambda pair: pair[1] - pair[0])[0] - first


def make_bad_checkpoint(folder: Path) -> None:
    """Write a checkpoint whose tokenizer hangs over some texts, and whose template loops when asked to."""
    make_checkpoint(folder, SHAPE, dtype=torch.float32, seed=0)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_HANGING_PATTERN), "isolated"), tokenizer.pre_tokenizer]
    )
    tokenizer.save(str(file))
    template = folder / "chat_template.jinja"
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    given = template.read_text() if template.exists() else config["chat_template"]
    template.write_text(_LOOPING_TEMPLATE + given)


async def hang_tokenizer(channel: grpc.aio.Channel) -> None:
    """Send a prompt that takes longer to tokenize than any may."""
    request = generate_pb2.GenerateRequest(
        prompt=_HANGING_TEXT, sampling=sampling_pb2.SamplingParams(max_tokens=1)
    )
    async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=_CALL_LIMIT_S):
        pass


async def loop_template(channel: grpc.aio.Channel) -> None:
    """Send a conversation that takes longer to render than any may."""
    message = chat_message_pb2.ChatMessage(
        role=chat_message_pb2.CHAT_ROLE_USER, parts=[chat_message_pb2.ChatPart(text=_LOOP_WORD)]
    )
    request = chat_message_pb2.ChatRequest(messages=[message])
    async for _ in chat_pb2_grpc.ChatServiceStub(channel).Chat(request, timeout=_CALL_LIMIT_S):
        pass


def stop_lists(token_id: int, letter: str, num_tokens: int) -> Callable[[grpc.aio.Channel], Awaitable[None]]:
    """Streams of one letter, beside as many and as long stop strings as may be, which nearly match it."""
    sampling = sampling_pb2.SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        allowed_token_ids=[token_id],
        stop=nearly_matching_stops(letter),
    )

    async def send(channel: grpc.aio.Channel) -> None:
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=[token_id]), sampling=sampling
        )
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for _ in stub.Generate(request, timeout=_CALL_LIMIT_S):
            pass

    return send


def nearly_matching_stops(letter: str) -> list[str]:
    """Stop strings of `letter` but for one place near the middle: a search comes that far each time."""
    places = range(_STOP_CHARS // 2 - 64, _STOP_CHARS // 2 + 64, 128 // _STOP_STRINGS)
    return [letter * place + "!" + letter * (_STOP_CHARS - place - 1) for place in places]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all phases, print what they show; returns the exit code."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_bad_checkpoint(Path(folder))
        letter_id = Tokenizer.from_file(f"{folder}/tokenizer.json").token_to_id("a")
        phases = [
            Phase("tokenizer hangs", "INVALID_ARGUMENT", hang_tokenizer),
            Phase("template loops", "INVALID_ARGUMENT", loop_template),
            Phase("stop lists at their limit", "OK", stop_lists(letter_id, "a", options.tokens)),
        ]
        with serving(Path(folder), _FLAGS) as served:
            measured = asyncio.run(_run(served, phases, options))
    rows = [_row(each, measured[0]) for each in measured]
    print_table(rows)
    problems = find_problems(measured, {phase.name: phase.status for phase in phases})
    for problem in problems:
        print(problem)
    if options.json is not None:
        settings = {
            "streams": options.streams,
            "tokens": options.tokens,
            "bad": options.bad,
            "goal_ms": GOAL_MS,
        }
        Report("bad_neighbours", settings, rows).write(options.json)
    return 1 if problems else 0


def find_problems(measured: Sequence[Measured], statuses: dict[str, str]) -> list[str]:
    """What was not as it must be; the first of `measured` is undisturbed."""
    first, problems = measured[0], []
    ids = [stream.token_ids for stream in first.streams]
    least = min(len(set(each)) for each in ids)
    if least < MIN_DISTINCT_IDS:
        problems.append(
            f"a healthy stream has {least} distinct ids, at least {MIN_DISTINCT_IDS} show something"
        )
    for each in measured[1:]:
        growth_ms = percentile(each.gaps_ms, 99) - percentile(first.gaps_ms, 99)
        if growth_ms > GOAL_MS:
            problems.append(f"{each.phase}: the p99 gap grew by {growth_ms:.1f} ms, the goal is {GOAL_MS:g}")
        if [stream.token_ids for stream in each.streams] != ids:
            problems.append(f"{each.phase}: healthy streams have other tokens than undisturbed")
        wrong = {ended.status for ended in each.ended} - {statuses.get(each.phase, "OK")}
        if wrong:
            problems.append(f"{each.phase}: bad requests ended with {', '.join(sorted(wrong))}")
    return problems


def _row(measured: Measured, first: Measured) -> Row:
    gaps, before = measured.gaps_ms, first.gaps_ms
    return {
        "beside": measured.phase,
        "gap_p50_ms": round(percentile(gaps, 50), 2),
        "gap_p99_ms": round(percentile(gaps, 99), 2),
        "gap_max_ms": round(max(gaps), 2),
        "max_after_s": round(measured.longest_gap_after_s, 2),
        "p99_growth_ms": round(percentile(gaps, 99) - percentile(before, 99), 2),
        "num_changed": sum(
            one.token_ids != two.token_ids for one, two in zip(measured.streams, first.streams, strict=True)
        ),
        "distinct_ids": len({token_id for stream in measured.streams for token_id in stream.token_ids}),
        "statuses": ", ".join(
            f"{count} {status}" for status, count in Counter(each.status for each in measured.ended).items()
        ),
        "bad_s": [round(each.seconds, 2) for each in measured.ended],
    }


async def _run(served: Served, phases: Sequence[Phase], options: argparse.Namespace) -> list[Measured]:
    async with (
        grpc.aio.insecure_channel(served.grpc_address) as channel,
        _channel_of_its_own(served) as other,
    ):
        await _healthy(channel, options)
        measured = [Measured("undisturbed", await _healthy(channel, options), [])]
        for phase in phases:
            # The bad ones begin with the healthy ones, so that the whole phase is beside them.
            bad = [asyncio.ensure_future(_end_of(phase.send(other))) for _ in range(options.bad)]
            streams = await _healthy(channel, options)
            measured.append(Measured(phase.name, streams, list(await asyncio.gather(*bad))))
        measured.append(Measured("undisturbed again", await _healthy(channel, options), []))
        return measured


@asynccontextmanager
async def _channel_of_its_own(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    """A connection that the healthy streams do not share."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(served.grpc_address, options=options) as channel:
        yield channel


async def _end_of(call: Awaitable[None]) -> Ended:
    began_at = time.perf_counter()
    try:
        await call
        status = "OK"
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    return Ended(status, time.perf_counter() - began_at)


async def _healthy(channel: grpc.aio.Channel, options: argparse.Namespace) -> list[Healthy]:
    """Stream to the end what is always the same: seeded, so that the tokens are many and must be equal."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return await asyncio.gather(*(_stream(stub, index, options.tokens) for index in range(options.streams)))


async def _stream(stub: inference_pb2_grpc.InferenceServiceStub, index: int, num_tokens: int) -> Healthy:
    prompt = random.Random(index).choices(range(_FIRST_PLAIN_ID, SHAPE.vocabulary_size), k=_PROMPT_TOKENS)
    sampling = sampling_pb2.SamplingParams(
        temperature=1.0, seed=index, max_tokens=num_tokens, ignore_eos=True
    )
    request = generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds(ids=prompt), sampling=sampling)
    seen = Healthy()
    async for response in stub.Generate(request):
        if response.delta.token_ids:
            seen.token_ids += response.delta.token_ids
            seen.times.append(time.perf_counter())
    return seen


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=32, help="healthy streams")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--bad", type=int, default=8, help="bad requests a phase")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
