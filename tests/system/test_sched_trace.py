"""A live engine under load writes a trace, and a scheduler that replays it decides the same."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import collect, random_prompt, request_of
from tests.system.stack import Stack
from triptych.api.v1 import inference_pb2_grpc

NUM_STREAMS = 16
NUM_CANCELS = 8
MAX_TOKENS = 64
# So little that a third of the streams fit at once, and long prompts need several steps.
ENGINE_FLAGS = (
    "--num-kv-blocks=48",
    "--block-size=16",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=96",
    "--max-model-len=448",
    "--steps-in-flight=2",
)


async def test_the_trace_of_a_live_engine_replays(llama: str, tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    rng = random.Random(11)
    head = random_prompt(rng, 48, VOCAB_SIZE)
    prompts = [head + random_prompt(rng, rng.choice((3, 17, 60)), VOCAB_SIZE) for _ in range(NUM_STREAMS)]
    doomed = [random_prompt(rng, rng.choice((20, 200)), VOCAB_SIZE) for _ in range(NUM_CANCELS)]
    async with Stack() as stack:
        trio = await stack.start_all(llama, *ENGINE_FLAGS, f"--sched-trace-path={path}")
        stub = stack.inference(trio.frontend)
        cancelled = asyncio.gather(*(_begin_and_cancel(stub, prompt) for prompt in doomed))
        answers = await asyncio.gather(*(collect(stub, request_of(prompt, MAX_TOKENS)) for prompt in prompts))
        await cancelled
        await stack.engine(trio.engine).until_idle()
        trio.engine.terminate()
        await trio.engine.wait()
    program = (sys.executable, "-m", "triptych_cli.cli", "replay", str(path))
    replay = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True)
    assert (replay.returncode, replay.stdout.rpartition(": ")[2]) == (0, "the same decisions\n")
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    tokens = _tokens_by_prompt(records)
    assert [tokens[tuple(prompt)] for prompt in prompts] == [answer.token_ids for answer in answers]
    # All of these happened.
    decisions = [record for record in records if record["kind"] == "step_decision"]
    assert any(decision["preempted_req_ids"] for decision in decisions)
    assert any(decision["scheduled_resumed_req_ids"] for decision in decisions)
    assert any(record.get("local_hit_tokens") for record in records)
    events = _events(records)
    assert any(event["op"] == "abort" for event in events)
    num_in_flight = [
        record["step"] - event["for_step"]
        for record in records
        for event in record.get("events", ())
        if event["op"] == "update"
    ]
    assert max(num_in_flight) >= 2
    print(replay.stdout)


async def _begin_and_cancel(stub: inference_pb2_grpc.InferenceServiceStub, prompt: list[int]) -> None:
    """Go away after the first tokens, in the middle of a request."""
    call = stub.Generate(request_of(prompt, 240))
    for _ in range(3):
        await call.read()
    call.cancel()


def _tokens_by_prompt(records: list[dict[str, Any]]) -> dict[tuple[int, ...], list[int]]:
    """What was sampled for each prompt. Clients do not know the ids under which an engine runs them."""
    prompts: dict[str, tuple[int, ...]] = {}
    tokens: dict[str, list[int]] = {}
    for event in _events(records):
        if event["op"] == "add":
            prompts[event["request"]["id"]] = tuple(event["request"]["prompt"])
            tokens[event["request"]["id"]] = []
        for request_id, sampled in event.get("sampled", {}).items():
            tokens[request_id] += sampled
    return {prompt: tokens[request_id][:MAX_TOKENS] for request_id, prompt in prompts.items()}


def _events(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for record in records for event in record.get("events", ())]
