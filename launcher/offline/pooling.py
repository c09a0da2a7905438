"""Requests for embeddings, classes and scores, and conversion of result tensors to lists. Knows no engine."""

from __future__ import annotations

import math
import struct

from launcher.offline.inputs import GivenPrompt
from service_kit.errors import FailedPrecondition, Unimplemented
from triptych.api.v1 import embedding_pb2, generate_pb2, model_pb2
from triptych.common.v1 import tensor_pb2

# `struct` format character and size in bytes of an element.
_ELEMENTS = {tensor_pb2.D_TYPE_FP32: ("f", 4), tensor_pb2.D_TYPE_FP16: ("e", 2)}

Values = list[float] | list[list[float]]


def check_task(model: model_pb2.Model, task: str) -> None:
    """Raise FailedPrecondition with the supported tasks if the model does not support `task`."""
    if task not in model.supported_tasks:
        supported = ", ".join(model.supported_tasks) or "none that is known here"
        raise FailedPrecondition(
            f"model {model.name!r} does not support {task}; it supports: {supported}",
            reason="TASK_NOT_SUPPORTED",
        )


def pooling_input(prompt: GivenPrompt) -> embedding_pb2.PoolingInput:
    if prompt.text is not None:
        return embedding_pb2.PoolingInput(prompt=prompt.text)
    return embedding_pb2.PoolingInput(token_ids=generate_pb2.TokenIds(ids=prompt.token_ids))


def values_of(tensor: tensor_pb2.Tensor) -> Values:
    """A vector as a list, a matrix as a list of rows. Raises Unimplemented for any other tensor."""
    if tensor.WhichOneof("payload") != "inline" or len(tensor.shape) not in (1, 2):
        raise Unimplemented("a result that is not an inline vector or matrix cannot be read")
    numbers = _numbers(tensor)
    if len(tensor.shape) == 1:
        return numbers
    width = tensor.shape[1]
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]


def _numbers(tensor: tensor_pb2.Tensor) -> list[float]:
    num_elements = math.prod(tensor.shape)
    if tensor.dtype == tensor_pb2.D_TYPE_BF16:
        # A bfloat16 is the upper half of a float32.
        content = b"".join(b"\0\0" + tensor.inline[at : at + 2] for at in range(0, len(tensor.inline), 2))
        letter, size = "f", 4
    elif tensor.dtype in _ELEMENTS:
        content = tensor.inline
        letter, size = _ELEMENTS[tensor.dtype]
    else:
        raise Unimplemented(f"a result of {tensor_pb2.DType.Name(tensor.dtype)} cannot be read")
    if len(content) != num_elements * size:
        raise Unimplemented(f"a result of {len(content)} bytes does not have the shape {list(tensor.shape)}")
    return list(struct.unpack(f"<{num_elements}{letter}", content))
