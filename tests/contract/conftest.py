"""The frontend in JavaScript, with the packages that it needs from a registry."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.processes import START_LIMIT_S, running_async, signal_child

_ROOT = Path(__file__).parents[2]
_INSTALL_LIMIT_S = 240.0

# Starts a frontend for engines at these addresses; its public address.
StartFrontend = Callable[[Sequence[str]], AbstractAsyncContextManager[str]]


@pytest.fixture(scope="session")
def javascript_frontend(tmp_path_factory: pytest.TempPathFactory) -> StartFrontend:
    """Needs a package registry."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(_ROOT / "examples" / "node" / name, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(command, cwd=folder, check=True, timeout=_INSTALL_LIMIT_S)

    @asynccontextmanager
    async def start(engines: Sequence[str]) -> AsyncIterator[str]:
        program = [str(Path(__file__).parent / "frontend.js"), str(_ROOT / "protos"), *engines]
        environment = {**os.environ, "NODE_PATH": str(folder / "node_modules")}
        async with running_async(
            "node", *program, env=environment, stdout=asyncio.subprocess.PIPE
        ) as process:
            assert process.stdout is not None, "it has a pipe"
            line = await asyncio.wait_for(process.stdout.readline(), START_LIMIT_S)
            yield json.loads(line)["address"]
            signal_child(process, signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), START_LIMIT_S) == 0

    return start
