"""A frontend that is killed or stopped: its clients turn to another one and get the rest of their streams."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.rig.processes import LOOPBACK
from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import random_prompt
from tests.system.slowed_engine import Brake
from tests.system.stack import WAIT_LIMIT_S, Stack, address_of, listeners_of
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych_cli.serve.readiness import health_of
from triptych_client.aio import Client
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Event, Finished, Started
from triptych_kit.channel import open_channel
from triptych_kit.process.child import Child

_FAMILY = "ipv6" if ":" in LOOPBACK else "ipv4"

NUM_TOKENS = 400
GRACE_MS = 5000
SEEDED: dict[str, Any] = {"temperature": 0.9}
STREAMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {**SEEDED, "seed": 7},
    {**SEEDED, "seed": 8},
    {**SEEDED, "seed": 9, "n": 2},
    {"stop": ["the zq", "ju ju ju ju"]},
    {"logprobs": 2},
    {**SEEDED, "seed": 10, "n": 2, "logprobs": 1, "presence_penalty": 0.5},
)
NO_GRACE: dict[str, Any] = {"orphan_grace_ms": 0}
MIXED_STREAMS = (*STREAMS, *(NO_GRACE for _ in range(4)))


@dataclass
class Output:
    """All that a client received of one output, put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass
class Read:
    """One stream as its reader saw it, whether enough has come to strike, and whether all has."""

    events: list[Event] = field(default_factory=list)
    error: TriptychError | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, event: Event, num_outputs: int) -> None:
        """One event more; a slow reader gets many tokens with one."""
        self.events.append(event)
        if not self.has_begun.is_set():
            lengths = [len(output.token_ids) for output in self.outputs.values()]
            if len(lengths) == num_outputs and min(lengths) >= 10:
                self.has_begun.set()

    @property
    def outputs(self) -> dict[int, Output]:
        outputs: dict[int, Output] = {}
        for event in self.events:
            if isinstance(event, Started):
                continue
            output = outputs.setdefault(event.output_index, Output())
            assert not output.finished, "nothing comes after the end"
            if isinstance(event, Delta):
                output.token_ids += event.token_ids
                output.text += event.text
                output.logprobs += event.logprobs or ()
            else:
                output.finished.append(event)
        return outputs


async def read(client: Client, prompt: list[int], options: dict[str, Any], seen: Read) -> None:
    """Read a stream to its end, over as many frontends as that takes."""
    wanted = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "orphan_grace_ms": GRACE_MS}
    stream = client.generate(prompt, **{**wanted, **options})
    try:
        async for event in stream:
            seen.note(event, options.get("n", 1))
    except TriptychError as error:
        seen.error = error
    seen.has_begun.set()
    seen.is_over.set()


async def read_all(
    client: Client, prompts: list[list[int]], streams: Sequence[dict[str, Any]] = STREAMS
) -> tuple[list[Read], asyncio.Future[list[None]]]:
    """The streams, every one of which has begun, and what ends with all of them."""
    seen = [Read() for _ in prompts]
    reading = asyncio.gather(
        *(
            read(client, prompt, options, one)
            for prompt, options, one in zip(prompts, streams, seen, strict=True)
        )
    )
    async with asyncio.timeout(WAIT_LIMIT_S):
        await asyncio.gather(*(one.has_begun.wait() for one in seen))
    return seen, reading


@pytest.mark.chaos
async def test_clients_of_a_killed_frontend_get_the_rest_from_the_other_one(llama, tmp_path):
    rng = random.Random(4)
    prompts = [random_prompt(rng, 12, VOCAB_SIZE) for _ in STREAMS]
    brake = Brake(tmp_path)
    async with Stack(brake.environment) as stack:
        engine = await stack.start("engine", llama, "--port=0", "--no-enable-prefix-caching")
        known = f"--engine={address_of(engine)}"
        frontends = await stack.start_several("frontend", "--port=0", known, count=2)
        for frontend in frontends:
            await stack.ready("frontend", frontend)
        view = stack.engine(engine)
        async with Client(f"{_FAMILY}:{','.join(map(address_of, frontends))}") as client:
            expected, reading = await read_all(client, prompts)
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
            before = await view.until_idle()
            brake.apply()
            seen, reading = await read_all(client, prompts)
            os.kill(frontends[0].pid, signal.SIGKILL)
            assert not any(output.finished for one in seen for output in one.outputs.values())
            brake.release()
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
        after = await view.until_idle()
        assert not frontends[0].is_running
    for options, undisturbed, one in zip(STREAMS, expected, seen, strict=True):
        assert isinstance(one.events[0], Started)
        assert [type(event) for event in one.events].count(Started) == 1
        assert one.outputs == undisturbed.outputs, options
        assert sorted(one.outputs) == list(range(options.get("n", 1)))
    assert after.num_used_blocks == before.num_used_blocks == 0
    # Nothing was computed twice, and nothing was added again.
    assert after.num_finished == 2 * before.num_finished
    assert after.num_prompt_tokens == 2 * before.num_prompt_tokens
    assert after.num_generated_tokens == 2 * before.num_generated_tokens


