"""`triptych run-batch` on a real stack yields what the same requests yield one by one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

from launcher.services import embedded_model
from tests.system.generation import collect, random_prompt, request_of
from tests.system.stack import Stack, address_of

NUM_LINES = 24
MAX_TOKENS = 24
RUN_LIMIT_S = 120.0


async def test_lines_are_answered_like_requests_of_their_own(tmp_path: Path) -> None:
    rng = random.Random(12)
    prompts = [random_prompt(rng, rng.choice((3, 20, 90)), 2000) for _ in range(NUM_LINES)]
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    lines = [
        {
            "custom_id": str(index),
            "call": "generate",
            "body": {"token_ids": {"ids": prompt}, "sampling": sampling},
        }
        for index, prompt in enumerate(prompts)
    ]
    chat = {
        "model": "",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    lines.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with Stack() as stack:
        trio = await stack.start_all(str(embedded_model()), "--num-threads=1")
        stub = stack.inference(trio.frontend)
        expected = [await collect(stub, request_of(prompt, MAX_TOKENS)) for prompt in prompts]
        err = await _run_batch(address_of(trio.frontend), source, output)
    assert err == f"{NUM_LINES + 1} lines: {NUM_LINES + 1} answered, 0 failed, 0 done before\n"
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["custom_id"] for result in results] == [*map(str, range(NUM_LINES)), "chat"]
    outputs = [result["response"]["outputs"][0] for result in results]
    assert [each["token_ids"] for each in outputs[:-1]] == [answer.token_ids for answer in expected]
    assert [each["text"] for each in outputs[:-1]] == [answer.text for answer in expected]
    assert len({token_id for answer in expected for token_id in answer.token_ids}) >= 20
    assert outputs[-1]["message"]["parts"][0]["text"]


async def _run_batch(address: str, source: Path, output: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "launcher.cli", "run-batch", f"--url=grpc://{address}", "-i", str(source), "-o", str(output)),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    _, err = await asyncio.wait_for(process.communicate(), RUN_LIMIT_S)
    assert process.returncode == 0, err
    return err.decode()
