"""Tokenize and Detokenize over gRPC."""

from __future__ import annotations

import grpc
import pytest

from tests.frontend_svc.fakes import EOS_ID, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, FakeEngine, serving
from triptych.api.v1 import tokenize_pb2

TEXT = "the cat 日本 😀"


async def test_text_to_ids_and_back():
    async with serving(FakeEngine()) as (client, _):
        tokenized = await client.tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text=TEXT))
        ids = list(tokenized.token_ids)
        back = await client.tokenizer.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=ids))
    assert ids == TOKENIZER.encode(TEXT).ids
    assert (tokenized.max_model_len, list(tokenized.tokens)) == (MAX_MODEL_LEN, [])
    assert back.text == TEXT


async def test_tokens_and_their_offsets_on_request():
    async with serving(FakeEngine()) as (client, _):
        response = await client.tokenizer.Tokenize(
            tokenize_pb2.TokenizeRequest(text="the cat", return_tokens=True)
        )
    offsets = zip(response.start_offsets, response.end_offsets, strict=True)
    assert "".join("the cat"[start:end] for start, end in offsets) == "the cat"
    assert len(response.tokens) == len(response.token_ids)


async def test_special_tokens_are_shown_unless_skipped():
    ids = [*TOKENIZER.encode("cat").ids, EOS_ID]
    async with serving(FakeEngine()) as (client, _):
        shown = await client.tokenizer.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=ids))
        request = tokenize_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=True)
        skipped = await client.tokenizer.Detokenize(request)
    assert (shown.text, skipped.text) == ("cat<|end|>", "cat")


@pytest.mark.parametrize(
    ("ids", "words"),
    [([1, VOCAB_SIZE], ["token_ids[1]", str(VOCAB_SIZE)]), ([1] * (MAX_MODEL_LEN + 1), ["513", "512"])],
)
async def test_ids_that_cannot_be_are_refused(ids, words):
    async with serving(FakeEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.tokenizer.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=ids))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in (caught.value.details() or "") for word in words)


async def test_text_that_would_take_seconds_is_refused():
    async with serving(FakeEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text="x" * 2_000_000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "text has 2000000 characters, must have at most 1048576"