def check_cut(expected: list[Read], seen: list[Read]) -> None:
    """Streams with a grace are whole, those without got the error of a frontend that left."""
    for options, undisturbed, one in zip(MIXED_STREAMS, expected, seen, strict=True):
        if options.get("orphan_grace_ms") == 0:
            assert one.error is not None
            failure = (one.error.status, one.error.reason, one.error.retry_after_ms)
            assert failure == (grpc.StatusCode.UNAVAILABLE, "DRAINING", 1000)
            got = one.outputs[0].token_ids
            assert got == undisturbed.outputs[0].token_ids[: len(got)]
        else:
            assert one.error is None
            assert [type(event) for event in one.events].count(Started) == 1
            assert one.outputs == undisturbed.outputs, options


async def ended(child: Child) -> str:
    await asyncio.wait_for(child.wait(), WAIT_LIMIT_S)
    return child.ending.partition(") ")[2]


@pytest.mark.chaos
@pytest.mark.parametrize("cause", ["deadline", "signal"])
async def test_clients_of_a_frontend_whose_drain_is_cut_go_on_at_the_other_one(llama, cause, tmp_path):
    rng = random.Random(5)
    prompts = [random_prompt(rng, 12, VOCAB_SIZE) for _ in MIXED_STREAMS]
    deadline_s = {"deadline": 1, "signal": 600}[cause]
    brake = Brake(tmp_path)
    async with Stack(brake.environment) as stack:
        engine = await stack.start("engine", llama, "--port=0", "--no-enable-prefix-caching")
        flags = ("--port=0", f"--engine={address_of(engine)}", f"--drain-deadline-s={deadline_s}")
        frontends = await stack.start_several("frontend", *flags, count=2)
        for frontend in frontends:
            await stack.ready("frontend", frontend)
        view = stack.engine(engine)
        async with Client(f"{_FAMILY}:{','.join(map(address_of, frontends))}") as client:
            expected, reading = await read_all(client, prompts, MIXED_STREAMS)
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
            before = await view.until_idle()
            brake.apply()
            seen, reading = await read_all(client, prompts, MIXED_STREAMS)
            frontends[0].terminate()
            if cause == "signal":
                async with asyncio.timeout(WAIT_LIMIT_S):
                    # Two signals at once are one: the second is sent when the first has been noticed.
                    while await health_of(address_of(frontends[0]), "", 10.0) == "SERVING":
                        pass
                frontends[0].terminate()
            assert await ended(frontends[0]) == "exited with code 0"
            assert not any(one.outputs[0].finished for one in seen)
            brake.release()
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
        after = await view.until_idle()
    check_cut(expected, seen)
    assert after.num_used_blocks == before.num_used_blocks == 0
    # No prompt was computed twice, and what no client can go on with was not computed to its end.
    assert after.num_prompt_tokens == 2 * before.num_prompt_tokens
    assert after.num_generated_tokens < 2 * before.num_generated_tokens


@pytest.mark.chaos
async def test_clients_of_a_worker_whose_drain_is_cut_go_on_at_its_sibling_at_the_same_address(
    llama: str, tmp_path: Path
) -> None:
    rng = random.Random(6)
    prompts = [random_prompt(rng, 12, VOCAB_SIZE) for _ in MIXED_STREAMS]
    brake = Brake(tmp_path)
    async with Stack(brake.environment) as stack:
        engine = await stack.start("engine", llama, "--port=0", "--no-enable-prefix-caching")
        flags = ("--port=0", f"--engine={address_of(engine)}", "--drain-deadline-s=1", "--workers=2")
        frontend = await stack.start("frontend", *flags)
        await stack.ready("frontend", frontend)
        view = stack.engine(engine)
        async with Client(address_of(frontend)) as client:
            expected, reading = await read_all(client, prompts, MIXED_STREAMS)
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
            before = await view.until_idle()
            brake.apply()
            seen, reading = await read_all(client, prompts, MIXED_STREAMS)
            os.kill(await busy_worker(frontend), signal.SIGTERM)
            async with asyncio.timeout(WAIT_LIMIT_S):
                # Those without a grace end when the drain is cut.
                await asyncio.gather(*(one.is_over.wait() for one in seen[len(STREAMS) :]))
            brake.release()
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
        after = await view.until_idle()
        assert frontend.is_running
    check_cut(expected, seen)
    assert after.num_used_blocks == before.num_used_blocks == 0
    assert after.num_prompt_tokens == 2 * before.num_prompt_tokens
    assert after.num_generated_tokens < 2 * before.num_generated_tokens


async def busy_worker(frontend: Child) -> int:
    """The process id of the worker that has the client's one connection, of two."""
    async with open_channel(listeners_of(frontend)[1], profile="public") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        first = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
    if any(value.key == "num_open_requests" and value.number for value in first.values):
        return int(first.pid)
    children = Path(f"/proc/{frontend.pid}/task/{frontend.pid}/children").read_text().split()
    (other,) = {int(pid) for pid in children} - {int(first.pid)}
    return other
