"""Jobs of several turns, on a cache of half their size: their tokens are those of plain requests.

    python -m tests.acceptance jobs --json benchmarks/results/jobs.json

A coordinator, engines with the embedded model and a frontend, for each way to serve. All jobs begin at once,
every other one with seeds; tools take some milliseconds. The blocks of the engines hold half of what the
contexts have at the end. Then each prompt is sent again, without a job, drafts and the prefix cache, and one
more job runs alone. Promised: a turn has the tokens of its prompt in all ways that compute alike: by policy,
with two steps in flight, with drafts, and where an engine is killed. Each use of a pin is a turn that finds
its context to the last full block, and so is each turn of the job alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import random
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Report, Row
from benchmarks.rig import faults
from benchmarks.rig.processes import ServiceProcess
from benchmarks.rig.streams import FIRST_MARKER_ID, FIRST_PLAIN_ID
from tests.chaos.stacks import Stack, StackPlan
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_kit.http.admin_http import read_page

_BLOCK_SIZE = 16
_NUM_PROMPT_TOKENS, _NUM_TOOL_TOKENS, _NUM_ANSWER_TOKENS = 96, 32, 16
_MEAN_TOOL_S = 0.02
# Of a request, of which hundreds are sent at once: also on a machine that does other work.
_LIMIT_S = 900.0
_GRAMMAR = "(red|green|blue|black)( (red|green|blue|black)){80}"
_FLAGS = (f"--block-size={_BLOCK_SIZE}", "--max-num-seqs=16", "--max-num-batched-tokens=128")
_FCFS = ("--scheduling-policy=fcfs", "--steps-in-flight=1")
_CONTINUUM = ("--scheduling-policy=continuum", "--steps-in-flight=1")
_DRAFTS = ("--speculative=suffix", "--draft-limit=none")
_COUNTED = {
    "used_pins": re.compile(r'^triptych_engine_pins_total\{.*outcome="used".*\} (\S+)$', re.MULTILINE),
    "accepted_drafts": re.compile(r"^triptych_engine_accepted_draft_tokens_total\{.*\} (\S+)$", re.MULTILINE),
    "preemptions": re.compile(r"^triptych_engine_preemptions_total\{.*\} (\S+)$", re.MULTILINE),
}


@dataclass(frozen=True, slots=True)
class Way:
    """How jobs are served. Those with the same model and grammar have the same answers."""

    name: str
    flags: tuple[str, ...]
    has_grammar: bool = False
    tensor_parallel_size: int = 1
    num_engines: int = 1  # the first of several is killed

    @property
    def computes(self) -> tuple[bool, int]:
        return self.has_grammar, self.tensor_parallel_size


WAYS = {
    way.name: way
    for way in (
        Way("fcfs", _FCFS),
        Way("continuum", _CONTINUUM),
        Way("two steps in flight", (*_CONTINUUM, "--steps-in-flight=2")),
        Way("drafts", (*_CONTINUUM, *_DRAFTS)),
        Way("kill -9", _CONTINUUM, num_engines=2),
        Way("fcfs, grammar", _FCFS, has_grammar=True),
        Way("grammar", _CONTINUUM, has_grammar=True),
        Way("fcfs, tensor parallelism 2", _FCFS, tensor_parallel_size=2),
        Way("tensor parallelism 2", _CONTINUUM, tensor_parallel_size=2),
        Way(
            "all together",
            (*_CONTINUUM, "--steps-in-flight=2", *_DRAFTS),
            has_grammar=True,
            tensor_parallel_size=2,
            num_engines=2,
        ),
    )
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6, help="of each job")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
            rows.append(asyncio.run(serve(WAYS[name], options.jobs, options.turns, Path(folder))))
        print(rows[-1], file=sys.stderr, flush=True)
    settings = {"jobs": options.jobs, "turns": options.turns, "block_size": _BLOCK_SIZE}
    return Report("jobs", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """Promises that were not kept, in words."""
    broken = []
    digests: dict[tuple[bool, int], Row] = {}
    for row in rows:
        way = WAYS[str(row["way"])]
        first = digests.setdefault(way.computes, row)
        if row["digest"] != first["digest"]:
            broken.append(f"{way.name}: tokens differ from those of {first['way']}")
        if row["differing"]:
            broken.append(f"{way.name}: {row['differing']} turns differ from plain requests")
        if int(str(row["warm"])) < int(str(row["used_pins"])):
            broken.append(f"{way.name}: {row['used_pins']} pins were used by {row['warm']} turns")
        if row["alone_cold"]:
            broken.append(f"{way.name}: {row['alone_cold']} turns of the job alone miss blocks")
        needed = {
            "used_pins": "continuum" in " ".join(way.flags),
            "accepted_drafts": any("--speculative" in flag for flag in way.flags),
            "moved": way.num_engines > 1,
        }
        broken += [f"{way.name}: {name} is 0" for name in needed if needed[name] and not row[name]]
    return broken


@dataclass(frozen=True, slots=True)
class _Turn:
    request: generate_pb2.GenerateRequest
    token_ids: Sequence[int]
    num_cached_tokens: int
    is_warm: bool  # its context was cached to the last full block


@dataclass(slots=True)
class _Progress:
    """Turns that have ended, and an event for the first of `until`."""

    until: int
    count: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        self.count += 1
        if self.count == self.until:
            self.reached.set()


async def serve(way: Way, num_jobs: int, num_turns: int, folder: Path) -> Row:
    """Jobs on a stack of their own, the same prompts as plain requests, and a job alone."""
    async with _started(way, num_jobs, num_turns, folder) as stack:
        stub = inference_pb2_grpc.InferenceServiceStub(stack.channel())
        progress = _Progress(num_jobs * num_turns // 3)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_run_job(stub, way, f"job-{seed}", seed, num_turns, progress))
                for seed in range(num_jobs)
            ]
            if way.num_engines > 1:
                await progress.reached.wait()
                await faults.kill(stack.engines[0])
        turns = [turn for job in running for turn in job.result()]
        # Counters of the engine that was killed ended with it.
        counts = await _counts(stack.engines)
        moved = (await stack.frontends[0].status())["num_moved_requests"]
        if way.num_engines > 1:
            await stack.mend()
        plain = await asyncio.gather(*(_answer(stub, _plain(turn.request)) for turn in turns))
        alone = await _run_job(stub, way, "alone", num_jobs, num_turns, progress)
    answers = [list(turn.token_ids) for turn in turns]
    num_prompt_tokens = sum(len(turn.request.token_ids.ids) for turn in turns)
    return {
        "way": way.name,
        "turns": len(turns),
        "differing": sum(ids != again for ids, (again, _) in zip(answers, plain, strict=True)),
        "digest": hashlib.sha256(repr(answers).encode()).hexdigest()[:16],
        "cached_share": round(sum(turn.num_cached_tokens for turn in turns) / num_prompt_tokens, 3),
        "warm": sum(turn.is_warm for turn in turns),
        **counts,
        "moved": int(moved),
        "alone_cold": sum(not turn.is_warm for turn in alone[1:]),
    }


async def _run_job(
    stub: inference_pb2_grpc.InferenceServiceStub,
    way: Way,
    job_id: str,
    seed: int,
    num_turns: int,
    progress: _Progress,
) -> list[_Turn]:
    rng = random.Random(seed)
    context = _tokens(rng, _NUM_PROMPT_TOKENS)
    num_computed = 0
    turns = []
    for number in range(num_turns):
        request = generate_pb2.GenerateRequest(
            token_ids=generate_pb2.TokenIds(ids=context),
            sampling=_sampling(way, seed, number),
            job_id=job_id,
            is_last_step=number == num_turns - 1,
        )
        token_ids, num_cached = await _answer(stub, request)
        is_warm = number > 0 and num_cached >= num_computed // _BLOCK_SIZE * _BLOCK_SIZE
        turns.append(_Turn(request, token_ids, num_cached, is_warm))
        progress.note()
        # The token sampled last is not computed.
        num_computed = len(context) + len(token_ids) - 1
        context = [*context, *token_ids, *_tokens(rng, _NUM_TOOL_TOKENS)]
        await asyncio.sleep(rng.expovariate(1 / _MEAN_TOOL_S))
    return turns


def _sampling(way: Way, seed: int, number: int) -> sampling_pb2.SamplingParams:
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=_NUM_ANSWER_TOKENS, ignore_eos=True)
    if seed % 2:
        sampling.temperature, sampling.seed = 0.8, 1000 * seed + number
    if way.has_grammar:
        sampling.structured_output.regex = _GRAMMAR
    return sampling


def _plain(request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateRequest:
    """The same prompt without a job, of which nothing is cached and nothing is proposed."""
    plain = generate_pb2.GenerateRequest()
    plain.CopyFrom(request)
    plain.ClearField("job_id")
    plain.ClearField("is_last_step")
    plain.sampling.skip_reading_prefix_cache = True
    plain.sampling.max_draft_tokens = 0
    return plain


async def _answer(
    stub: inference_pb2_grpc.InferenceServiceStub, request: generate_pb2.GenerateRequest
) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt were cached."""
    token_ids: list[int] = []
    num_cached = 0
    async for event in stub.Generate(request, timeout=_LIMIT_S):
        match event.WhichOneof("event"):
            case "started":
                num_cached = event.started.num_cached_tokens
            case "delta":
                token_ids += event.delta.token_ids
    return token_ids, num_cached


async def _counts(engines: Sequence[ServiceProcess]) -> Mapping[str, int]:
    """Of the engines that run."""
    pages = [
        (await read_page(engine.admin_http, "/metrics", limit_s=_LIMIT_S)).decode()
        for engine in engines
        if engine.is_running
    ]
    return {
        name: sum(int(float(number)) for page in pages for number in pattern.findall(page))
        for name, pattern in _COUNTED.items()
    }


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(count)]


@contextlib.asynccontextmanager
async def _started(way: Way, num_jobs: int, num_turns: int, folder: Path) -> AsyncIterator[Stack]:
    num_tokens = _NUM_PROMPT_TOKENS + num_turns * _NUM_ANSWER_TOKENS + (num_turns - 1) * _NUM_TOOL_TOKENS
    num_blocks = 1 + num_jobs * num_tokens // _BLOCK_SIZE // 2 // way.num_engines
    plan = StackPlan(
        tensor_parallel_size=way.tensor_parallel_size,
        engine_flags=(*_FLAGS, f"--num-kv-blocks={num_blocks}", *way.flags),
        num_engines=way.num_engines,
    )
    stack = Stack(plan, folder)
    try:
        await stack.start()
        yield stack
    finally:
        await stack.stop()
