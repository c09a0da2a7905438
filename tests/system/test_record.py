"""What a live engine decides under load is written down, and a scheduler that replays it decides the same."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from tests.conformance.replay import first_difference, read_case
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
)


async def test_the_decisions_of_a_live_engine_replay(llama: str, tmp_path: Path) -> None:
    path = tmp_path / "live.json.gz"
    rng = random.Random(11)
    head = random_prompt(rng, 48, VOCAB_SIZE)
    prompts = [head + random_prompt(rng, rng.choice((3, 17, 60)), VOCAB_SIZE) for _ in range(NUM_STREAMS)]
    doomed = [random_prompt(rng, rng.choice((20, 200)), VOCAB_SIZE) for _ in range(NUM_CANCELS)]
    async with Stack() as stack:
        trio = await stack.start_all(llama, *ENGINE_FLAGS, f"--record-decisions={path}")
        stub = stack.inference(trio.frontend)
        cancelled = asyncio.gather(*(_begin_and_cancel(stub, prompt) for prompt in doomed))
        answers = await asyncio.gather(*(collect(stub, request_of(prompt, MAX_TOKENS)) for prompt in prompts))
        await cancelled
        await stack.engine(trio.engine).until_idle()
        trio.engine.terminate()
        await trio.engine.wait()
    case = read_case(path)
    assert case["ended"] == "the engine ended"
    assert first_difference(case) is None
    assert min(len(set(answer.token_ids)) for answer in answers) >= 20
    tokens = _tokens_by_prompt(case)
    assert [tokens[tuple(prompt)] for prompt in prompts] == [answer.token_ids for answer in answers]
    coverage = case["coverage"]
    num_freed = sum(len(update["expected"]["freed"]) for update in _updates(case))
    num_aborted = coverage["abort_running"] + coverage["abort_waiting"]
    assert coverage["requests"] == NUM_STREAMS + NUM_CANCELS == num_freed + num_aborted
    # Commands came while a step ran, too.
    counters = ("preemptions", "resumes", "hit_requests", "abort_running", "outputs_dropped", "pause_all")
    assert min(coverage[name] for name in counters) > 0
    print(coverage)


async def _begin_and_cancel(stub: inference_pb2_grpc.InferenceServiceStub, prompt: list[int]) -> None:
    """Go away after the first tokens, in the middle of a request."""
    call = stub.Generate(request_of(prompt, 240))
    for _ in range(3):
        await call.read()
    call.cancel()


def _tokens_by_prompt(case: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """What was recorded for each prompt. Clients do not know the ids under which an engine runs them."""
    events = [event for step in case["steps"] for event in step["events"]]
    added = [event["request"] for event in events if event["op"] == "add"]
    tokens: dict[str, list[int]] = {request["id"]: [] for request in added}
    for output in (output for update in _updates(case) for output in update["expected"]["outputs"]):
        tokens[output["id"]] += output["tokens"]
    return {tuple(request["prompt"]): tokens[request["id"]] for request in added}


def _updates(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [update for step in case["steps"] for update in step["updates"]]
