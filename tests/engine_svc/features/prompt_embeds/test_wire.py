"""Prompts of embeddings as ADDs bring them: what becomes of each place, and what is refused."""

from __future__ import annotations

import struct

import pytest

from engine_svc.cache.block_hash import BlockHasher
from engine_svc.convert import messages
from engine_svc.core.request import Request
from engine_svc.features.prompt_embeds.extras import PromptEmbeds
from tests.engine_svc.fakes import MAX_MODEL_LEN, VOCAB_SIZE
from tests.engine_svc.request_options import make_wire_features
from tests.engine_svc.session.service_rig import column, make_entry, make_facts, read_add
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_kit.errors import InvalidArgument, Unimplemented

HIDDEN = 3
BLOCK_SIZE = make_facts().block_size


def embeds(*rows: float, dtype: tensor_pb2.DType = tensor_pb2.D_TYPE_FP32) -> tensor_pb2.Tensor:
    """A row of `HIDDEN` equal numbers for each of `rows`."""
    inline = b"".join(struct.pack("<f", value) * HIDDEN for value in rows)
    return tensor_pb2.Tensor(dtype=dtype, shape=[len(rows), HIDDEN], inline=inline)


def entry_of(
    tensor: tensor_pb2.Tensor | None, tokens: list[int] | None = None, is_token: bytes = b""
) -> add_pb2.AddEntry:
    entry = make_entry(1)
    entry.prompt_token_ids = column(tokens or [])
    if tensor is not None:
        entry.prompt_embeds.CopyFrom(tensor)
    entry.is_token = is_token
    return entry


def to_request(entry: add_pb2.AddEntry, *, enable_prompt_embeds: bool = True) -> Request:
    return read_add(entry, enable_prompt_embeds=enable_prompt_embeds, hidden_size=HIDDEN)


def hashes_of(entry: add_pb2.AddEntry) -> list[bytes]:
    request = to_request(entry)
    BlockHasher(BLOCK_SIZE).extend(request)
    return request.block_hashes


def test_a_prompt_of_embeddings_alone_has_a_place_for_each():
    request = to_request(entry_of(embeds(1.0, 2.0, 3.0)))
    assert (request.num_prompt_tokens, request.token_ids) == (3, [0, 0, 0])
    assert request.extras[PromptEmbeds].positions == (0, 1, 2)


def test_tokens_and_embeddings_stand_where_is_token_says():
    request = to_request(entry_of(embeds(1.0, 2.0), [5, 6, 7, 8, 9], b"\1\1\0\0\1"))
    assert request.token_ids == [5, 6, 0, 0, 9]
    assert request.extras[PromptEmbeds].positions == (2, 3)
    # What a sender leaves in the ids of those places is no content.
    assert hashes_of(entry_of(embeds(1.0, 2.0), [5, 6, 7, 8], b"\1\1\0\0")) == hashes_of(
        entry_of(embeds(1.0, 2.0), [5, 6, 3, 3], b"\1\1\0\0")
    )


def test_tokens_that_went_out_before_follow_the_embeddings():
    entry = entry_of(embeds(1.0, 2.0))
    entry.output_token_ids = column([4, 5])
    request = to_request(entry)
    assert (request.num_prompt_tokens, request.token_ids) == (2, [0, 0, 4, 5])


def test_block_hashes_are_those_of_the_content_of_each_block():
    block = BLOCK_SIZE
    whole = hashes_of(entry_of(embeds(*range(3 * block))))
    assert len(set(whole)) == 3
    longer = hashes_of(entry_of(embeds(*range(3 * block), 99.0)))
    assert longer == whole
    changed = hashes_of(entry_of(embeds(*range(block), -1.0, *range(block + 1, 3 * block))))
    assert changed[0] == whole[0]
    assert changed[1] != whole[1]
    assert changed[2] != whole[2]
    assert whole[0] not in hashes_of(entry_of(None, [0] * block))


def test_a_hash_tells_where_in_its_block_an_embedding_stands_and_its_type():
    tokens = [0] * BLOCK_SIZE
    flags = [b"\0\1\1\1", b"\1\0\1\1"]
    half = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_BF16, shape=[1, HIDDEN], inline=b"\0\0" * HIDDEN)
    zero = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP16, shape=[1, HIDDEN], inline=b"\0\0" * HIDDEN)
    entries = [entry_of(embeds(1.0), tokens, flag) for flag in flags]
    entries += [entry_of(half, tokens, flags[0]), entry_of(zero, tokens, flags[0]), entry_of(None, tokens)]
    assert len({hashes_of(entry)[0] for entry in entries}) == len(entries)


