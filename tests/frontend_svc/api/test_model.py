"""ModelService over gRPC."""

from __future__ import annotations

import grpc
import pytest

from tests.frontend_svc.fakes import EOS_ID, MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine, serving, serving_one
from triptych.api.v1 import model_pb2


async def test_models_are_listed_with_what_a_client_needs():
    async with serving(FakeEngine()) as (client, _):
        (model,) = (await client.model.ListModels(model_pb2.ListModelsRequest())).models
        same = (await client.model.GetModel(model_pb2.GetModelRequest(model="tiny"))).model
    assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", MAX_MODEL_LEN, VOCAB_SIZE)
    assert (list(model.eos_token_ids), model.num_engines, model.has_chat_template) == ([EOS_ID], 1, True)
    assert list(model.supported_tasks) == ["generate"]
    assert not model.structured_output_keywords
    assert same == model


async def test_a_model_lists_the_keywords_that_its_engines_enforce():
    async with serving(FakeEngine(structured_output_backends=["llguidance"])) as (client, _):
        (model,) = (await client.model.ListModels(model_pb2.ListModelsRequest())).models
    assert model.structured_output_keywords == ["type"]


async def test_engines_of_one_name_with_different_weights_are_listed_apart():
    engines = [FakeEngine(fingerprint=weights, dp_rank=rank) for rank, weights in enumerate("bab")]
    async with serving(*engines) as (client, _):
        await client.until_engines_are_ready(3)
        models = (await client.model.ListModels(model_pb2.ListModelsRequest())).models
        one = (await client.model.GetModel(model_pb2.GetModelRequest(model="tiny"))).model
    assert [(model.name, model.fingerprint, model.num_engines) for model in models] == [
        ("tiny", "a", 1),
        ("tiny", "b", 2),
    ]
    assert one in models


async def test_an_unknown_model_is_not_found():
    async with serving(FakeEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.model.GetModel(model_pb2.GetModelRequest(model="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_without_an_engine_there_are_no_models_but_there_is_a_server():
    async with serving(coordinator="127.0.0.1:1", waits_ready=False) as (client, frontend):
        assert not (await client.model.ListModels(model_pb2.ListModelsRequest())).models
        info = await client.model.GetServerInfo(model_pb2.GetServerInfoRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.model.GetModel(model_pb2.GetModelRequest())
    assert (info.frontend_id, info.schema_revision) == (frontend.engines.identity.frontend_id, 1)
    assert (info.limits.max_stop_strings, info.limits.max_request_bytes) == (16, 16 * 1024 * 1024)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_server_info_shows_engines():
    async with serving_one() as (engine, client, _):
        call = client.generate()
        (request,) = await engine.wait_for_requests(1)
        (shown,) = (await client.model.GetServerInfo(model_pb2.GetServerInfoRequest())).engines
        call.cancel()
        await engine.wait(lambda: request.abort_reason is not None)
    assert (shown.engine_id, shown.endpoint, shown.state) == ("engine-0", engine.address, "ready")
    assert (shown.model, shown.num_in_flight) == ("tiny", 1)
