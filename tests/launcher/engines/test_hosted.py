from __future__ import annotations

import asyncio

import pytest

from engine_svc.config import EngineConfig
from engine_svc.loop.mailbox import Fail
from launcher.engines.async_client import AsyncEngineClient
from launcher.engines.core_client import EngineDead
from launcher.engines.hosted import HostedEngine
from launcher.services import embedded_model
from tests.engine_svc.session.service_rig import make_entry

CONFIG = EngineConfig(model=str(embedded_model()), num_threads=1, num_kv_blocks=64, device="cpu")
WAIT_S = 30.0


async def test_an_engine_in_this_process_answers_over_the_channel_without_sockets() -> None:
    engine = HostedEngine(CONFIG, on_death=pytest.fail)
    await engine.start()
    client = AsyncEngineClient([engine.address], connect=engine.connect)
    await client.start(timeout_s=WAIT_S)
    handle = client.add(make_entry(1, max_tokens=4, ignore_eos=True))
    num_tokens = 0
    while client.num_in_flight:
        columns = (await asyncio.wait_for(client.get_output(), WAIT_S)).columns
        assert set(columns.handles) == {handle}
        num_tokens += len(columns.token_ids)
    await client.close()
    await engine.close()
    assert num_tokens == 4


async def test_the_end_of_the_loop_is_told_and_raised_in_who_waits() -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = HostedEngine(CONFIG, on_death=told.set_result)
    await engine.start()
    client = AsyncEngineClient([engine.address], connect=engine.connect)
    await client.start(timeout_s=WAIT_S)
    waiting = asyncio.ensure_future(client.get_output())
    engine.served.inbox.put(Fail(ZeroDivisionError("in a step")))
    assert "ZeroDivisionError" in await asyncio.wait_for(told, WAIT_S)
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        await asyncio.wait_for(waiting, WAIT_S)
    await client.close()
    await engine.close()


async def test_a_folder_that_is_no_model_is_told_in_words_for_people(tmp_path) -> None:
    engine = HostedEngine(EngineConfig(model=str(tmp_path), device="cpu"), on_death=pytest.fail)
    with pytest.raises(EngineDead, match=r"config\.json"):
        await engine.start()
    await engine.close()
