"""Adapters: their names in requests and lists, and the engines that get them."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from frontend_svc.generation.preprocess import check_request
from frontend_svc.text.prompt import RequestPrompt
from tests.frontend_svc.fakes import (
    AT_LENGTH,
    WAIT_S,
    Client,
    FakeEngine,
    FakeRequest,
    answer,
    make_request,
    read_all,
    serving,
)
from tests.frontend_svc.options.asking import LIMITS, model_of, prepared
from triptych.api.v1 import embedding_pb2, model_pb2
from triptych.common.v1 import tensor_pb2
from triptych_kit.errors import InvalidArgument, NotFound

A, B = "aa" * 32, "bb" * 32


async def test_the_engine_gets_the_name_and_its_digest_for_every_output():
    model = model_of(variants={"cook": A})
    for fields in ({"adapter": "cook"}, {"model": "cook"}, {"model": "tiny", "adapter": "cook"}):
        request = await prepared(model, n=2, **fields)
        assert [(entry.adapter, entry.adapter_digest) for entry in request.entries] == [("cook", A)] * 2
        assert (request.prompt.served_as, request.prompt.slot) == ("cook", A)
    plain = await prepared(model, model="tiny")
    assert (plain.entries[0].adapter, plain.prompt.served_as, plain.prompt.needs) == ("", "", [])


async def test_an_adapter_that_is_named_like_its_model_is_had_by_its_field_alone():
    model = model_of(variants={"tiny": A})
    assert not (await prepared(model, model="tiny")).entries[0].adapter
    assert (await prepared(model, model="tiny", adapter="tiny")).entries[0].adapter == "tiny"


async def test_an_unknown_name_is_not_found():
    with pytest.raises(NotFound, match="adapter 'cook' of model 'tiny' is not served here") as caught:
        await prepared(model_of(variants={"chef": A}), adapter="cook")
    assert (caught.value.resource_type, caught.value.resource_name) == ("adapter", "cook")


def test_two_names_contradict_each_other():
    request = make_request([5], model="cook", adapter="chef")
    model = model_of(variants={"cook": A, "chef": B})
    with pytest.raises(InvalidArgument) as caught:
        asyncio.run(check_request(request, RequestPrompt(request), model, LIMITS))
    assert dict(caught.value.violations) == {
        "adapter": "adapter is 'chef', must be unset or 'cook', which model names"
    }


async def test_an_answer_has_the_name_of_the_adapter():
    async with serving(FakeEngine(answer("soup"), adapters={"cook": A})) as (client, _):
        started, text, _, _ = await read_all(client.inference.Generate(make_request(model="cook")))
        plain, *_ = await read_all(client.generate())
    assert (started.model, text, plain.model) == ("cook", "soup", "tiny")


async def test_requests_go_to_engines_that_have_the_adapter():
    engines = [FakeEngine(answer("plain")), FakeEngine(answer("soup"), dp_rank=1, adapters={"cook": A})]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        for _ in range(4):
            request = make_request(adapter="cook")
            assert (await read_all(client.inference.Generate(request)))[1] == "soup"
    assert [len(engine.requests) for engine in engines] == [0, 4]


async def test_a_request_continues_on_the_same_weights_alone():
    engines = [FakeEngine(dp_rank=rank, adapters={"cook": A if rank % 2 else B}) for rank in range(4)]
    got: asyncio.Queue[tuple[FakeEngine, FakeRequest]] = asyncio.Queue()
    for engine in engines:
        engine.script = lambda engine, request: got.put_nowait((engine, request))
    async with serving(*engines) as (client, _), asyncio.timeout(WAIT_S):
        await client.until_engines_are_ready(4)
        call = asyncio.ensure_future(
            read_all(client.inference.Generate(make_request(adapter="cook", detokenize=False)))
        )
        first, request = await got.get()
        first.step({request: [5]})
        first.die()
        second, request = await got.get()
        second.step({request: [6]}, finished={request: AT_LENGTH})
        assert (await call)[2] == [5, 6]
    assert second is not first
    assert second.adapters == first.adapters
    assert request.entry.adapter_digest == first.adapters["cook"]


async def test_what_is_loaded_and_unloaded_meanwhile_counts_for_the_next_request():
    engine = FakeEngine(answer("soup"))
    async with serving(engine) as (client, _), asyncio.timeout(WAIT_S):
        assert await code_of(client, "cook") is grpc.StatusCode.NOT_FOUND
        for adapters in ({"cook": A}, {"cook": B}, {}):
            engine.adapters = adapters
            engine.become_ready()
            cards = await cards_of(client)
            while [card.name for card in cards] != ["tiny", *adapters]:
                cards = await cards_of(client)
        assert await code_of(client, "cook") is grpc.StatusCode.NOT_FOUND


async def test_adapters_are_listed_as_models_with_that_they_belong_to():
    engines = [
        FakeEngine(adapters={"cook": A, "chef": A}),
        FakeEngine(dp_rank=1, adapters={"cook": A, "chef": B}),
    ]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        cards = await cards_of(client)
        one = (await client.model.GetModel(model_pb2.GetModelRequest(model="cook"))).model
    assert [(card.name, card.base_model, card.num_engines) for card in cards] == [
        ("tiny", "", 2),
        ("chef", "tiny", 1),
        ("cook", "tiny", 2),
    ]
    assert [list(card.adapters) for card in cards] == [["chef", "cook"], [], []]
    assert one == cards[2]


async def test_an_adapter_pools_in_an_engine_that_has_it():
    vector = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1], inline=bytes(4))
    tasks = ("generate", "embed")
    engines = [
        FakeEngine(
            lambda engine, request: engine.pool(request, vector),
            dp_rank=rank,
            adapters=adapters,
            supported_tasks=tasks,
        )
        for rank, adapters in enumerate(({}, {"cook": A}))
    ]
    inputs = [embedding_pb2.PoolingInput(prompt="the cat") for _ in range(4)]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(2)
        await client.embedding.Embed(embedding_pb2.EmbedRequest(model="cook", inputs=inputs), timeout=WAIT_S)
    assert engines[0].requests == []
    entries = [request.entry for request in engines[1].requests]
    assert [(entry.adapter, entry.adapter_digest) for entry in entries] == [("cook", A)] * 4


async def cards_of(client: Client) -> list[model_pb2.Model]:
    return list((await client.model.ListModels(model_pb2.ListModelsRequest())).models)


async def code_of(client: Client, model: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(client.inference.Generate(make_request(model=model)))
    return caught.value.code()
