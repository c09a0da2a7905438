"""Greedy output that falls into a loop ends where a request said, through three processes and the client."""

from __future__ import annotations

import asyncio

from launcher.services import embedded_model
from tests.system.stack import Stack, address_of
from triptych.common.v1 import sampling_pb2
from triptych_client.aio import Client
from triptych_client.events import Delta, Finished

# The packaged model tells its stories twice where nothing stops it.
PROMPTS = ("Once upon a time", "the the the the", "1 2 3 4 5")
MAX_TOKENS = 240
WIDE = sampling_pb2.RepetitionDetection(max_pattern_size=128, min_pattern_size=2, min_count=2)
NARROW = sampling_pb2.RepetitionDetection(max_pattern_size=8, min_count=3)
OFF = sampling_pb2.RepetitionDetection()


async def test_a_loop_ends_where_it_was_asked_to_and_runs_on_where_it_was_not() -> None:
    async with Stack() as stack:
        trio = await stack.start_all(str(embedded_model()), "--num-threads=1")
        async with Client(address_of(trio.frontend)) as client:
            free = await asyncio.gather(*(_generate(client, prompt, OFF) for prompt in PROMPTS))
            narrow = await asyncio.gather(*(_generate(client, prompt, NARROW) for prompt in PROMPTS))
            wide = await asyncio.gather(*(_generate(client, prompt, WIDE) for prompt in PROMPTS))
            whole = await client.generate_unary(
                PROMPTS[0],
                temperature=0.0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                repetition_detection=WIDE,
            )
    assert [(len(token_ids), reason) for token_ids, reason in free] == [(MAX_TOKENS, "length")] * len(PROMPTS)
    assert narrow == free
    ends = [_end_of_loop(token_ids, WIDE) for token_ids, _ in free]
    assert max(ends) < MAX_TOKENS
    assert wide == [(token_ids[:end], "repetition") for (token_ids, _), end in zip(free, ends, strict=True)]
    assert (list(whole.outputs[0].token_ids), whole.outputs[0].reason) == wide[0]
    print(ends)


async def _generate(
    client: Client, prompt: str, detection: sampling_pb2.RepetitionDetection
) -> tuple[list[int], str]:
    token_ids: list[int] = []
    reason = ""
    stream = client.generate(
        prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, repetition_detection=detection
    )
    async for event in stream:
        match event:
            case Delta():
                token_ids += event.token_ids
            case Finished():
                reason = event.reason
    return token_ids, reason


def _end_of_loop(token_ids: list[int], detection: sampling_pb2.RepetitionDetection) -> int:
    """The first length at which the output ends with one pattern as often as told; that of all without."""
    for end in range(1, len(token_ids)):
        for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
            tail = token_ids[max(0, end - size * detection.min_count) : end]
            if tail == tail[:size] * detection.min_count:
                return end
    return len(token_ids)
