"""A client that attacks an HTTP listener. Prints as JSON how often it was answered with which status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.frontend_svc.protocols.raw_http import connected, exchange, post
from tests.frontend_svc.protocols.test_http_bad_input import BODIES, TRANSPORT, get, mutated

NAMES = (
    "malformed", "idle_connections", "slow_requests", "large_bodies", "bodies_that_stop", "tiny_chunks",
    "unread_answers", "pipelines",
)  # fmt: skip
_NUM_SLOW = 512


async def until_late(ends_at: float, attack: Callable[[], Awaitable[object]]) -> None:
    while time.monotonic() < ends_at:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await attack()
        await asyncio.sleep(0)


class Attacks:
    """Each goes on for some seconds; what has not ended by then is cut off."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.rng = random.Random(7)
        self.statuses: Counter[int | None] = Counter()

    async def run(self, name: str, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + 0.5):
                await getattr(self, name)(time.monotonic() + seconds)

    async def malformed(self, ends_at: float) -> None:
        cases = [content for content, _, _ in (*TRANSPORT.values(), *BODIES.values())]

        async def attack() -> None:
            case = self.rng.choice(cases) if self.rng.random() < 0.5 else mutated(self.rng)
            async with connected(self.address) as connection:
                await connection.send(case)
                connection.writer.write_eof()
                reply = await connection.reply()
                self.statuses[None if reply is None else reply.status] += 1

        await asyncio.gather(*(until_late(ends_at, attack) for _ in range(4)))

    async def idle_connections(self, ends_at: float) -> None:
        async with contextlib.AsyncExitStack() as stack:
            while time.monotonic() < ends_at:
                for _ in range(50):
                    with contextlib.suppress(OSError):
                        await stack.enter_async_context(connected(self.address, limit=2**16))
                await asyncio.sleep(0.05)

    async def slow_requests(self, ends_at: float) -> None:
        begins = [
            b"GET /health HT",
            post(b"", "content-length: 999999"),
            post(b"", "transfer-encoding: chunked"),
        ]

        async def attack() -> None:
            async with connected(self.address, limit=2**16) as connection:
                await connection.send(self.rng.choice(begins))
                while time.monotonic() < ends_at:
                    await connection.send(b"1\r\n1\r\n")
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(until_late(ends_at, attack) for _ in range(_NUM_SLOW)))

    async def large_bodies(self, ends_at: float) -> None:
        size = 30 * 2**20
        bodies = [
            b'{"prompt": "' + b"a" * size + b'"}',
            b'{"prompt": [' + b"{}," * (size // 3) + b"1]}",
            b'{"prompt": [' + b"5," * (size // 2) + b"5]}",
        ]

        async def attack() -> None:
            reply = await exchange(self.address, post(self.rng.choice(bodies)))
            self.statuses[None if reply is None else reply.status] += 1

        await asyncio.gather(*(until_late(ends_at, attack) for _ in range(12)))

    async def bodies_that_stop(self, ends_at: float) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(40):
                connection = await stack.enter_async_context(connected(self.address))
                connection.writer.write(post(b" " * (20 * 2**20), f"content-length: {2**25}"))
            await asyncio.sleep(max(0.0, ends_at - time.monotonic()))

    async def tiny_chunks(self, ends_at: float) -> None:
        attack_bytes = post(b"1\r\na\r\n" * 100_000, "transfer-encoding: chunked")

        async def attack() -> None:
            await exchange(self.address, attack_bytes)

        await asyncio.gather(*(until_late(ends_at, attack) for _ in range(8)))

    async def unread_answers(self, ends_at: float) -> None:
        asked = {"prompt": "a", "stream": True, "max_tokens": 300, "logprobs": 20, "ignore_eos": True}
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(32):
                connection = await stack.enter_async_context(connected(self.address, limit=2**10))
                await connection.send(post(json.dumps(asked).encode()) * 20)
            await asyncio.sleep(max(0.0, ends_at - time.monotonic()))

    async def pipelines(self, ends_at: float) -> None:
        async def attack() -> None:
            async with connected(self.address) as connection:
                await connection.send(get("/v1/models") * 1000)
                while await connection.reply() is not None and time.monotonic() < ends_at:
                    pass

        await asyncio.gather(*(until_late(ends_at, attack) for _ in range(4)))


def main() -> None:
    address, name, seconds = sys.argv[1:]
    attacks = Attacks(address)
    asyncio.run(attacks.run(name, float(seconds)))
    print(json.dumps([[status, count] for status, count in attacks.statuses.items()]))


if __name__ == "__main__":
    main()
