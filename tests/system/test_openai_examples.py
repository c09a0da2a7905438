"""The programs of examples/openai against one stack, one through nginx: each prints the transcript."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from benchmarks.rig.processes import Fleet, ServicePlan, free_port
from benchmarks.rig.proxies import until_listening
from tests.debian import missing_packages
from tests.environments import environment_with, plain_environment
from tests.processes import running_async
from triptych_cli.services import embedded_model

pytestmark = pytest.mark.network

FOLDER = Path(__file__).parents[2] / "examples" / "openai"
TRANSCRIPT = (FOLDER / "transcript.txt").read_text().splitlines()
LIMIT_S = 300
ENVIRONMENT = plain_environment()


def run(*command: str | Path, folder: Path | None = None) -> list[str]:
    """The lines that a command prints."""
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines: list[str] = done.stdout.splitlines()
    return lines


async def output_of(*command: str | Path, folder: Path | None = None) -> list[str]:
    return await asyncio.to_thread(run, *command, folder=folder)


@dataclass(frozen=True)
class Stack:
    grpc: str
    http: str

    @property
    def url(self) -> str:
        return f"http://{self.http}/v1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with Fleet(tmp_path_factory.mktemp("stack")) as fleet:
        flags: tuple[str, ...]
        flags = (str(embedded_model()), "--num-threads=1", "--served-model-name=triptych-tiny")
        engine = fleet.add(ServicePlan("engine", 0, flags))
        flags = (f"--engine={engine.address}", "--http-port=0", "--text-workers=1")
        frontend = fleet.add(ServicePlan("frontend", 0, flags))
        await fleet.start()
        await fleet.until_routed()
        yield Stack(frontend.address, frontend.http)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with what the Python examples import."""
    folder = tmp_path_factory.mktemp("examples") / "venv"
    return environment_with("openai", "langchain-openai", folder=folder)


async def test_in_python_with_openai_and_langchain(stack: Stack, python: Path) -> None:
    assert await output_of(python, FOLDER / "complete.py", stack.url) == TRANSCRIPT
    assert await output_of(python, FOLDER / "langchain_chat.py", stack.url) == TRANSCRIPT[-1:]


async def test_in_node_with_openai(stack: Stack, tmp_path: Path) -> None:
    assert shutil.which("npm"), "npm is not installed"
    folder = tmp_path / "node"
    shutil.copytree(FOLDER, folder)
    await output_of("npm", "install", "--silent", "--no-audit", "--no-fund", folder=folder)
    assert await output_of("node", "complete.mjs", stack.url, folder=folder) == TRANSCRIPT


async def test_in_the_shell_with_nginx_in_front(stack: Stack) -> None:
    assert missing_packages(("nginx", "curl", "jq")) == []
    grpc, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = (str(FOLDER / "nginx.sh"), stack.grpc, stack.http, grpc, http)
    async with running_async(*command, start_new_session=True) as script:
        try:
            await until_listening(http)
            assert await output_of(FOLDER / "complete.sh", f"http://{http}/v1") == TRANSCRIPT
        finally:
            # nginx is a child of the script.
            os.killpg(script.pid, signal.SIGTERM)
            await asyncio.wait_for(script.wait(), LIMIT_S)


async def test_in_the_shell_with_tls_and_a_key() -> None:
    assert missing_packages(("openssl", "curl")) == []
    refused, whole, text = await output_of(
        "env",
        f"PATH={Path(sys.executable).parent}:{ENVIRONMENT['PATH']}",
        FOLDER / "tls.sh",
        *(str(free_port()) for _ in range(2)),
    )
    assert refused == "without a key: 401"
    assert json.loads(whole)["choices"][0]["text"] == text
