"""Unmodified packages of OpenAI (PyPI and npm) and Anthropic, each alone: the same answers as over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.rig.processes import Fleet, ServicePlan
from tests.engine_svc.features.adapters.folders import write_adapter
from tests.environments import environment_with, plain_environment
from tests.frontend_svc.fakes import FakeEngine, FakeRequest, serving
from tests.system.openai_scenario_requests import EMBEDDED, FOLLOWING, MESSAGE, PROMPT, SAMPLED
from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2_grpc,
    embedding_pb2,
    generate_pb2,
    inference_pb2_grpc,
)
from triptych.common.v1 import sampling_pb2, tensor_pb2
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel

# The frontend that embeds is in this process: in the loop of the tests.
pytestmark = [pytest.mark.network, pytest.mark.asyncio(loop_scope="module")]

SCENARIO = Path(__file__).with_name("openai_scenario.py")
ANTHROPIC_SCENARIO = Path(__file__).with_name("anthropic_scenario.py")
NODE_SCENARIO = Path(__file__).with_name("openai_node")
LIMIT_S = 180
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    async with servers(tmp_path_factory.mktemp("servers")) as running:
        yield running


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scenario and the npm packages of its lock file."""
    if missing := [name for name in ("node", "npm") if not shutil.which(name)]:
        pytest.fail(f"missing {' '.join(missing)}", pytrace=False)
    folder = tmp_path_factory.mktemp("openai") / "node"
    shutil.copytree(NODE_SCENARIO, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=folder, check=True, timeout=LIMIT_S, env=plain_environment())
    return folder


@dataclass(frozen=True)
class Servers:
    """Base addresses of HTTP, and what gRPC answers to the requests of the scenario."""

    base: str
    base_of_embeddings: str
    completion: list[int]
    chat: list[int]
    adapter: list[int]  # of the completion's prompt
    greedy_text: str  # of the chat's message, 24 tokens
    embeddings: list[list[float]]
    num_embedded: int


@contextlib.asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[Servers]:
    """A stack with the embedded model, and a frontend of an engine that embeds: no other one does."""
    async with Fleet(folder) as fleet, embedding_frontend() as (base_of_embeddings, embedded):
        adapter = write_adapter(folder / "tower", embedded_model(), seed=1, modules=("q_proj", "v_proj"))
        loras = ("--enable-lora", f"--lora-modules=tower={adapter}")
        model = (str(embedded_model()), "--num-threads=1", "--max-num-seqs=16", *loras)
        engine = fleet.add(ServicePlan("engine", 0, model))
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        http_flags = ("--http-port=0", "--text-workers=1", "--tool-parser=hermes")
        flags = (f"--engine={engine.address}", *http_flags, f"--chat-template={template}")
        frontend = fleet.add(ServicePlan("frontend", 0, flags))
        await fleet.start()
        await fleet.until_routed()
        sampling = sampling_pb2.SamplingParams(**SAMPLED)
        async with open_channel(frontend.address, profile="public") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            completion, of_adapter = [
                await stub.GenerateOnce(
                    generate_pb2.GenerateRequest(prompt=PROMPT, sampling=sampling, adapter=name),
                    timeout=LIMIT_S,
                )
                for name in ("", "tower")
            ]
            message = chat_message_pb2.ChatMessage(role="CHAT_ROLE_USER")
            message.parts.add(text=MESSAGE)
            chats = chat_pb2_grpc.ChatServiceStub(channel)
            greedy = sampling_pb2.SamplingParams(temperature=0, max_tokens=24)
            chat, greedy_chat = [
                await chats.ChatOnce(
                    chat_message_pb2.ChatRequest(messages=[message], sampling=one), timeout=LIMIT_S
                )
                for one in (sampling, greedy)
            ]
        yield Servers(
            f"http://{frontend.http}/v1",
            base_of_embeddings,
            list(completion.outputs[0].token_ids),
            list(chat.outputs[0].token_ids),
            list(of_adapter.outputs[0].token_ids),
            greedy_chat.outputs[0].message.parts[0].text,
            [list(struct.unpack(f"<{vector.shape[0]}f", vector.inline)) for vector in embedded.embeddings],
            embedded.usage.num_prompt_tokens,
        )


