"""What light images hold: a venv with one extra starts its service, and a frontend serves chat from it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.environments import UV, environment_with
from tests.processes import announced, running
from tests.system.generation import CALL_LIMIT_S
from tests.system.stack import START_LIMIT_S, Stack, address_of
from triptych.api.v1 import chat_message_pb2, chat_pb2, chat_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych_cli.serve.readiness import await_ready
from triptych_kit.channel import open_channel

pytestmark = pytest.mark.network

SHIPPED = ("triptych_kit", "coordinator_svc", "frontend_svc", "engine_svc", "triptych_client", "triptych_cli")
# Dependencies are most of it; 109.2 MB with the HTTP API, keys and TLS, and the bytecode of one start.
MAX_BYTES = 110_000_000  # and 4 MB of compiled kernels
HEAVY = {"torch", "transformers", "numpy", "triton", "safetensors"}
MAX_TOKENS = 24
# A demanded call ends when it is complete.
MAX_CALL_TOKENS = 160
ADD = chat_message_pb2.Tool(
    name="add",
    description="adds",
    parameters_json_schema=json.dumps({"type": "object", "properties": {"a": {"type": "number"}}}),
)
USER = chat_message_pb2.ChatMessage(
    role=chat_message_pb2.CHAT_ROLE_USER, parts=[chat_message_pb2.ChatPart(text="the quick brown fox")]
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package built from a copy of the tree as where no compiler is: to compile it takes a minute."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "*.so", "__pycache__", "node_modules")

    def ignored(parent: str, names: list[str]) -> set[str]:
        # Only at the root: a package may have a folder of this name.
        built = {"build", "dist"} & set(names) if Path(parent) == ROOT else set()
        return left_out(parent, names) | built

    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    no_compiler = {**os.environ, "CC": "false", "CXX": "false"}
    command = [UV, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(folder / "source")]
    subprocess.run(command, env=no_compiler, check=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs the wheel with one extra into a fresh venv, once, and returns its bin folder."""

    @cache
    def install(extra: str) -> Path:
        folder = tmp_path_factory.mktemp(extra) / "venv"
        wanted = f"triptych[{extra}] @ {wheel.as_uri()}"
        return environment_with("-c", str(ROOT / "constraints.txt"), wanted, folder=folder).parent

    return install


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [("coordinator", []), ("frontend", ["--engine", "127.0.0.1:1"])],
    ids=["coordinator", "frontend"],
)
def test_a_light_image_starts_its_service(
    extra: str, arguments: list[str], installed: Callable[[str], Path], tmp_path: Path
) -> None:
    bin_folder = installed(extra)
    site_packages = next(bin_folder.parent.glob("lib/python*/site-packages"))
    packages = {folder.name for folder in site_packages.iterdir()}
    assert packages & {"torch", "transformers", "numpy", "triton", "kernels", "protos", "tests"} == set()
    assert packages >= {*SHIPPED, "triptych", "triptych_kernels"}
    page = Path("frontend_svc/ui/static")
    assert {one.name for one in (site_packages / page).iterdir()} == {
        one.name for one in (ROOT / page).iterdir()
    }
    reader, writer = os.pipe()
    command = [str(bin_folder / "triptych"), extra, "--port", "0", "--announce-fd", str(writer), *arguments]
    # Started elsewhere, so that nothing of the source tree is found by chance.
    with running(*command, cwd=tmp_path, pass_fds=[writer]) as process:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            line = pipe.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert json.loads(line)["service"] == extra


async def test_the_frontend_extra_alone_serves_chat_with_template_and_tools(
    thinking_llama, installed, tmp_path
):
    bin_folder = await asyncio.to_thread(installed, "frontend")
    packages = next(bin_folder.parent.glob("lib/python*/site-packages"))
    num_bytes = sum(_size(folder) for folder in packages.iterdir())
    print(f"the frontend extra takes {num_bytes / 1e6:.1f} MB")
    assert num_bytes < MAX_BYTES
    assert HEAVY.isdisjoint(folder.name for folder in packages.iterdir())
    async with Stack() as stack:
        engine = await stack.start("engine", thinking_llama, "--port=0")
        async with (
            _frontend(bin_folder, address_of(engine), tmp_path) as address,
            open_channel(address, profile="public") as channel,
        ):
            chat = chat_pb2_grpc.ChatServiceStub(channel)
            rendered = await tokenizer_pb2_grpc.TokenizerServiceStub(channel).ApplyChatTemplate(
                tokenizer_pb2.ApplyChatTemplateRequest(messages=[USER], tools=[ADD]),
                timeout=CALL_LIMIT_S,
            )
            free = await _read(
                chat, chat_message_pb2.ChatRequest(messages=[USER], sampling=_sampling(MAX_TOKENS))
            )
            demanded = chat_message_pb2.ChatRequest(
                messages=[USER],
                tools=[ADD],
                tool_choice=chat_message_pb2.ToolChoice(name="add"),
                sampling=_sampling(MAX_CALL_TOKENS),
            )
            called = await _read(chat, demanded)
            unary = await chat.ChatUnary(chat_pb2.ChatUnaryRequest(request=demanded), timeout=CALL_LIMIT_S)
    assert rendered.prompt == "<tool_call> add\nuser: the quick brown fox\nassistant: "
    assert free.content
    assert len(free.token_ids) == MAX_TOKENS
    assert [(call.name, call.arguments_json) for call in called.tool_calls] == [("add", "{}")]
    assert 0 < len(called.token_ids) < MAX_CALL_TOKENS
    (output,) = unary.outputs
    assert [(call.name, call.arguments_json) for call in output.message.tool_calls] == [("add", "{}")]
    assert (list(output.token_ids), output.reason) == (
        list(called.token_ids),
        output_pb2.FINISH_REASON_STOP,
    )


def _sampling(max_tokens: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def _read(
    stub: chat_pb2_grpc.ChatServiceStub, request: chat_message_pb2.ChatRequest
) -> chat_message_pb2.ChatDelta:
    whole = chat_message_pb2.ChatDelta()
    async for response in stub.Chat(request, timeout=CALL_LIMIT_S):
        whole.content += response.delta.content
        whole.token_ids.extend(response.delta.token_ids)
        for call in response.delta.tool_calls:
            if call.name:
                whole.tool_calls.add(name=call.name)
            whole.tool_calls[-1].arguments_json += call.arguments_json
    return whole


@asynccontextmanager
async def _frontend(bin_folder: Path, engine: str, folder: Path) -> AsyncIterator[str]:
    """`triptych frontend` of a venv, where nothing of the source tree is found; its address."""
    command = (str(bin_folder / "triptych"), "frontend", "--engine", engine, "--port", "0")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    async with announced(*command, cwd=folder, env=environment) as (process, record):
        address = str(record["address"])
        await asyncio.wait_for(await_ready("frontend", address), START_LIMIT_S)
        yield address
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START_LIMIT_S) == 0


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
