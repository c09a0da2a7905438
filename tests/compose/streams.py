"""Streams without end against one frontend: runs in a container, and knows the public client alone.

`python streams.py HOST:PORT NUM_STREAMS`, with a key in TRIPTYCH_API_KEY. Prints a line of JSON as soon as
the first token is there, one when every prompt was answered once, and the last when standard input has ended
and all streams are at their ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from triptych_client.aio import Client
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Finished
from triptych_client.retry import RetryPolicy

NUM_PROMPTS = 32
MAX_TOKENS = 160
# From nothing: until an engine is ready, a frontend answers UNAVAILABLE.
START_LIMIT_S = 120.0
# A frontend that is replaced is away for a few seconds.
PATIENT = RetryPolicy(max_attempts=40, first_backoff_s=0.2, max_backoff_s=1.0)


def report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def ask(client: Client, number: int, max_tokens: int = MAX_TOKENS) -> list[int]:
    """The ids that prompt `number` is answered with; every second one is sampled, by a seed."""
    ids: list[int] = []
    ends = 0
    stream = client.generate(
        f"Tell me a story about number {number} and a lantern.",
        max_tokens=max_tokens,
        ignore_eos=True,
        temperature=0.8 * (number % 2),
        seed=number,
        timeout_s=120,
        # What a frontend leaves undone when it is replaced goes on at the next one.
        orphan_grace_ms=5_000,
    )
    async for event in stream:
        if isinstance(event, Delta):
            ids += event.token_ids
        elif isinstance(event, Finished):
            ends += 1
    if ends != 1 or len(ids) != max_tokens:
        raise RuntimeError(f"prompt {number} has {ends} ends and {len(ids)} tokens")
    return ids


class Load:
    """What came of all streams."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.expected: dict[int, list[int]] = {}
        self.num_streams = self.num_different = 0
        self.errors: list[str] = []
        self.is_over = False

    async def learn(self, num_streams: int) -> None:
        todo = iter(range(NUM_PROMPTS))

        async def work() -> None:
            for number in todo:
                self.expected[number] = await ask(self._client, number)

        await asyncio.gather(*(work() for _ in range(num_streams)))

    async def repeat(self, first: int) -> None:
        number = first
        while not self.is_over:
            number = (number + 1) % NUM_PROMPTS
            self.num_streams += 1
            try:
                ids = await ask(self._client, number)
            except (TriptychError, RuntimeError) as error:
                self.errors.append(f"prompt {number}: {error}")
                continue
            self.num_different += ids != self.expected[number]


async def first_token(client: Client) -> None:
    until = time.monotonic() + START_LIMIT_S
    while True:
        try:
            await ask(client, 0, max_tokens=1)
        except TriptychError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.05)
        else:
            return


async def main(address: str, num_streams: int) -> None:
    client = Client(address, retry=PATIENT, api_key=os.environ["TRIPTYCH_API_KEY"])
    await first_token(client)
    report(first_token_at=time.time())
    load = Load(client)
    await load.learn(num_streams)
    report(num_ids=len({id_ for ids in load.expected.values() for id_ in ids}))
    streams = [asyncio.create_task(load.repeat(first)) for first in range(num_streams)]
    await asyncio.to_thread(sys.stdin.read)
    load.is_over = True
    await asyncio.gather(*streams)
    report(num_streams=load.num_streams, num_different=load.num_different, errors=load.errors)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
