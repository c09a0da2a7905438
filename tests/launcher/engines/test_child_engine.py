from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from engine_svc.config import EngineConfig
from launcher.engines.child_engine import ChildEngine, flags_of
from launcher.engines.core_client import EngineDead
from launcher.services import embedded_model
from service_kit.config import load_config
from service_kit.process import process_environment

CONFIG = EngineConfig(model=str(embedded_model()), num_threads=1, num_kv_blocks=64, device="cpu")
ENVIRONMENT = {**process_environment(), "OMP_NUM_THREADS": "1"}


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


async def test_the_death_of_the_process_is_told_with_its_cause() -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = ChildEngine(CONFIG, ENVIRONMENT, on_death=told.set_result)
    await engine.start()
    os.kill(engine.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in await asyncio.wait_for(told, 10)
    await engine.close()


async def test_an_end_on_purpose_is_no_death() -> None:
    told: list[str] = []
    engine = ChildEngine(CONFIG, ENVIRONMENT, on_death=told.append)
    await engine.start()
    pid = engine.pid
    await engine.close()
    assert told == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_model_that_cannot_be_loaded_is_told_with_the_engines_words(tmp_path) -> None:
    engine = ChildEngine(replace(CONFIG, model=str(tmp_path)), ENVIRONMENT, on_death=lambda why: None)
    with pytest.raises(EngineDead, match=r"has no config\.json"):
        await engine.start()
    await engine.close()
