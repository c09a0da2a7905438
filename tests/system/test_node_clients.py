"""Clients of OpenAI's API that npm has, unmodified, each alone in its folder."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.environments import plain_environment
from tests.frontend_svc.fakes import TOKENIZER, FakeEngine, FakeRequest, answer, serving
from tests.system.clients_table import NODE_FOLDER, npm_package
from tests.system.test_clients import serving_embedded_model

pytestmark = pytest.mark.network

LIMIT_S = 240
CONTEXT = 2**16
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)
PATCH = (
    "apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: note.txt\n@@\n"
    "-The colour is red.\n+The colour is blue.\n*** End Patch\nEOF\n"
)
COMMANDS = ("cat note.txt", PATCH, "cat note.txt")
# The calls of the scripted model, by the agent whose tools they are of.
CALLS = {
    "codex": [{"name": "exec_command", "arguments": {"cmd": command}} for command in COMMANDS],
    "continue": [
        {"name": "Read", "arguments": {"filepath": "note.txt"}},
        {"name": "Edit", "arguments": {"file_path": "note.txt", "old_string": "red", "new_string": "blue"}},
    ],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with serving_embedded_model(tmp_path_factory.mktemp("clients")) as address:
        yield address


@pytest.mark.parametrize("name", ["promptfoo", "vercel_ai"])
async def test_a_client_of_npm_works_with_the_embedded_model(name: str, base: str, tmp_path: Path):
    await check_steps(name, tmp_path / name, base)


@pytest.mark.parametrize("name", CALLS)
async def test_an_agent_gets_calls_of_a_scripted_model_and_returns_their_output(name: str, tmp_path: Path):
    calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS[name]]

    def next_turn(engine: FakeEngine, request: FakeRequest) -> None:
        """Answer with the next call, or with a text once all have been made."""
        num_called = TOKENIZER.decode(request.prompt).count("</tool_call>")
        answer([*calls, "It is blue now."][num_called])(engine, request)

    engine = FakeEngine(next_turn, chat_template=TEMPLATE, max_model_len=CONTEXT)
    async with serving(engine, http_port=0, tool_parser="hermes") as (_, frontend):
        assert frontend.servers.http is not None
        address = await frontend.servers.http.start()
        try:
            await check_steps(name, tmp_path / name, f"http://{address}/v1")
        finally:
            await frontend.servers.http.stop(0)
    # Each turn has the calls before it and their outputs, which the last one repeats.
    assert len(engine.requests) == len(calls) + 1
    prompt = TOKENIZER.decode(engine.requests[-1].prompt)
    assert prompt.index("\ntool: ") < prompt.index("The colour is red.")
    assert prompt.rindex("The colour is blue.") > prompt.rindex("</tool_call>")


async def check_steps(name: str, folder: Path, base: str) -> None:
    """Install the packages of a client's lock file into `folder` and run its scenario."""
    if missing := [program for program in ("node", "npm") if not shutil.which(program)]:
        pytest.fail(f"missing {' '.join(missing)}", pytrace=False)
    shutil.copytree(NODE_FOLDER / name, folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(NODE_FOLDER / "steps.mjs", folder)
    package = npm_package(folder)
    install = ["npm", "ci", "--no-audit", "--no-fund", "--silent", *package.get("npmOptions", ())]
    for command in (install, ["node", "scenario.mjs", base]):
        ran = await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=folder,
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == package["works"]
