"""Adapters by name: what their requests say of them, and pins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, Parsed
from engine_svc.features.adapters.wire import ServedAdapters
from tests.engine_svc.features.adapters.folders import write_adapter, write_model
from tests.engine_svc.session.service_rig import make_facts
from triptych.engine.v1 import add_pb2, utility_pb2
from triptych_kit.errors import NotFound, ResourceExhausted


@pytest.fixture
def adapters(tmp_path: Path) -> ServedAdapters:
    model = tmp_path / "model"
    write_model("llama", model)
    for name in ("chef", "cook"):
        write_adapter(tmp_path / "adapters" / name, model, seed=len(name), rank=4)
    return ServedAdapters(
        EngineConfig(
            model=str(model),
            enable_lora=True,
            max_loras=1,
            max_cpu_loras=2,
            lora_dir=str(tmp_path / "adapters"),
        )
    )


def parsed(adapters: ServedAdapters, name: str) -> Parsed:
    found = adapters.parse(add_pb2.AddEntry(adapter=name), AddContext(make_facts(), None, [1]))
    assert found is not None
    return found


async def called(
    adapters: ServedAdapters, context: Any = None, **call: Any
) -> list[utility_pb2.LoadedAdapter]:
    (name,) = call
    (utility,) = (each for each in adapters.utilities if each.name == name)
    result = await utility.handler(context, utility_pb2.UtilityCall(**call))
    return list(result.adapters.adapters)


def test_blocks_of_a_request_have_the_name_of_its_adapter(adapters):
    found = parsed(adapters, "cook")
    assert found.variant == "cook"
    assert found.cache_keys == (found.extra.cache_key,)


async def test_a_pin_ends_and_makes_room_for_another(adapters):
    (cook,) = await called(adapters, pin_adapter={"name": "cook"})
    assert cook.pinned
    pins = parsed(adapters, "chef").extra.pins
    assert pins.digests == (cook.digest,)
    with pytest.raises(ResourceExhausted, match="1 adapters are pinned, the limit is 1"):
        await called(adapters, pin_adapter={"name": "chef"})
    (cook,) = await called(adapters, unpin_adapter={"name": "cook"})
    assert not cook.pinned
    later = parsed(adapters, "chef").extra.pins
    assert (later.digests, later.newest(pins)) == ((), later)
    assert (await called(adapters, pin_adapter={"name": "chef"}))[0].pinned


async def test_an_adapter_without_a_pin_stays_as_it_is_and_an_unknown_one_is_refused(adapters):
    (chef,) = await called(adapters, unpin_adapter={"name": "chef"})
    assert not chef.pinned
    with pytest.raises(NotFound, match="adapter 'baker' is not loaded"):
        await called(adapters, unpin_adapter={"name": "baker"})


async def test_changes_of_adapters_keep_their_order(adapters, tmp_path):
    context = SimpleNamespace(engine=SimpleNamespace(announce_again=lambda: None))
    added = {"name": "baker", "path": str(tmp_path / "adapters" / "cook")}
    await asyncio.gather(
        called(adapters, context, add_adapter=added),
        called(adapters, context, remove_adapter={"name": "baker"}),
    )
    assert [each.name for each in await called(adapters, list_adapters={})] == ["chef", "cook"]