@contextlib.asynccontextmanager
async def embedding_frontend() -> AsyncIterator[tuple[str, embedding_pb2.EmbedResponse]]:
    """The base address of a frontend whose engine embeds, and what it answers over gRPC."""

    def embed(engine: FakeEngine, request: FakeRequest) -> None:
        # Not exact in binary32, and different for each prompt.
        values = [token_id / 7 for token_id in (request.prompt * 64)[:64]]
        content = struct.pack("<64f", *values)
        engine.pool(request, tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[64], inline=content))

    engine = FakeEngine(embed, supported_tasks=("embed",))
    async with serving(engine, http_port=0) as (client, frontend):
        assert frontend.servers.http is not None
        address = await frontend.servers.http.start()
        inputs = [embedding_pb2.PoolingInput(prompt=text) for text in EMBEDDED]
        answer = await client.embedding.Embed(embedding_pb2.EmbedRequest(inputs=inputs), timeout=LIMIT_S)
        try:
            yield f"http://{address}/v1", answer
        finally:
            await frontend.servers.http.stop(0)


async def seen_by(*command: str, cwd: Path | None = None) -> dict[str, Any]:
    """What a scenario prints at its end."""
    answer = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=cwd,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def check_seen(seen: dict[str, Any], expected: Servers) -> None:
    assert seen["completion"] == seen["chunks"] == expected.completion
    assert seen["chat"] == seen["response"] == seen["response_chunks"] == expected.chat
    assert seen["adapter"] == expected.adapter != expected.completion
    assert len(set(seen["completion"])) >= 20
    assert len(set(seen["chat"])) >= 20
    assert seen["response_text"] == seen["text"]
    assert seen["gone"] == "response_not_found response_id"
    assert seen["embeddings"] == expected.embeddings
    assert seen["embedding_tokens"] == expected.num_embedded
    assert seen["errors"] == [
        "NotFoundError model",
        "BadRequestError temperature",
        "BadRequestError max_tokens",
    ]


async def test_the_openai_package_of_pypi_gets_what_grpc_gets(expected, tmp_path):
    python = await asyncio.to_thread(environment_with, "openai", folder=tmp_path / "venv")
    seen = await seen_by(str(python), str(SCENARIO), expected.base, expected.base_of_embeddings)
    check_seen(seen, expected)
    assert seen["texts"][0] == seen["text"]
    assert len(set(seen["texts"])) == 8


async def test_the_openai_package_of_npm_gets_what_grpc_gets(expected, node_folder):
    asked = {
        "prompt": PROMPT,
        "message": MESSAGE,
        "following": FOLLOWING,
        "embedded": EMBEDDED,
        "sampled": SAMPLED,
    }
    seen = await seen_by(
        "node", "scenario.mjs", expected.base, expected.base_of_embeddings, json.dumps(asked),
        cwd=node_folder,
    )  # fmt: skip
    check_seen(seen, expected)


async def test_the_anthropic_package_gets_messages_streams_and_calls(expected, tmp_path):
    python = await asyncio.to_thread(environment_with, "anthropic", folder=tmp_path / "venv")
    seen = await seen_by(str(python), str(ANTHROPIC_SCENARIO), expected.base.removesuffix("/v1"))
    assert seen["text"] == expected.greedy_text
    assert set(seen["texts"][:4]) == {expected.greedy_text}
    assert len(set(seen["texts"][4:])) == 4
    assert len({word for text in seen["texts"] for word in text.split()}) >= 20
    assert seen["kinds"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert seen["stopped"] == ["stop_sequence", True]
    assert [call["city"] in ("Paris", "Pisa") for call in seen["calls"]] == [True, True]
    assert seen["errors"] == [
        "NotFoundError not_found_error with an id",
        "BadRequestError invalid_request_error with an id",
    ]
