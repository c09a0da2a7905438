"""The unmodified `openai` of PyPI over /v1/realtime, in an environment with that package alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.rig.processes import Fleet, ServicePlan
from tests.environments import environment_with, plain_environment
from tests.frontend_svc.fakes import FakeEngine, serving
from triptych.api.v1 import chat_message_pb2, chat_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_cli.services import embedded_model
from triptych_kit.channel import open_channel

SCENARIO = Path(__file__).with_name("realtime_scenario.py")
KEY = "key-of-the-client-0123456789"
LIMIT_S = 180


@pytest.mark.network
async def test_the_openai_package_has_turns_calls_and_cancelled_responses_over_a_websocket(tmp_path: Path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: client, role: client, key: {KEY}}}\n")
    keys.chmod(0o600)
    async with (
        Fleet(tmp_path) as fleet,
        serving(FakeEngine(), http_port=0, api_keys=str(keys)) as (_, guarded),
    ):
        engine = fleet.add(ServicePlan("engine", 0, (str(embedded_model()), "--num-threads=1")))
        flags = (f"--engine={engine.address}", "--http-port=0", "--text-workers=1", "--tool-parser=hermes")
        frontend = fleet.add(ServicePlan("frontend", 0, flags))
        await fleet.start()
        await fleet.until_routed()
        assert guarded.servers.http is not None
        bases = [f"http://{address}/v1" for address in (frontend.http, await guarded.servers.http.start())]
        python = await asyncio.to_thread(environment_with, "openai[realtime]", folder=tmp_path / "venv")
        answer = await asyncio.to_thread(
            subprocess.run,
            (str(python), str(SCENARIO), *bases, KEY),
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        await guarded.servers.http.stop(0)
        assert answer.returncode == 0, answer.stderr[-3000:]
        seen = json.loads(answer.stdout)
        roles = ("CHAT_ROLE_SYSTEM", "CHAT_ROLE_USER")
        messages = [
            chat_message_pb2.ChatMessage(role=role, parts=[chat_message_pb2.ChatPart(text=text)])
            for role, text in zip(roles, ("Tell a story", "Once upon a time"), strict=True)
        ]
        sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=12, seed=7)
        async with open_channel(frontend.address, profile="public") as channel:
            expected = await chat_pb2_grpc.ChatServiceStub(channel).ChatOnce(
                chat_message_pb2.ChatRequest(messages=messages, sampling=sampling), timeout=LIMIT_S
            )
    assert seen["turns"][0] == seen["async"] == expected.outputs[0].message.parts[0].text
    assert seen["statuses"] == ["in_progress", "cancelled", "incomplete"]
    assert seen["call"]["city"] in ("Paris", "Pisa")
    assert seen["error"] == ["invalid_request_error", "unimplemented", "type"]
    assert seen["by_key"] == [101, 401]
