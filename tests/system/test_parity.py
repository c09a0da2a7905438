"""Three processes on a real checkpoint produce what transformers' own generate returns."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from benchmarks.rig.quantized_folder import awq, write_dequantized, write_quantized
from tests.system.checkpoints import VOCAB_SIZE, Reference
from tests.system.generation import Answer, collect, random_prompt, request_of
from tests.system.stack import Stack, listeners_of
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.api.v1 import tokenize_pb2, tokenizer_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import utility_pb2
from triptych_cli.services import embedded_model
from triptych_client.prompt_embeds import prompt_embeds

NUM_REQUESTS = 16
MAX_TOKENS = 40
# Small enough that 16 requests do not fit at once and long prompts need several steps.
ENGINE_FLAGS = (
    "--num-kv-blocks=72",
    "--block-size=16",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=96",
    "--max-model-len=448",
)
_PAUSE = admin_pb2.UtilityRequest(call={"pause": {"mode": utility_pb2.PAUSE_MODE_KEEP}})
_RESUME = admin_pb2.UtilityRequest(call={"resume": {}})


# By the native decoder, and by transformers' model.
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
async def test_concurrent_requests_equal_transformers_generate(architecture, checkpoints):
    await _check_concurrent_requests(checkpoints[architecture], checkpoints[architecture])


async def test_quantized_weights_over_two_ranks_equal_transformers_on_their_numbers(checkpoints, tmp_path):
    folder = write_quantized(checkpoints["llama"], tmp_path / "quantized", awq(group_size=32))
    full = write_dequantized(folder, tmp_path / "full")
    await _check_concurrent_requests(folder, full, "--tensor-parallel-size=2", "--activations=exact")


async def _check_concurrent_requests(folder, reference, *flags):
    prompts = _prompts_with_shared_heads()
    async with Stack() as stack:
        trio = await stack.start_all(str(folder), *ENGINE_FLAGS, *flags)
        stub, engine = stack.inference(trio.frontend), stack.engine(trio.engine)
        async with grpc.aio.insecure_channel(listeners_of(trio.engine)[1]) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            # All wait in their order before the first is admitted: preemptions do not depend on arrivals.
            await admin.Utility(_PAUSE, timeout=10)
            streams = []
            for num_waiting, prompt in enumerate(prompts, start=1):
                streams.append(asyncio.create_task(collect(stub, request_of(prompt, MAX_TOKENS))))
                await engine.until(lambda stats, wanted=num_waiting: stats.num_waiting == wanted)
            await admin.Utility(_RESUME, timeout=10)
            answers = await asyncio.gather(*streams)
        stats = await engine.until_idle()
    _check_streams(reference, prompts, answers)
    assert stats.num_chunked_prefills > 0
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits > 0
    assert stats.max_rows >= 8
    assert stats.num_used_blocks == 0
    print(f"{folder.name}: {stats}")


def _prompts_with_shared_heads() -> list[list[int]]:
    rng = random.Random(7)
    head = random_prompt(rng, 48, VOCAB_SIZE)
    prompts = []
    for index in range(NUM_REQUESTS):
        own = random_prompt(rng, rng.choice((3, 17, 40, 90, 250)), VOCAB_SIZE)
        prompts.append(head + own if index % 3 == 0 else own)
    return prompts


def _check_streams(folder: Path, prompts: list[list[int]], answers: list[Answer]) -> None:
    reference = Reference(folder)
    differences = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = reference.generate(prompt, MAX_TOKENS)
        assert answer.num_finished == 1
        if answer.token_ids != expected.token_ids:
            print(f"request {index} leaves transformers' stream; least margin {min(expected.margins):.3g}")
        difference = expected.first_real_difference(answer.token_ids)
        if difference is not None:
            differences.append(f"request {index}: {difference}")
    assert not differences
    assert sum(len(set(answer.token_ids)) >= 16 for answer in answers) >= NUM_REQUESTS - 2


# The model that ships with the package answers through three processes what transformers alone answers.

ANSWER_TOKENS = 200
QUESTIONS = (
    "Tell me a story about a fox and a lantern.",
    "The box is blue. What colour is the box?",
    "Hello",
)


async def test_greedy_answers_equal_transformers_on_the_packaged_weights() -> None:
    folder = embedded_model()
    prompts = [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS] + ["Once upon a time"]
    reference = Reference(folder)
    async with Stack() as stack:
        trio = await stack.start_all(str(folder), "--num-threads=1")
        stub = stack.inference(trio.frontend)
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(stack.channel(trio.frontend))
        for prompt in prompts:
            ids = (await tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text=prompt), timeout=10)).token_ids
            answer = await collect(stub, request_of(list(ids), ANSWER_TOKENS, ignore_eos=False))
            expected = reference.generate(list(ids), ANSWER_TOKENS, stop_at_eos=True)
            assert expected.first_real_difference(answer.token_ids) is None, prompt
            assert answer.reason == output_pb2.FINISH_REASON_STOP, prompt
            assert answer.text.strip(), prompt
        request = request_of([1], 1)
        request.embeds.CopyFrom(prompt_embeds(bytes(1024), [1, 256], "float32"))
        with pytest.raises(grpc.aio.AioRpcError, match="embeds") as caught:
            await collect(stub, request)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
