"""Scores by vectors of a query that the engine keeps under a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.core.request import FinishReason
from engine_svc.features.pooling import runner
from engine_svc.features.pooling.runner import late_score
from tests.engine_svc.features.adapters.folders import MLP_AND_ATTENTION, write_adapter, write_model
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


def test_a_score_takes_blocks_of_a_long_input() -> None:
    draw = torch.Generator().manual_seed(3)
    query, vectors = torch.randn(2000, 8, generator=draw), torch.randn(2500, 8, generator=draw)
    expected = (query @ vectors.t()).amax(1).sum()[None]
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor))
            return result

    with Sizes():
        score = late_score(query, vectors)
    torch.testing.assert_close(score, expected, atol=1e-2, rtol=0)
    assert max(sizes) == 2000 * 1024


def test_a_key_is_of_one_adapter_and_of_vectors_normalized_alike(tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path / "model")
    adapter = write_adapter(tmp_path / "a", model, seed=1, rank=4, modules=MLP_AND_ATTENTION)
    with engine(model, runner="pooling", enable_lora=True, lora_modules=(f"a={adapter}",)) as rig:
        send(rig, PROMPTS[0], "a", task=TOKEN_EMBED, late_interaction_key="k", normalize=False)
        read(rig)
        scores = {
            (name, normalize): send(
                rig, PROMPTS[1], name, task=SCORE, late_interaction_key="k", normalize=normalize
            )
            for name in ("", "a")
            for normalize in (False, True)
        }
        read(rig)
        codes = {which: rig.frontend.end_of[handle].code for which, handle in scores.items()}
    assert codes.pop(("a", False)) == ""
    assert set(codes.values()) == {"NOT_FOUND"}


def test_the_query_that_was_kept_first_is_forgotten_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3", tmp_path)
    with engine(tmp_path, runner="pooling") as rig:
        vectors = keep_vectors(rig)
        first = send(rig, PROMPTS[0], task=TOKEN_EMBED, late_interaction_key="q0")
        read(rig)
        monkeypatch.setattr(runner, "MAX_QUERY_BYTES", 2 * vectors[first].nbytes)
        send(rig, PROMPTS[0], task=TOKEN_EMBED, late_interaction_key="q1")
        read(rig)
        # Scores read a key in each rank at another time.
        send(rig, PROMPTS[1], task=SCORE, late_interaction_key="q0")
        read(rig)
        send(rig, PROMPTS[0], task=TOKEN_EMBED, late_interaction_key="q2")
        read(rig)
        scores = [send(rig, PROMPTS[1], task=SCORE, late_interaction_key=key) for key in ("q0", "q1", "q2")]
        read(rig)
        reasons = [rig.frontend.end_of[handle].reason for handle in scores]
    assert reasons == [FinishReason.ERROR, FinishReason.STOP, FinishReason.STOP]


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
