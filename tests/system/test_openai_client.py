"""The unmodified `openai` package in an environment of its own: the same answers as over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rig.processes import Fleet, ServicePlan
from launcher.services import embedded_model
from service_kit.channel import open_channel
from tests.system.openai_scenario_requests import MESSAGE, PROMPT, SAMPLED
from triptych.api.v1 import (
    chat_message_pb2,
    chat_pb2_grpc,
    generate_pb2,
    inference_pb2_grpc,
)
from triptych.common.v1 import sampling_pb2

pytestmark = pytest.mark.network

SCENARIO = Path(__file__).with_name("openai_scenario.py")
LIMIT_S = 120
TEMPLATE = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with `openai` alone."""
    folder = tmp_path_factory.mktemp("openai") / "venv"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, env=environment)
    command = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "openai"]
    subprocess.run(command, check=True, timeout=LIMIT_S, env=environment)
    return folder / "bin" / "python"


async def test_the_openai_package_gets_what_grpc_gets(python, tmp_path):
    async with Fleet(tmp_path) as fleet:
        flags = (str(embedded_model()), "--num-threads=1", "--max-num-seqs=16")
        engine = fleet.add(ServicePlan("engine", 0, flags))
        template = tmp_path / "template.jinja"
        template.write_text(TEMPLATE)
        flags = ("--http-port=0", "--text-workers=1", "--tool-parser=hermes", f"--chat-template={template}")
        frontend = fleet.add(ServicePlan("frontend", 0, (f"--engine={engine.address}", *flags)))
        await fleet.start()
        await fleet.until_routed()
        command = [str(python), str(SCENARIO), f"http://{frontend.http}/v1"]
        answer = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        seen = json.loads(answer.stdout)
        sampling = sampling_pb2.SamplingParams(**SAMPLED)
        async with open_channel(frontend.address, profile="public") as channel:
            completion = await inference_pb2_grpc.InferenceServiceStub(channel).GenerateOnce(
                generate_pb2.GenerateRequest(prompt=PROMPT, sampling=sampling), timeout=LIMIT_S
            )
            message = chat_message_pb2.ChatMessage(role="CHAT_ROLE_USER")
            message.parts.add(text=MESSAGE)
            chat = await chat_pb2_grpc.ChatServiceStub(channel).ChatOnce(
                chat_message_pb2.ChatRequest(messages=[message], sampling=sampling), timeout=LIMIT_S
            )
    assert seen["completion"] == seen["chunks"] == list(completion.outputs[0].token_ids)
    assert seen["chat"] == list(chat.outputs[0].token_ids)
    assert len(set(seen["completion"])) >= 20
    assert seen["texts"][0] == seen["text"]
    assert len(set(seen["texts"])) == 8
    assert seen["errors"] == [
        "NotFoundError model",
        "BadRequestError temperature",
        "BadRequestError max_tokens",
    ]
