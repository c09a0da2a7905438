"""Agent frameworks and clients of OpenAI's API, unmodified, each alone in its environment."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.rig.processes import Fleet, ServicePlan
from tests.environments import UV, plain_environment
from tests.system import clients_table
from tests.system.clients_table import scenarios, steps_of
from triptych_cli.services import embedded_model

LIMIT_S = 180
# The program that runs a scenario in an environment of its own, by the suffix of the scenario.
RUNNERS = {".py": (UV, "run", "--quiet", "--script")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The base address of one stack for all scenarios."""
    async with serving_embedded_model(tmp_path_factory.mktemp("clients")) as address:
        yield address


@contextlib.asynccontextmanager
async def serving_embedded_model(folder: Path) -> AsyncIterator[str]:
    """The base address of a stack with the embedded model, as `triptych serve` starts one."""
    async with Fleet(folder) as fleet:
        model = (str(embedded_model()), "--served-model-name=triptych-tiny", "--num-threads=1")
        engine = fleet.add(ServicePlan("engine", 0, model))
        flags = (f"--engine={engine.address}", "--http-port=0", "--tool-parser=hermes")
        frontend = fleet.add(ServicePlan("frontend", 0, flags))
        await fleet.start()
        await fleet.until_routed()
        yield f"http://{frontend.http}/v1"


def test_the_page_of_clients_is_what_their_scenarios_declare():
    assert clients_table.PAGE.read_text() == clients_table.page()


@pytest.mark.network
@pytest.mark.parametrize("scenario", scenarios(), ids=lambda path: path.stem)
def test_a_client_gets_calls_and_texts_of_its_schema(scenario: Path, base: str):
    answer = subprocess.run(
        [*RUNNERS[scenario.suffix], str(scenario), base],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == steps_of(scenario)
