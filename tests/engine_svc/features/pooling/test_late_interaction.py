"""Scores by vectors of a query that the engine keeps under a key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.core.request import FinishReason
from tests.engine_svc.features.adapters.test_engine import PROMPTS, Rig, engine
from tests.engine_svc.features.pooling.rig import PoolingRig
from tests.engine_svc.features.pooling.test_adapters import keep_vectors, send
from tests.engine_svc.model.checkpoints import make_checkpoint
from triptych.common.v1 import sampling_pb2

TOKEN_EMBED, SCORE = sampling_pb2.POOLING_TASK_TOKEN_EMBED, sampling_pb2.POOLING_TASK_SCORE


def read(rig: Rig) -> None:
    rig.frontend.read_until_ended(rig.num_sent)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.chaos)], ids=["alone", "tp 2"])
def test_a_score_is_the_sum_over_the_query_of_the_largest_products(tmp_path: Path, num_ranks: int) -> None:
    make_checkpoint("qwen3", tmp_path)
    prompts = {str(index): prompt for index, prompt in enumerate(PROMPTS)}
    alone = PoolingRig(tmp_path, pooling=PoolingOptions("pooling")).results(prompts, "token_embed")
    options = {"runner": "pooling", "max_num_batched_tokens": 16, "tensor_parallel_size": num_ranks}
    with engine(tmp_path, **options) as rig:
        vectors = keep_vectors(rig)
        queries = [
            send(rig, PROMPTS[index], task=TOKEN_EMBED, late_interaction_key=f"q{index}") for index in (0, 1)
        ]
        read(rig)
        scores = {
            (query, document): send(rig, PROMPTS[document], task=SCORE, late_interaction_key=f"q{query}")
            for query in (0, 1)
            for document in (1, 2, 3)
        }
        beside = send(rig, PROMPTS[2])
        read(rig)
        assert {end.reason for end in rig.frontend.end_of.values()} == {FinishReason.STOP}
        for index, handle in enumerate(queries):
            torch.testing.assert_close(vectors[handle], alone[str(index)], atol=1e-5, rtol=0)
        for (query, document), handle in scores.items():
            products = alone[str(query)] @ alone[str(document)].t()
            torch.testing.assert_close(vectors[handle], products.amax(1).sum()[None], atol=1e-4, rtol=0)
        torch.testing.assert_close(vectors[beside], alone["2"][-1], atol=1e-5, rtol=0)


def test_an_unknown_key_ends_its_request_alone_with_a_status(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with engine(tmp_path, runner="pooling") as rig:
        vectors = keep_vectors(rig)
        unknown = send(rig, PROMPTS[0], task=SCORE, late_interaction_key="none")
        other = send(rig, PROMPTS[0])
        read(rig)
        end = rig.frontend.end_of[unknown]
    assert end.reason is FinishReason.ERROR
    assert end.code == "NOT_FOUND"
    assert "late_interaction_key is 'none', under which no vectors are kept" in end.message
    assert vectors.keys() == {other}
