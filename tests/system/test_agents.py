"""Jobs of several turns on a real engine: cached contexts, the same tokens, no pins left, and a replay."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.acceptance.scenarios.jobs import WAYS, serve, shortfalls
from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import Answer, collect, random_prompt, request_of
from tests.system.stack import Stack, listeners_of
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.api.v1 import inference_pb2_grpc
from triptych_kit.channel import open_channel

BLOCK_SIZE = 16
NUM_JOBS = 24
NUM_TURNS = 6
MAX_TOKENS = 8
ENGINE_FLAGS = (
    # Half of what the jobs' contexts take in the end.
    "--num-kv-blocks=120",
    f"--block-size={BLOCK_SIZE}",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=96",
    "--max-model-len=448",
    "--steps-in-flight=2",
)
JOBS_FLAGS = ("--scheduling-policy=continuum", "--pin-ttl-rule=fixed")


async def run_job(
    stub: inference_pb2_grpc.InferenceServiceStub, job_id: str, seed: int
) -> list[tuple[list[int], Answer]]:
    """The prompt and the answer of each turn."""
    rng = random.Random(seed)
    context = random_prompt(rng, 40, VOCAB_SIZE)
    turns = []
    for number in range(NUM_TURNS):
        request = request_of(context, MAX_TOKENS)
        request.job_id, request.is_last_step = job_id, number == NUM_TURNS - 1
        answer = await collect(stub, request)
        turns.append((context, answer))
        context = context + answer.token_ids + random_prompt(rng, 14, VOCAB_SIZE)
    return turns


async def test_jobs_have_the_tokens_of_another_policy_and_leave_nothing(llama: str, tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    async with Stack() as stack:
        trio = await stack.start_all(llama, *ENGINE_FLAGS, *JOBS_FLAGS, f"--sched-trace-path={path}")
        stub, view = stack.inference(trio.frontend), stack.engine(trio.engine)
        lone = await run_job(stub, "lone", 99)
        jobs = await asyncio.gather(*(run_job(stub, f"job-{number}", number) for number in range(NUM_JOBS)))
        await view.until(lambda stats: stats.num_pinned_blocks == stats.num_used_blocks == 0)
        # A pin that nothing follows is listed, and released.
        request = request_of(jobs[0][0][0], MAX_TOKENS)
        request.job_id = "left"
        async with open_channel(listeners_of(trio.engine)[1], profile="internal") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            await collect(stub, request)
            listed = await admin.ListPins(admin_pb2.ListPinsRequest(), timeout=10)
            released = await admin.Release(admin_pb2.ReleaseRequest(job_id="left"), timeout=10)
        await view.until(lambda stats: stats.num_used_blocks == 0)
        trio.engine.terminate()
        await trio.engine.wait()
        fcfs = stack.inference((await stack.start_all(llama, *ENGINE_FLAGS)).frontend)
        plain = [
            await asyncio.gather(*(collect(fcfs, request_of(prompt, MAX_TOKENS)) for prompt, _ in turns))
            for turns in jobs
        ]
    for turns, answers in zip(jobs, plain, strict=True):
        assert [answer.token_ids for _, answer in turns] == [answer.token_ids for answer in answers]
    # A turn finds its context to the last full block: all but the token sampled last was computed.
    for (before, answer), (_, following) in pairwise(lone):
        num_computed = len(before) + len(answer.token_ids) - 1
        assert following.num_cached_tokens == num_computed // BLOCK_SIZE * BLOCK_SIZE
    assert [(pin.job_id, pin.num_blocks) for pin in listed.pins] == [("left", 2)]
    assert released.num_blocks == 2
    assert b'"retention"' in path.read_bytes()
    program = (sys.executable, "-m", "triptych_cli.cli", "replay", str(path))
    replay = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True)
    assert (replay.returncode, replay.stdout.rpartition(": ")[2]) == (0, "the same decisions\n")


@pytest.mark.chaos
async def test_jobs_of_divided_engines_with_drafts_and_grammars_have_their_tokens_where_one_is_killed(
    tmp_path: Path,
) -> None:
    assert shortfalls([await serve(WAYS["all together"], 8, 4, tmp_path)]) == []
