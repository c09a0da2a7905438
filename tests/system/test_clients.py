"""Agent frameworks and clients of OpenAI's API, unmodified, each alone in its environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rig.processes import Fleet, ServicePlan
from tests.system import clients_table
from tests.system.clients_table import scenarios, steps_of
from triptych_cli.services import embedded_model

LIMIT_S = 180


def test_the_page_of_clients_is_what_their_scenarios_declare():
    assert clients_table.PAGE.read_text() == clients_table.page()


@pytest.mark.network
@pytest.mark.parametrize("scenario", scenarios(), ids=lambda path: path.stem)
async def test_a_client_gets_calls_and_texts_of_its_schema(scenario: Path, tmp_path: Path):
    async with Fleet(tmp_path) as fleet:
        model = (str(embedded_model()), "--served-model-name=triptych-tiny", "--num-threads=1")
        engine = fleet.add(ServicePlan("engine", 0, model))
        flags = (f"--engine={engine.address}", "--http-port=0", "--tool-parser=hermes")
        frontend = fleet.add(ServicePlan("frontend", 0, flags))
        await fleet.start()
        await fleet.until_routed()
        # Its own environment, of the packages that the head of the scenario names.
        uv = str(Path(sys.executable).with_name("uv"))
        answer = await asyncio.to_thread(
            subprocess.run,
            [uv, "run", "--quiet", "--script", str(scenario), f"http://{frontend.http}/v1"],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == steps_of(scenario)
