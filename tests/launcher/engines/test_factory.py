from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_svc.config import EngineConfig
from launcher.engines.async_client import AsyncEngineClient
from launcher.engines.factory import make_engine_client
from launcher.engines.in_process import InProcessClient
from launcher.engines.sync_client import SyncEngineClient
from launcher.services import embedded_model
from tests.engine_svc.session.service_rig import ServiceRig, make_entry, serving

CONFIG = EngineConfig(model=str(embedded_model()), num_threads=1, num_kv_blocks=64, device="cpu")


def test_a_blocking_client_without_an_address_is_the_engine_itself() -> None:
    client = make_engine_client(is_async=False, config=CONFIG)
    assert isinstance(client, InProcessClient)
    client.add(make_entry(1, max_tokens=3, temperature=0.0, ignore_eos=True))
    num_tokens = 0
    while client.num_in_flight:
        num_tokens += len(client.get_output().columns.token_ids)
    client.close()
    assert num_tokens == 3


def test_an_asyncio_client_without_a_process_of_its_own_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="process of its own"):
        make_engine_client(is_async=True, config=CONFIG)


async def test_an_address_gives_a_client_of_the_kind_that_is_asked_for() -> None:
    rig = ServiceRig()
    async with serving(rig):
        blocking = await asyncio.to_thread(make_engine_client, is_async=False, addresses=[rig.address])
        assert isinstance(blocking, SyncEngineClient)
        await asyncio.to_thread(blocking.close)
        assert isinstance(make_engine_client(is_async=True, addresses=[rig.address]), AsyncEngineClient)


@pytest.mark.parametrize("is_async", [False, True])
def test_both_an_address_and_a_configuration_are_refused(is_async: bool) -> None:
    with pytest.raises(ValueError, match="not both"):
        make_engine_client(is_async=is_async, addresses=["127.0.0.1:1"], config=CONFIG)


def test_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        make_engine_client(is_async=False)


def test_a_folder_that_is_none_is_told_in_words_for_people(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=r"config\.json"):
        make_engine_client(is_async=False, config=EngineConfig(model=str(tmp_path)))
