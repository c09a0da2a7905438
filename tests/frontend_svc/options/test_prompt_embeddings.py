"""Prompts of embeddings on their way to an ADD: what is refused, and what the engine gets."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from frontend_svc.engines.routing.engine_info import RoutingRequest
from frontend_svc.generation.caller import LOCAL_CALLER
from frontend_svc.generation.preprocess import Prepared, check_request, needs_of, prepare
from frontend_svc.text.limits import RequestLimits
from frontend_svc.text.model import GenerationDefaults, ServedModel
from frontend_svc.text.prompt import RequestPrompt
from frontend_svc.text.tokenize.id_column import id_column
from frontend_svc.text.workers.workers import TextWorkers
from tests.frontend_svc.fakes import WAIT_S, Client, FakeEngine, answer, read_all, serving
from tests.frontend_svc.tokenizers import byte_level_tokenizer, tokenizer_over
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import session_pb2
from triptych_kit.errors import InvalidArgument, Unavailable, Unimplemented

LIMITS = RequestLimits()
HIDDEN = 3


@pytest.fixture
async def model() -> AsyncIterator[ServedModel]:
    workers = TextWorkers(1)
    yield ServedModel(
        name="tiny",
        text_key="k",
        fingerprint="f",
        tokenizer=tokenizer_over(workers, byte_level_tokenizer()),
        defaults=GenerationDefaults(),
        max_model_len=16,
        vocab_size=600,
        eos_token_ids=(0,),
        ready=session_pb2.Ready(hidden_size=HIDDEN, takes_prompt_embeds=True),
    )
    await workers.close()


def rows(*values: float) -> bytes:
    return b"".join(struct.pack("<f", value) * HIDDEN for value in values)


def request_of(
    *values: float, token_ids: tuple[int, ...] = (), is_token: bytes = b""
) -> generate_pb2.GenerateRequest:
    tensor = tensor_pb2.Tensor(
        dtype=tensor_pb2.D_TYPE_FP32, shape=[len(values), HIDDEN], inline=rows(*values)
    )
    embeds = generate_pb2.PromptEmbeds(embeds=tensor, token_ids=token_ids, is_token=is_token)
    return generate_pb2.GenerateRequest(embeds=embeds)


async def prepared(request: generate_pb2.GenerateRequest, model: ServedModel) -> Prepared:
    prompt = RequestPrompt(request)
    await check_request(request, prompt, model, LIMITS)
    return await prepare(request, prompt, model, LOCAL_CALLER)


@pytest.mark.parametrize("is_token", [b"", b"\0\0"])
@pytest.mark.parametrize("token_ids", [(), (5, 6)])
async def test_embeddings_alone_become_a_reference_and_their_bytes(model, is_token, token_ids):
    ready = await prepared(request_of(1.0, 2.0, is_token=is_token, token_ids=token_ids), model)
    (entry,) = ready.entries
    (tensor,) = ready.prompt.tensors
    assert (tensor.data, entry.prompt_embeds) == (rows(1.0, 2.0), tensor.reference)
    assert (list(entry.prompt_embeds.shape), entry.prompt_token_ids, entry.is_token) == (
        [2, HIDDEN],
        b"",
        b"",
    )
    assert (ready.prompt.token_ids, ready.prompt.context_ids) == ([0, 0], [])


async def test_of_a_mixed_prompt_only_the_embeddings_that_count_are_sent(model):
    request = request_of(1, 2, 3, 4, 5, token_ids=(5, 6, 999_999, 8, 9), is_token=b"\1\1\0\0\1")
    ready = await prepared(request, model)
    (entry,) = ready.entries
    assert ready.prompt.tensors[0].data == rows(3, 4)
    assert (entry.is_token, entry.prompt_token_ids) == (b"\1\1\0\0\1", id_column([5, 6, 0, 0, 9]))
    assert list(entry.prompt_embeds.shape) == [2, HIDDEN]
    # What stands behind the last embedding is text that the output goes on from.
    assert ready.prompt.context_ids == [9]


async def test_a_prompt_in_which_every_position_has_a_token_is_one_of_tokens(model):
    request = request_of(1, 2, token_ids=(5, 6), is_token=b"\1\1")
    request.return_prompt_token_ids = True
    ready = await prepared(request, model)
    assert (ready.prompt.tensors, ready.prompt.context_ids) == ([], [5, 6])
    assert not ready.entries[0].HasField("prompt_embeds")
    assert ready.entries[0].prompt_token_ids == id_column([5, 6])


async def test_all_outputs_of_a_group_refer_to_one_tensor(model):
    request = request_of(1, 2)
    request.sampling.n = 3
    request.sampling.temperature = 1.0
    ready = await prepared(request, model)
    assert len(ready.prompt.tensors) == 1
    assert [entry.prompt_embeds for entry in ready.entries] == [ready.prompt.tensors[0].reference] * 3


async def test_large_embeddings_have_the_digest_of_their_bytes_too(model):
    wide = replace(model, ready=session_pb2.Ready(hidden_size=100_000, takes_prompt_embeds=True))
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_BF16, shape=[2, 100_000], inline=bytes(400_000))
    request = generate_pb2.GenerateRequest(embeds=generate_pb2.PromptEmbeds(embeds=tensor))
    ready = await prepared(request, wide)
    assert ready.prompt.tensors[0].reference.blob.size == len(ready.prompt.tensors[0].data) == 400_000


async def test_where_no_engine_takes_embeddings_they_are_refused_by_name(model):
    with pytest.raises(Unimplemented) as caught:
        await prepared(request_of(1.0), replace(model, ready=session_pb2.Ready()))
    assert caught.value.metadata == {"fields": "embeds"}


async def test_a_prompt_as_long_as_the_model_is_too_long(model):
    with pytest.raises(InvalidArgument) as caught:
        await prepared(request_of(*range(16)), model)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def change(request: generate_pb2.GenerateRequest, name: str, value: object) -> None:
    embeds, tensor = request.embeds, request.embeds.embeds
    match name:
        case "shape":
            tensor.ClearField("shape")
            tensor.shape.extend(value)  # type: ignore[arg-type]
        case "dtype" | "inline":
            setattr(tensor, name, value)
        case "blob" | "shm" | "remote":
            getattr(tensor, name).SetInParent()
        case "none":
            request.embeds.ClearField("embeds")
        case "is_token":
            embeds.is_token = value  # type: ignore[assignment]
        case "token_ids":
            embeds.token_ids.extend(value)  # type: ignore[arg-type]
        case "prompt_logprobs":
            request.sampling.prompt_logprobs = 1
        case _:
            setattr(request, name, value)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"dtype": tensor_pb2.D_TYPE_INT64}, ["embeds.embeds.dtype"]),
        ({"dtype": tensor_pb2.D_TYPE_UNSPECIFIED}, ["embeds.embeds.dtype"]),
        ({"shape": [2, HIDDEN + 1]}, ["embeds.embeds.shape"]),
        ({"shape": [2 * HIDDEN]}, ["embeds.embeds.shape"]),
        ({"shape": [1, 2, HIDDEN]}, ["embeds.embeds.shape"]),
        ({"shape": [0, HIDDEN], "inline": b""}, ["embeds.embeds.shape"]),
        ({"shape": [2**62, HIDDEN]}, ["embeds.embeds.inline"]),
        ({"inline": b"\x80\x04pickle"}, ["embeds.embeds.inline"]),
        ({"blob": None}, ["embeds.embeds.payload"]),
        ({"shm": None}, ["embeds.embeds.payload"]),
        ({"remote": None}, ["embeds.embeds.payload"]),
        ({"none": None}, ["embeds.embeds.dtype", "embeds.embeds.shape", "embeds.embeds.payload"]),
        ({"is_token": b"\0"}, ["embeds.is_token"]),
        ({"is_token": b"\0\2", "token_ids": [1, 2]}, ["embeds.is_token"]),
        ({"is_token": b"\0\1"}, ["embeds.token_ids"]),
        ({"is_token": b"\0\1", "token_ids": [1]}, ["embeds.token_ids"]),
        ({"is_token": b"\0\1", "token_ids": [1, 600]}, ["embeds.token_ids"]),
        ({"prompt_logprobs": 1}, ["sampling.prompt_logprobs"]),
        ({"return_prompt_token_ids": True}, ["return_prompt_token_ids"]),
        ({"truncate_prompt_tokens": 1}, ["truncate_prompt_tokens"]),
    ],
    ids=lambda value: "-".join(value),
)
async def test_what_is_wrong_is_refused_by_field(model, changes, fields):
    request = request_of(1.0, 2.0)
    for name, value in changes.items():
        change(request, name, value)
    with pytest.raises(InvalidArgument) as caught:
        await prepared(request, model)
    assert [name for name, _ in caught.value.violations] == fields


# Prompts of embeddings among engines of one model, of which not all take them.


class EmbeddingsEngine(FakeEngine):
    """Takes prompts of embeddings, as it says."""

    def _ready(self) -> session_pb2.Ready:
        ready = super()._ready()
        ready.hidden_size, ready.takes_prompt_embeds = HIDDEN, True
        return ready


def embedded_request(client: Client):
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[3, HIDDEN], inline=bytes(3 * HIDDEN * 4))
    return client.inference.Generate(
        generate_pb2.GenerateRequest(embeds=generate_pb2.PromptEmbeds(embeds=tensor)), timeout=WAIT_S
    )


@pytest.mark.parametrize("takers", [(0,), (1,), (2,)])
async def test_embeddings_go_where_they_are_taken_whichever_engine_that_is(takers):
    kinds = [EmbeddingsEngine if rank in takers else FakeEngine for rank in range(3)]
    engines = [kind(answer(str(rank)), dp_rank=rank, is_ready=False) for rank, kind in enumerate(kinds)]
    async with serving(*engines, waits_ready=False) as (client, _):
        for num_ready, engine in enumerate(engines, start=1):
            await engine.wait(lambda engine=engine: bool(engine.sessions))
            engine.become_ready()
            await client.until_engines_are_ready(num_ready)
        embedded = {(await read_all(embedded_request(client)))[1] for _ in range(6)}
        others = {(await read_all(client.generate([5 + turn])))[1] for turn in range(9)}
    assert embedded == {str(rank) for rank in takers}
    assert len(others) == len(engines)


async def test_embeddings_that_lose_their_engine_wait_for_another_that_takes_them():
    first, other = EmbeddingsEngine(), FakeEngine(answer("other"), dp_rank=1)
    async with serving(first, other, reconnect_window_s=WAIT_S) as (client, _):
        await client.until_engines_are_ready(2)
        call = embedded_request(client)
        await first.wait_for_requests(1)
        first.script = answer("again")
        first.die()
        assert (await read_all(call))[1] == "again"
    assert other.requests == []
    assert len(first.requests) == 2


async def test_embeddings_that_no_ready_engine_takes_any_more_are_refused_by_that_reason():
    taker, other = EmbeddingsEngine(), FakeEngine(dp_rank=1)
    async with serving(taker, other) as (client, frontend):
        await client.until_engines_are_ready(2)
        needs = needs_of(request_of(1.0))
        directory, routing = frontend.engines.directory, RoutingRequest(needs=needs)
        model = directory.model("", needs)
        assert directory.pick(model, routing).address == taker.address
        taker.is_ready = False
        taker.die()
        await client.until_engines_are_ready(1)
        with pytest.raises(Unavailable) as caught:
            directory.pick(model, routing)
        assert caught.value.reason == "EMBEDS_NOT_READY"
        assert directory.pick(model, RoutingRequest()).address == other.address
