from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine_svc.config import EngineConfig
from engine_svc.model.errors import ModelError
from triptych_cli.engines.child_engine import ChildEngine, flags_of
from triptych_cli.services import embedded_model
from triptych_kit.config import load_config

CONFIG = EngineConfig(model=str(embedded_model()), num_threads=1, num_kv_blocks=64, device="cpu")


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        EngineConfig(
            model="folder", enable_prefix_caching=False, gpu_memory_utilization=0.5, max_model_len=99
        ),
        EngineConfig(model="org/name", revision="main", enable_kv_events=True, scheduling_policy="priority"),
    ],
)
def test_the_flags_say_what_the_configuration_says(config: EngineConfig) -> None:
    loaded = load_config(EngineConfig, flags_of(config), service="engine", env={}).config
    assert loaded == replace(config, port=0)


@asynccontextmanager
async def child_engine(config: EngineConfig) -> AsyncIterator[ChildEngine]:
    """One that is closed in the end."""
    engine = ChildEngine(config)
    try:
        yield engine
    finally:
        await engine.close()


async def test_the_death_of_the_process_is_reported_with_its_cause() -> None:
    async with child_engine(CONFIG) as engine:
        await engine.start()
        os.kill(engine.pid, signal.SIGKILL)
        assert "killed by SIGKILL" in await asyncio.wait_for(engine.death, 10)


async def test_an_end_on_purpose_is_no_death() -> None:
    async with child_engine(CONFIG) as engine:
        await engine.start()
    assert not engine.death.done()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


async def test_a_model_that_cannot_be_loaded_is_reported_with_the_engines_message(tmp_path) -> None:
    async with child_engine(replace(CONFIG, model=str(tmp_path))) as engine:
        with pytest.raises(ModelError, match=r"has no config\.json"):
            await engine.start()
