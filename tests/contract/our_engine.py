"""An engine of ours as a process with the embedded model, for tests with second implementations."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from tests.contract.scripted_engine import EOS_TOKEN_ID, ScriptedEngine
from tests.engine_svc.session.service_rig import StreamClient, make_entry
from tests.system.generation import collect, request_of
from tests.system.stack import WAIT_LIMIT_S, Stack, address_of
from triptych.api.v1 import inference_pb2_grpc
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2
from triptych_cli.services import embedded_model
from triptych_kit.process.child import Child

# Keywords that no grammar backend has, at an engine that rewrites them.
SCHEMA = {
    "$defs": {"legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "type": "object",
    "properties": {
        "legs": {"$ref": "#/$defs/legs"},
        "kind": {"oneOf": [{"const": "crab"}, {"const": "fox"}]},
    },
    "patternProperties": {"^x": {"type": "null"}},
    "required": ["legs", "kind"],
    "additionalProperties": False,
}
# Where this process is not run for seconds, the engine drops the connection of its client.
_MAX_TRIES = 5


class OurEngine:
    """A running engine of ours."""

    def __init__(self, stack: Stack, child: Child) -> None:
        self.child = child
        self.address = address_of(child)
        self.view = stack.engine(child)
        self._stub = engine_pb2_grpc.EngineCoreServiceStub(stack.channel(child))

    async def greedy(
        self, prompts: Sequence[list[int]], num_tokens: int, **fields: object
    ) -> list[list[int]]:
        """What it generates for a client that is not disturbed. fields: of each ADD besides."""
        options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        entries = [make_entry(number, prompt=one, **options) for number, one in enumerate(prompts)]
        for entry in entries:
            entry.MergeFrom(add_pb2.AddEntry(**fields))
        for _ in range(_MAX_TRIES):
            client = StreamClient(self._stub, "reference")

            def is_over(client: StreamClient = client) -> bool:
                return client.is_over or len(client.finished) == len(prompts)

            await client.open()
            await client.add(*entries)
            await client.until(is_over, patience_s=WAIT_LIMIT_S)
            client.call.cancel()
            if len(client.finished) == len(prompts):
                return [client.tokens[number] for number in range(len(prompts))]
        raise TimeoutError(f"the stream of a client ended {_MAX_TRIES} times before its requests")

    async def facts(self) -> tuple[session_pb2.Ready, dict[str, bytes]]:
        """What it announces, and its files by their digests."""
        info = await self._stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=WAIT_LIMIT_S)
        files: dict[str, bytes] = {}
        async for part in self._stub.GetArtifacts(engine_pb2.GetArtifactsRequest(), timeout=WAIT_LIMIT_S):
            files[part.artifact.sha256] = files.get(part.artifact.sha256, b"") + part.chunk
        return info.ready, files


async def start_engine(stack: Stack, *flags: str) -> OurEngine:
    child = await stack.start("engine", str(embedded_model()), "--port=0", *flags)
    await stack.ready("engine", child)
    return OurEngine(stack, child)


async def until_both_used(
    stub: inference_pb2_grpc.InferenceServiceStub, ours: OurEngine, second: ScriptedEngine
) -> None:
    """Send requests until each of the two engines of a frontend has got one."""
    num_finished = (await ours.view.stats()).num_finished
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not second.accepted or (await ours.view.stats()).num_finished == num_finished:
            await collect(stub, request_of(prompts_of(0, 1)[0], 1))


def prompts_of(seed: int, num_prompts: int) -> list[list[int]]:
    """Random prompts that every engine of these tests takes."""
    rng = random.Random(seed)
    return [[rng.randrange(1, EOS_TOKEN_ID) for _ in range(8)] for _ in range(num_prompts)]


def check_language(answers: Sequence[Sequence[int]]) -> None:
    """At least one answer came to its end, and each is in the language of the schema."""
    assert answers
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    for token_ids in answers:
        pytest.importorskip("jsonschema").validate(json.loads(tokenizer.decode(token_ids)), SCHEMA)
