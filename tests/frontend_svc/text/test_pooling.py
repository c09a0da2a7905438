"""Results of pooling as numbers, whatever type an engine gives them in."""

from __future__ import annotations

import struct

import pytest

from frontend_svc.text.pooling import check_result, read_floats
from service_kit.errors import Internal
from triptych.common.v1 import tensor_pb2

VALUES = [0.5, -2.0, 1.5, 0.0]


@pytest.mark.parametrize(
    ("dtype", "content"),
    [
        (tensor_pb2.D_TYPE_FP32, struct.pack("<4f", *VALUES)),
        (tensor_pb2.D_TYPE_FP16, struct.pack("<4e", *VALUES)),
        (tensor_pb2.D_TYPE_BF16, b"".join(struct.pack("<f", value)[2:] for value in VALUES)),
    ],
    ids=["fp32", "fp16", "bf16"],
)
def test_the_numbers_of_every_float_type_are_read(dtype, content):
    tensor = tensor_pb2.Tensor(dtype=dtype, shape=[2, 2], inline=content)
    check_result(tensor, 2)
    assert list(read_floats(tensor)) == VALUES


@pytest.mark.parametrize(
    "tensor",
    [
        tensor_pb2.Tensor(),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[2], inline=b"0000"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1, 1], inline=b"0000"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT32, shape=[1], inline=b"0000"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1], blob={"sha256": "0"}),
    ],
    ids=["nothing", "cut short", "two dimensions", "integers", "elsewhere"],
)
def test_a_result_that_is_not_whole_or_of_another_form_is_refused(tensor):
    with pytest.raises(Internal, match="the engine gave a result of shape"):
        check_result(tensor, 1)
