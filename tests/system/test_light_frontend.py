"""A frontend of the `frontend` extra alone serves chat, with template and tools, against a remote engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from launcher.serve.readiness import await_ready
from service_kit.channel import open_channel
from tests.architecture.test_light_images import installed
from tests.processes import announced
from tests.system.generation import CALL_LIMIT_S
from tests.system.stack import START_LIMIT_S, Stack, address_of
from triptych.api.v1 import chat_message_pb2, chat_pb2, chat_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2

pytestmark = pytest.mark.network

MAX_BYTES = 150 * 10**6
HEAVY = {"torch", "transformers", "numpy", "triton", "safetensors"}
MAX_TOKENS = 24
ADD = chat_message_pb2.Tool(
    name="add",
    description="adds",
    parameters_json_schema=json.dumps({"type": "object", "properties": {"a": {"type": "number"}}}),
)
USER = chat_message_pb2.ChatMessage(
    role=chat_message_pb2.CHAT_ROLE_USER, parts=[chat_message_pb2.ChatPart(text="the quick brown fox")]
)


async def test_the_frontend_extra_alone_serves_chat_with_template_and_tools(thinking_llama, wheel, tmp_path):
    bin_folder = await asyncio.to_thread(installed, wheel, "frontend", tmp_path)
    packages = next(bin_folder.parent.glob("lib/python*/site-packages"))
    num_bytes = sum(_size(folder) for folder in packages.iterdir() if not folder.name.startswith("pip"))
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
            free = await _read(chat, chat_message_pb2.ChatRequest(messages=[USER], sampling=_sampling()))
            demanded = chat_message_pb2.ChatRequest(
                messages=[USER],
                tools=[ADD],
                tool_choice=chat_message_pb2.ToolChoice(name="add"),
                sampling=_braces(thinking_llama),
            )
            called = await _read(chat, demanded)
            unary = await chat.ChatUnary(chat_pb2.ChatUnaryRequest(request=demanded), timeout=CALL_LIMIT_S)
    assert rendered.prompt == "<tool_call> add\nuser: the quick brown fox\nassistant: "
    assert free.content
    assert len(free.token_ids) == MAX_TOKENS
    assert [(call.name, call.arguments_json) for call in called.tool_calls] == [("add", "{}")]
    assert len(called.token_ids) == MAX_TOKENS
    (output,) = unary.outputs
    assert [(call.name, call.arguments_json) for call in output.message.tool_calls] == [("add", "{}")]
    assert (list(output.token_ids), output.reason) == (
        list(called.token_ids),
        output_pb2.FINISH_REASON_LENGTH,
    )


def _sampling() -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def _braces(folder: str) -> sampling_pb2.SamplingParams:
    """What lets random weights write nothing but arguments: one brace that opens, then those that close."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    opening, closing = tokenizer.encode("{}").ids
    sampling = _sampling()
    sampling.allowed_token_ids.extend([opening, closing])
    sampling.logit_bias.add(token_id=opening, bias=100.0)
    sampling.bad_words.extend(["{{", "}{"])
    return sampling


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
