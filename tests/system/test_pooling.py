"""Results from hidden states where an engine is killed, and where a model is divided over ranks."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.rig.processes import Fleet, ServicePlan
from engine_svc.build.runner import build_runner
from engine_svc.features.pooling.extras import PooledResult, PoolingRequest
from tests.engine_svc.features.pooling.rig import to_tensor
from tests.engine_svc.model.encoders import MAX_LENGTH, VOCAB_SIZE, save_encoder
from tests.frontend_svc.tokenizers import word_piece_tokenizer
from tests.system.ranks import VOCAB_SIZE as VOCAB_SIZE_OF_RANKS
from tests.system.ranks import Driver, config_of, greedy, make_checkpoint, ranks_of
from triptych.api.v1 import embedding_pb2, embedding_pb2_grpc, generate_pb2
from triptych_kit.channel import open_channel

pytestmark = pytest.mark.chaos

LIMIT_S = 60.0
NUM_PROMPTS = 64
RERANKER = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}


def embed_request() -> embedding_pb2.EmbedRequest:
    draw = random.Random(3)
    drawn = [draw.choices(range(5, VOCAB_SIZE), k=draw.randint(1, MAX_LENGTH)) for _ in range(NUM_PROMPTS)]
    return embedding_pb2.EmbedRequest(
        inputs=[embedding_pb2.PoolingInput(token_ids=generate_pb2.TokenIds(ids=ids)) for ids in drawn]
    )


def vectors_of(answer: embedding_pb2.EmbedResponse) -> list[tuple[float, ...]]:
    return [struct.unpack(f"<{tensor.shape[0]}f", tensor.inline) for tensor in answer.embeddings]


async def test_a_killed_engine_leaves_its_prompts_to_another_whose_vectors_are_the_same(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    save_encoder(folder, "bert")
    word_piece_tokenizer().save(str(folder / "tokenizer.json"))
    async with Fleet(tmp_path) as fleet:
        engines = [
            fleet.add(ServicePlan("engine", index, (str(folder), "--num-threads=1"))) for index in range(2)
        ]
        known = tuple(f"--engine={engine.address}" for engine in engines)
        frontend = fleet.add(ServicePlan("frontend", 0, ("--text-workers=1", *known)))
        await fleet.start()
        await fleet.until_routed()
        async with open_channel(frontend.address, profile="public") as channel:
            stub = embedding_pb2_grpc.EmbeddingServiceStub(channel)
            undisturbed = await stub.Embed(embed_request(), timeout=LIMIT_S)
            # An engine that stands still has its prompts for certain when it is killed.
            engines[0].send(signal.SIGSTOP)
            embedding = asyncio.ensure_future(stub.Embed(embed_request(), timeout=LIMIT_S))
            key = f"engine.{engines[0].address}.num_in_flight"
            async with asyncio.timeout(LIMIT_S):
                # Another process has no event to wait for.
                while not (await frontend.status())[key]:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            engines[0].send(signal.SIGKILL)
            disturbed = await embedding
            assert int((await frontend.status())["num_moved_requests"]) > 0
    vectors = torch.tensor(vectors_of(disturbed))
    torch.testing.assert_close(vectors, torch.tensor(vectors_of(undisturbed)), atol=1e-5, rtol=0)


def results_of(driver: Driver, task: str) -> dict[str, Tensor]:
    draw = random.Random(5)
    for index in range(12):
        prompt = draw.choices(range(VOCAB_SIZE_OF_RANKS), k=draw.randint(3, 120))
        driver.add_prompt(f"pooled-{index}", prompt, greedy(1), PoolingRequest(task), samples=False)
    driver.run()
    assert driver.errors == {}
    return {
        name: to_tensor(extra)
        for name, extras in driver.extras.items()
        for extra in extras
        if isinstance(extra, PooledResult)
    }


@pytest.mark.parametrize(
    ("family", "task", "options"),
    [
        ("gemma3", "embed", {"runner": "pooling"}),
        ("qwen2", "score", {"hf_overrides": json.dumps(RERANKER)}),
    ],
    ids=["gemma3-vectors", "qwen2-scores"],
)
def test_ranks_pool_as_one_process_does(
    tmp_path: Path, family: str, task: str, options: dict[str, object]
) -> None:
    folder = make_checkpoint(family, tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 7, "yes": 9}}}))
    side = build_runner(config_of(folder, **options), lambda phase, done, total: None)
    alone = results_of(Driver(side), task)
    side.executor.shutdown()
    with ranks_of(config_of(folder, tensor_parallel_size=2, **options)) as ranked:
        divided = results_of(Driver(ranked.side), task)
    assert len(divided) == 12
    for name, result in divided.items():
        torch.testing.assert_close(result, alone[name], atol=1e-5, rtol=0)
