"""Embeddings of tokens through three processes: the answers of the tokens, inline and by shared memory."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.system.generation import collect, request_of
from tests.system.stack import Stack, address_of
from triptych.api.v1 import generate_pb2
from triptych_cli.services import embedded_model
from triptych_client import aio
from triptych_client.client import Client
from triptych_client.generate_request import GenerateOptions
from triptych_client.prompt_embeds import prompt_embeds

NUM_TOKENS = 12
# 100 rows of 1 KiB travel in the ADD, 600 do not.
LENGTHS = (1, 5, 100, 600)


def prompt_of(length: int) -> list[int]:
    choose = random.Random(length)
    return [choose.randrange(10, 2000) for _ in range(length)]


def embedded(weights: torch.Tensor, prompt: list[int], positions: list[int]) -> generate_pb2.PromptEmbeds:
    """The prompt with embeddings at these places; where tokens count the embeddings are noise."""
    rows = torch.full((len(prompt), weights.shape[1]), float("nan"))
    rows[positions] = weights[torch.tensor(prompt)[positions]]
    is_token = [position not in positions for position in range(len(prompt))]
    token_ids = prompt if any(is_token) else []
    return prompt_embeds(
        memoryview(rows.numpy()), list(rows.shape), "float32", token_ids=token_ids, is_token=is_token
    )


def embedded_request(embeds: generate_pb2.PromptEmbeds, **options: object) -> generate_pb2.GenerateRequest:
    request = request_of([1], NUM_TOKENS)
    request.embeds.CopyFrom(embeds)
    for name, value in options.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("flag", "lengths"),
    [
        ("--model-impl=native", LENGTHS),
        ("--model-impl=transformers", LENGTHS[1:3]),
        ("--tensor-parallel-size=2", LENGTHS[1:3]),
    ],
)
async def test_embeddings_of_tokens_are_answered_as_the_tokens_are(flag, lengths):
    folder = embedded_model()
    weights = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach()
    flags = ("--num-threads=1", "--enable-prompt-embeds", flag)
    # Small steps and few blocks: prompts are computed in pieces, and requests give way to each other.
    async with Stack() as stack:
        trio = await stack.start_all(
            str(folder), *flags, "--max-num-batched-tokens=128", "--num-kv-blocks=150"
        )
        stub = stack.inference(trio.frontend)
        for length in lengths:
            prompt = prompt_of(length)
            half = length // 2
            embeds = [
                embedded(weights, prompt, positions)
                for positions in (list(range(length)), list(range(half, half + (length + 1) // 2)))
            ]
            expected, *answers = await asyncio.gather(
                collect(stub, request_of(prompt, NUM_TOKENS)),
                *(collect(stub, embedded_request(each)) for each in embeds),
            )
            # Found again, and with it the same answer; nothing is shared with the tokens.
            again = await asyncio.gather(*(collect(stub, embedded_request(each)) for each in embeds))
            for answer in (*answers, *again):
                assert answer.token_ids == expected.token_ids, length
            if length > 32:
                assert all(answer.num_cached_tokens >= length - 32 for answer in again)
        if lengths == LENGTHS:
            await _through_the_clients(address_of(trio.frontend), weights)


async def _through_the_clients(address: str, weights: torch.Tensor) -> None:
    prompt = prompt_of(300)
    mixed = embedded(weights, prompt, list(range(0, 300, 7)))
    options: GenerateOptions = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with aio.Client(address) as client:
        expected = await client.generate_unary(prompt, **options)
        given = await client.generate_unary(mixed, **options)
    assert given.outputs[0].token_ids == expected.outputs[0].token_ids
    with Client(address) as blocking:
        again = await asyncio.to_thread(blocking.generate_unary, mixed, **options)
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids
