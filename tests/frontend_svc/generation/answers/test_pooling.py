"""Answers of pooling models, apart from the engines that compute them."""

from __future__ import annotations

import asyncio
import struct
from typing import cast

import pytest

from frontend_svc.api.calls import caller_of
from frontend_svc.generation.answers.pooling import PoolingAnswers
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.pooling import PooledPrompts, Pooling, PoolingWork
from frontend_svc.output.pooling_state import Pooled
from frontend_svc.text.model import ServedModel
from tests.frontend_svc.options.asking import model_of
from triptych.api.v1 import embedding_pb2
from triptych.common.v1 import tensor_pb2

NUM_DOCUMENTS = 512


class FixedPooling:
    """Has one vector for every prompt of a query and its documents."""

    def model(self, name: str) -> ServedModel:
        return model_of(supported_tasks=("embed",))

    async def run(self, work: PoolingWork, caller: Caller) -> PooledPrompts:
        vector = tensor_pb2.Tensor(
            dtype=tensor_pb2.D_TYPE_FP32, shape=[2], inline=struct.pack("<2f", 0.6, 0.8)
        )
        return PooledPrompts("1", [Pooled(vector, 0)] * (1 + NUM_DOCUMENTS), 0)


async def test_other_requests_run_while_vectors_of_many_documents_are_compared():
    text = embedding_pb2.PoolingInput(prompt="a")
    request = embedding_pb2.ScoreRequest(queries=[text], documents=[text] * NUM_DOCUMENTS)
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    response = await PoolingAnswers(cast(Pooling, FixedPooling())).score(request, caller_of(None))
    counting.cancel()
    assert list(response.scores) == pytest.approx([1.0] * NUM_DOCUMENTS)
    assert num_turns >= NUM_DOCUMENTS // 16
