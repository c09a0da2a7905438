"""A frontend that is killed: its clients turn to another one and get the rest of what they would have got."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import dataclass, field
from typing import Any

from tests.system.checkpoints import VOCAB_SIZE
from tests.system.generation import random_prompt
from tests.system.stack import WAIT_LIMIT_S, Stack, address_of
from triptych_client.aio import Client
from triptych_client.events import Delta, Event, Finished, Started

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


@dataclass
class Output:
    """All that a client was told of one output, put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass
class Read:
    """One stream as its reader saw it, and whether enough has come to strike."""

    events: list[Event] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

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
    stream = client.generate(
        prompt,
        **{"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **options},
        orphan_grace_ms=GRACE_MS,
    )
    async for event in stream:
        seen.events.append(event)
        if len(seen.events) > 10:
            seen.has_begun.set()
    seen.has_begun.set()


async def read_all(client: Client, prompts: list[list[int]]) -> tuple[list[Read], asyncio.Future[list[None]]]:
    """The streams, every one of which has begun, and what ends with all of them."""
    seen = [Read() for _ in prompts]
    reading = asyncio.gather(
        *(
            read(client, prompt, options, one)
            for prompt, options, one in zip(prompts, STREAMS, seen, strict=True)
        )
    )
    async with asyncio.timeout(WAIT_LIMIT_S):
        await asyncio.gather(*(one.has_begun.wait() for one in seen))
    return seen, reading


async def test_clients_of_a_killed_frontend_get_the_rest_from_the_other_one(llama: str) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, 12, VOCAB_SIZE) for _ in STREAMS]
    async with Stack() as stack:
        engine = await stack.start("engine", llama, "--port=0", "--no-enable-prefix-caching")
        known = f"--engine={address_of(engine)}"
        frontends = [await stack.start("frontend", "--port=0", known, index=index) for index in range(2)]
        for frontend in frontends:
            await stack.ready("frontend", frontend)
        view = stack.engine(engine)
        async with Client(f"ipv4:{','.join(map(address_of, frontends))}") as client:
            expected, reading = await read_all(client, prompts)
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
            before = await view.until_idle()
            seen, reading = await read_all(client, prompts)
            os.kill(frontends[0].pid, signal.SIGKILL)
            num_cut = sum(not one.outputs[0].finished for one in seen)
            await asyncio.wait_for(reading, WAIT_LIMIT_S)
        after = await view.until_idle()
        assert not frontends[0].is_running
    assert num_cut >= 6
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
