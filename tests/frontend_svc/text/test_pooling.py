"""Results of pooling as numbers, whatever type an engine gives them in."""

from __future__ import annotations

import struct

import pytest
from tokenizers import processors

from frontend_svc.text.pooling import check_result, read_floats, truncated, truncated_pair
from frontend_svc.text.tokenize.tokenizer import PairTemplate
from tests.frontend_svc.tokenizers import EOS, byte_level_tokenizer, id_of, word_piece_tokenizer
from triptych.common.v1 import tensor_pb2
from triptych_kit.errors import Internal

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


@pytest.mark.parametrize(
    ("num_kept", "expected"),
    [(None, [1, 2, 3, 4, 9]), (5, [1, 2, 3, 4, 9]), (4, [1, 2, 3, 9]), (2, [1, 9]), (1, [1])],
)
def test_a_cut_text_keeps_its_special_token_at_the_end(num_kept, expected):
    assert truncated([1, 2, 3, 4, 9], num_kept, num_special_behind=1) == expected


@pytest.mark.parametrize(
    ("num_kept", "expected"),
    [(None, ([1, 2], [3, 4, 5])), (4, ([1, 2], [3, 4])), (2, ([1, 2], [])), (1, ([1], []))],
)
def test_of_a_cut_pair_the_second_text_goes_first(num_kept, expected):
    assert truncated_pair([1, 2], [3, 4, 5], num_kept) == expected


# Two texts as one prompt, as a tokenizer itself joins them.


def test_texts_that_were_tokenized_apart_are_joined_as_the_tokenizer_does_it():
    tokenizer = word_piece_tokenizer()
    unknown, end = id_of(tokenizer, "[UNK]"), id_of(tokenizer, EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A [UNK]",
        pair=f"{EOS} $A [UNK] [UNK] $B {EOS}",
        special_tokens=[(EOS, end), ("[UNK]", unknown)],
    )
    first = tokenizer.encode("the cat sat", add_special_tokens=False).ids
    second = tokenizer.encode("on the mat and", add_special_tokens=False).ids
    joined = PairTemplate(tokenizer).join(first, second)
    assert joined == tokenizer.encode("the cat sat", "on the mat and").ids
    assert (joined[0], joined[-1], joined.count(unknown)) == (end, end, 2)


def test_the_second_text_begins_where_the_tokenizer_gives_its_tokens_another_type():
    tokenizer = word_piece_tokenizer()
    end = id_of(tokenizer, EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A {EOS}",
        pair=f"{EOS}:0 $A:0 {EOS}:0 $B:1 {EOS}:1",
        special_tokens=[(EOS, end)],
    )
    first = tokenizer.encode("the cat sat", add_special_tokens=False).ids
    start = PairTemplate(tokenizer).second_start(first)
    assert start == tokenizer.encode("the cat sat", "on the mat").type_ids.index(1)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A {EOS}", pair=f"{EOS}:0 $A:0 {EOS}:0 $B:0 {EOS}:0", special_tokens=[(EOS, end)]
    )
    assert PairTemplate(tokenizer).second_start(first) is None


def test_a_tokenizer_without_a_form_for_pairs_puts_one_text_behind_the_other():
    assert PairTemplate(byte_level_tokenizer()).join([1, 2], [3]) == [1, 2, 3]
