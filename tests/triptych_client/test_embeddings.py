"""Tensors of pooling models become vectors, or an error that says what they are."""

from __future__ import annotations

import struct

import pytest

from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych_client.embedding_requests import build_embed_request, build_rerank_request
from triptych_client.embeddings import read_tensor
from triptych_client.errors import TriptychError

FP32, FP16, BF16 = tensor_pb2.D_TYPE_FP32, tensor_pb2.D_TYPE_FP16, tensor_pb2.D_TYPE_BF16
NUMBERS = (1.0, -2.5, 0.0, 4.0)
BYTES = {
    FP32: struct.pack("<4f", *NUMBERS),
    FP16: struct.pack("<4e", *NUMBERS),
    BF16: b"".join(struct.pack("<f", number)[2:] for number in NUMBERS),
}


@pytest.mark.parametrize("dtype", BYTES, ids=tensor_pb2.DType.Name)
def test_numbers_are_the_same_in_every_type(dtype: tensor_pb2.DType) -> None:
    flat = tensor_pb2.Tensor(dtype=dtype, shape=[4], inline=BYTES[dtype])
    rows = tensor_pb2.Tensor(dtype=dtype, shape=[2, 2], inline=BYTES[dtype])
    assert read_tensor(flat).vectors == (NUMBERS,)
    assert read_tensor(rows).vectors == (NUMBERS[:2], NUMBERS[2:])
    assert read_tensor(rows).vector == NUMBERS[:2]


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (tensor_pb2.Tensor(dtype=FP32, shape=[3], inline=BYTES[FP32]), r"\[3\] and 4 numbers"),
        (tensor_pb2.Tensor(dtype=FP32, shape=[1, 2, 2], inline=BYTES[FP32]), r"\[1, 2, 2\]"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT64, shape=[2], inline=BYTES[FP32]), "INT64"),
        (tensor_pb2.Tensor(dtype=FP32, shape=[4]), "kept elsewhere"),
    ],
)
def test_what_is_no_vector_is_an_error(tensor: tensor_pb2.Tensor, what: str) -> None:
    with pytest.raises(TriptychError, match=what):
        read_tensor(tensor)


def test_options_of_vectors_are_those_of_pooling() -> None:
    request = build_embed_request(["a", [1, 2]], {"dimensions": 8, "per_token": True, "model": "m"})
    assert request.pooling == sampling_pb2.PoolingParams(
        task=sampling_pb2.POOLING_TASK_TOKEN_EMBED, dimensions=8
    )
    assert [entry.WhichOneof("input") for entry in request.inputs] == ["prompt", "token_ids"]
    assert request.model == "m"


def test_one_text_is_not_taken_for_its_letters() -> None:
    with pytest.raises(TypeError, match="list of texts"):
        build_rerank_request("q", "document", {})
