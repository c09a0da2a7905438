"""A prompt of embeddings from whatever holds them."""

from __future__ import annotations

import array

import pytest

from triptych.common.v1 import tensor_pb2
from triptych_client.generate_request import build_generate_request
from triptych_client.prompt_embeds import prompt_embeds

FLOATS = array.array("f", range(6))


def test_bytes_and_views_become_the_same_prompt() -> None:
    made = prompt_embeds(FLOATS.tobytes(), [3, 2], "float32")
    assert made == prompt_embeds(memoryview(FLOATS), [3, 2], "float32")
    assert (made.embeds.dtype, list(made.embeds.shape)) == (tensor_pb2.D_TYPE_FP32, [3, 2])
    assert build_generate_request(made, {}).embeds == made


def test_a_strided_view_is_read_in_the_order_of_its_indices() -> None:
    made = prompt_embeds(memoryview(FLOATS)[::-2], [3, 1], "float32")
    assert made.embeds.inline == array.array("f", [5, 3, 1]).tobytes()


def test_tokens_and_embeddings_may_be_mixed() -> None:
    made = prompt_embeds(
        bytes(20), [5, 2], "bfloat16", token_ids=[1, 2, 0, 0, 5], is_token=[True, True, False, False, True]
    )
    assert (list(made.token_ids), made.is_token) == ([1, 2, 0, 0, 5], b"\1\1\0\0\1")


def test_an_unknown_type_and_a_negative_size_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'int4', must be one of float32, float16, bfloat16"):
        prompt_embeds(b"", [1, 1], "int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        prompt_embeds(b"", [-1, 2], "float32")
