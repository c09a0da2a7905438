"""Prompts of embeddings instead of tokens. The server validates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2

_DTYPES = {
    "float32": tensor_pb2.D_TYPE_FP32,
    "float16": tensor_pb2.D_TYPE_FP16,
    "bfloat16": tensor_pb2.D_TYPE_BF16,
}
EmbedsType = Literal["float32", "float16", "bfloat16"]


def prompt_embeds(
    data: bytes | bytearray | memoryview,
    shape: Sequence[int],
    dtype: EmbedsType,
    *,
    token_ids: Sequence[int] = (),
    is_token: Sequence[bool] = (),
) -> generate_pb2.PromptEmbeds:
    """A prompt for `generate` of either client: embeddings [T, hidden], little-endian.

    data: bytes, or a view of an array; a strided one is read in index order. `is_token` marks the positions
    that use `token_ids` instead of an embedding; `token_ids` then has one entry for each position.
    Raises ValueError for an unknown type or an invalid shape.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(_DTYPES)}")
    tensor = tensor_pb2.Tensor(dtype=_DTYPES[dtype], shape=shape, inline=memoryview(data).tobytes())
    return generate_pb2.PromptEmbeds(embeds=tensor, token_ids=token_ids, is_token=bytes(map(bool, is_token)))
