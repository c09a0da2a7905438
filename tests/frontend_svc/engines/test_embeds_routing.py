"""Prompts of embeddings among engines of one model, of which not all take them."""

from __future__ import annotations

import pytest

from frontend_svc.engines.routing.engine_info import RoutingRequest
from service_kit.errors import Unavailable
from tests.frontend_svc.fakes import WAIT_S, Client, FakeEngine, answer, read_all, serving
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import session_pb2

HIDDEN = 2


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
        directory, routing = frontend.directory, RoutingRequest(has_embeds=True)
        model = directory.model("", has_embeds=True)
        assert directory.pick(model, routing).address == taker.address
        taker.is_ready = False
        taker.die()
        await client.until_engines_are_ready(1)
        with pytest.raises(Unavailable) as caught:
            directory.pick(model, routing)
        assert caught.value.reason == "EMBEDS_NOT_READY"
        assert directory.pick(model, RoutingRequest()).address == other.address