def tensor_with(**fields: object) -> tensor_pb2.Tensor:
    made = embeds(1.0, 2.0)
    for name, value in fields.items():
        if name == "shape":
            made.ClearField("shape")
            made.shape.extend(value)
        else:
            setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (entry_of(tensor_with(shape=[2, HIDDEN + 1])), "prompt_embeds.shape"),
        (entry_of(tensor_with(shape=[2 * HIDDEN])), "prompt_embeds.shape"),
        (entry_of(tensor_with(shape=[1, 2, HIDDEN])), "prompt_embeds.shape"),
        (entry_of(tensor_with(shape=[0, HIDDEN], inline=b"")), "prompt_embeds.shape"),
        (entry_of(tensor_with(shape=[MAX_MODEL_LEN, HIDDEN])), "prompt_embeds.shape"),
        (entry_of(tensor_with(shape=[2**63, HIDDEN])), "prompt_embeds.shape"),
        (entry_of(tensor_with(inline=b"\x80\x04torch pickle")), "prompt_embeds"),
        (entry_of(tensor_with(dtype=tensor_pb2.D_TYPE_INT32)), "prompt_embeds.dtype"),
        (entry_of(tensor_with(inline=struct.pack("<6f", 0, 0, float("nan"), 0, 0, 0))), "prompt_embeds"),
        (entry_of(tensor_with(inline=struct.pack("<6f", 0, 0, float("inf"), 0, 0, 0))), "prompt_embeds"),
        (entry_of(embeds(1.0), [1, 2], b"\0\0"), "is_token"),
        (entry_of(embeds(1.0), [1, 2], b"\0"), "is_token"),
        (entry_of(embeds(1.0), [1, 2], b"\0\2"), "is_token"),
        (entry_of(embeds(1.0), [1, 2]), "is_token"),
        (entry_of(embeds(1.0), None, b"\1"), "is_token"),
        (entry_of(None, [1, 2], b"\1\0"), "is_token"),
        (entry_of(None, [1, 2], b"\1"), "is_token"),
        (entry_of(embeds(1.0), [1, VOCAB_SIZE], b"\0\1"), "prompt_token_ids"),
    ],
)
def test_what_is_wrong_is_refused_by_field(entry, field):
    with pytest.raises(InvalidArgument) as caught:
        to_request(entry)
    assert [name for name, _ in caught.value.violations] == [field]


@pytest.mark.parametrize("value", [3.4028e38, -7e4])
def test_what_would_not_stay_finite_in_a_narrower_type_is_refused(value):
    with pytest.raises(InvalidArgument, match="beyond 65504"):
        to_request(entry_of(embeds(1.0, value)))


def test_a_place_without_a_token_has_no_log_probability():
    entry = entry_of(embeds(1.0))
    entry.sampling.prompt_logprobs = 1
    with pytest.raises(InvalidArgument, match=r"sampling\.prompt_logprobs"):
        to_request(entry)


def test_embeddings_and_what_went_out_before_fit_the_model_together():
    entry = entry_of(embeds(*range(MAX_MODEL_LEN - 2)))
    entry.output_token_ids = column([4, 5])
    with pytest.raises(InvalidArgument):
        to_request(entry)


def test_an_engine_takes_no_embeddings_unless_enabled():
    with pytest.raises(Unimplemented, match="prompt_embeds"):
        to_request(entry_of(embeds(1.0)), enable_prompt_embeds=False)


def test_a_caller_without_tensors_sends_no_embeddings():
    features = make_wire_features(enable_prompt_embeds=True)
    with pytest.raises(Unimplemented, match="prompt_embeds"):
        messages.to_request(
            entry_of(embeds(1.0)), session_number=1, facts=make_facts(), now=0.0, features=features
        )


@pytest.mark.parametrize("is_enabled", [False, True])
def test_frontends_learn_whether_an_engine_takes_embeddings(is_enabled):
    ready = session_pb2.Ready()
    make_wire_features(enable_prompt_embeds=is_enabled).announce(ready)
    assert ready.takes_prompt_embeds == is_enabled


def test_a_mask_that_is_all_tokens_changes_nothing():
    assert to_request(entry_of(None, [1, 2], b"\1\1")).token_ids == [1, 2]
