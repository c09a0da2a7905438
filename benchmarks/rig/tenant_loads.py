"""What one tenant sends to keep others waiting, and a process that sends it.

Answers `{"begin": NAME}` when the load is under way, and `{"end": NAME}` with the statuses of its requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.rig.lines import Line, answer_lines, give_way, send_line

_LIMIT_S = 120.0
_SETTLE_S = 1.0
_DRIP_S = 0.5
_AGAIN_S = 0.2  # after a refusal


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are sent again when they have ended. is_slow: a byte of their bodies at a time."""

    num_at_once: int
    path: str
    body: Callable[[int], bytes]  # by the number of the request
    is_slow: bool = False


def completion(number: int, **fields: object) -> bytes:
    return json.dumps({"prompt": f"Number {number}", "max_tokens": 1, **fields}).encode()


def new_schema(number: int) -> bytes:
    """A small schema that was not sent before."""
    schema = {"type": "object", "properties": {f"p{number}": {"enum": ["a", "b"]}}}
    return completion(number, response_format=_response_format(schema))


def _alternatives(depth: int, number: int) -> dict[str, object]:
    if not depth:
        return {"type": "string"}
    return {
        "anyOf": [
            {"type": "object", "properties": {f"a{number}_{index}": _alternatives(depth - 1, number)}}
            for index in range(8)
        ]
    }


def _costly_schema(number: int) -> bytes:
    """Seconds of work to check."""
    return completion(number, response_format=_response_format(_alternatives(4, number)))


def _response_format(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def text(num_bytes: int) -> Callable[[int], bytes]:
    """To be tokenized."""
    return lambda number: json.dumps({"prompt": f"{number} " + "some words " * (num_bytes // 11)}).encode()


LOADS = {
    "schemas": Load(32, "/v1/completions", _costly_schema),
    "long texts": Load(64, "/tokenize", text(200_000)),
    "slow bodies": Load(1100, "/v1/completions", completion, is_slow=True),
    "open requests": Load(1200, "/v1/completions", lambda number: completion(number, max_tokens=64)),
}


async def exchange(
    address: str, key: str, path: str, body: bytes, *, limit_s: float = _LIMIT_S, drip_s: float = 0.0
) -> str:
    """POST on a connection of its own; the status and its code, or `closed`, or `late` after the limit."""
    host, _, port = address.rpartition(":")
    writer = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode())
            answering = asyncio.ensure_future(reader.read())
            try:
                for start in range(0, len(body) if drip_s else 0):
                    if answering.done():
                        break
                    writer.write(body[start : start + 1])
                    await asyncio.sleep(drip_s)
                if not drip_s:
                    writer.write(body)
                return _status_in(await answering)
            finally:
                answering.cancel()
    except TimeoutError:
        return "late"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        if writer is not None:
            writer.transport.abort()


def _status_in(answer: bytes) -> str:
    head, _, content = answer.partition(b"\r\n\r\n")
    if not head:
        return "closed"
    status = head.split(b" ", 2)[1].decode()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(content)['error']['code']}"
    return status


class Sender:
    def __init__(self, address: str, key: str) -> None:
        self._address, self._key = address, key
        self._statuses: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers: Iterator[int] = itertools.count()

    async def answer(self, line: Line) -> Line:
        if "begin" in line:
            load = LOADS[line["begin"]]
            self._statuses.clear()
            self._tasks = [asyncio.ensure_future(self._repeat(load)) for _ in range(load.num_at_once)]
            await asyncio.sleep(_SETTLE_S)
            return {"begun": len(self._tasks)}
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return {"statuses": dict(self._statuses)}

    async def _repeat(self, load: Load) -> None:
        while True:
            body = load.body(next(self._numbers))
            status = await exchange(
                self._address, self._key, load.path, body, drip_s=_DRIP_S if load.is_slow else 0.0
            )
            self._statuses[status] += 1
            if not status.startswith("200"):
                await asyncio.sleep(_AGAIN_S)


async def _serve(address: str, key: str) -> None:
    send_line({})
    await answer_lines(Sender(address, key).answer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--key", required=True)
    options = parser.parse_args()
    give_way()
    asyncio.run(_serve(options.address, options.key))


if __name__ == "__main__":
    main()
