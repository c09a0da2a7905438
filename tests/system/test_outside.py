"""Clients that are not ours, from the package registry, against the running stack."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from launcher.services import embedded_model
from tests.processes import running_async
from tests.system.stack import Stack, address_of

pytestmark = pytest.mark.network

BUF = "@bufbuild/buf@1.75.0"
NODE_EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
INSTALL_LIMIT_S = 240.0


async def _run(*command: str, folder: Path | None = None) -> tuple[int, str]:
    async with running_async(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    ) as process:
        output, _ = await asyncio.wait_for(process.communicate(), INSTALL_LIMIT_S)
        return process.returncode or 0, output.decode()


async def test_buf_curl_lists_services_by_reflection_and_streams(llama: str, tmp_path: Path) -> None:
    code, output = await _run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), BUF)
    assert code == 0, output
    buf = str(tmp_path / "node_modules" / ".bin" / "buf")
    async with Stack() as stack:
        trio = await stack.start_all(llama)
        url = f"http://{address_of(trio.frontend)}"
        plain = (buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge")
        code, services = await _run(*plain, "--list-services", url)
        assert code == 0, services
        assert "triptych.api.v1.InferenceService" in services
        request = {
            "prompt": "the quick brown fox",
            "sampling": {"temperature": 0, "maxTokens": "12", "ignoreEos": True},
        }
        code, stream = await _run(
            *plain, "-d", json.dumps(request), f"{url}/triptych.api.v1.InferenceService/Generate"
        )
        assert code == 0, stream
    assert '"started"' in stream
    assert stream.count('"delta"') >= 2
    assert "FINISH_REASON_LENGTH" in stream


async def test_the_node_example_streams_and_cancels(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "node"
    shutil.copytree(NODE_EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(NODE_EXAMPLE.parents[1] / "protos", tmp_path / "protos")
    code, output = await _run("npm", "install", "--no-audit", "--no-fund", folder=folder)
    assert code == 0, output
    async with Stack() as stack:
        trio = await stack.start_all(str(embedded_model()))
        code, output = await _run("node", "twelve_steps.js", address_of(trio.frontend), folder=folder)
        stats = await stack.engine(trio.engine).until_idle()
    assert code == 0, output
    assert "cancel" in output
    assert stats.num_running == 0
    assert stats.num_used_blocks == 0
