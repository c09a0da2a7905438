"""Once they serve, no process unpickles, evaluates, compiles or starts anything, whatever is asked of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.processes import running_async
from tests.system.stack import Stack
from triptych.api.v1 import chat_message_pb2, chat_pb2_grpc, generate_pb2, tokenize_pb2, tokenizer_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_cli.services import embedded_model
from triptych_kit.process.child import Child

HOOK = Path(__file__).with_name("audit_hook")
NUM_ROUNDS = 12
SCHEMA = '{"type": "object", "properties": {"n": {"enum": [%d]}}, "required": ["n"]}'


async def ask_everything(stack: Stack, frontend: Child, number: int) -> None:
    """One request of each kind."""
    sampling = sampling_pb2.SamplingParams(
        max_tokens=16, seed=number, temperature=1.0, logprobs=2, stop=["zebra"]
    )
    inference = stack.inference(frontend)
    chat = chat_pb2_grpc.ChatServiceStub(stack.channel(frontend))
    tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(stack.channel(frontend))
    await inference.GenerateOnce(generate_pb2.GenerateRequest(prompt=f"Once {number}", sampling=sampling))
    constrained = generate_pb2.GenerateRequest(prompt="Once", sampling=sampling)
    constrained.sampling.structured_output.json_schema = SCHEMA % number
    await inference.GenerateOnce(constrained)
    message = chat_message_pb2.ChatMessage(role=chat_message_pb2.CHAT_ROLE_USER)
    message.parts.add(text=f"__import__('os').system('true') {{{{ {number} }}}}")
    await chat.ChatOnce(chat_message_pb2.ChatRequest(messages=[message], sampling=sampling))
    await tokenizer.Tokenize(tokenize_pb2.TokenizeRequest(text=f"eval({number})"))


async def test_nothing_is_evaluated_or_started_by_requests(tmp_path: Path) -> None:
    environment = {
        "AUDIT_FOLDER": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]),
    }
    async with Stack(environment) as stack:
        trio = await stack.start_all(
            str(embedded_model()), "--num-threads=1", frontend_flags=("--text-workers=1",)
        )
        # What is needed for the first time is imported, and the model's template compiled.
        await ask_everything(stack, trio.frontend, 0)
        (tmp_path / "READY").touch()
        for number in range(1, NUM_ROUNDS):
            await ask_everything(stack, trio.frontend, number)
        events = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name.isdigit()}
        # A process that does evaluate something is noticed.
        program = (sys.executable, "-c", "eval('1')")
        async with running_async(*program, env={**os.environ, **environment}) as one:
            assert await one.wait() == 0
        (tmp_path / "READY").rename(tmp_path / "DONE")
    assert len(list(tmp_path.glob("loaded-*"))) >= 4
    assert "compile" in (tmp_path / str(one.pid)).read_text()
    assert events == {}
