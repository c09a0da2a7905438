"""What wrong keys cost at a `triptych serve`."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.rig.processes import LOOPBACK
from tests.chaos.served import ServedStack

pytestmark = pytest.mark.chaos

_KEYS = {"a": "key-of-tenant-a-0123", "b": "key-of-tenant-b-0123"}
_LIMIT_S = 120.0
_NUM_GUESSING = 8
_GUESS_S = 2.0


def _write_keys(folder: Path) -> Path:
    file = folder / "keys.yaml"
    file.touch(0o600)
    file.write_text("".join(f"- {{name: {name}, key: {key}, role: client}}\n" for name, key in _KEYS.items()))
    return file


async def test_wrong_keys_are_one_line_of_the_log_and_a_count(tmp_path: Path) -> None:
    keys = _write_keys(tmp_path)
    statuses: Counter[int] = Counter()

    def got(stack: ServedStack, path: str, key: str) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection(stack.http, timeout=_LIMIT_S)) as connection:
            connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    async def guess(stack: ServedStack) -> None:
        until = time.perf_counter() + _GUESS_S
        while time.perf_counter() < until:
            status, _ = await asyncio.to_thread(got, stack, "/v1/models", "key-of-a-stranger-012")
            statuses[status] += 1

    async with ServedStack(tmp_path, (f"--api-keys={keys}",)) as stack:
        await asyncio.gather(*(guess(stack) for _ in range(_NUM_GUESSING)))
        _, metrics = await asyncio.to_thread(got, stack, "/metrics", _KEYS["b"])
        lines = [record for record in stack.log_records("call") if record.get("reason") == "UNKNOWN_KEY"]
    assert statuses.keys() == {401}
    assert f'refused_credentials_total{{reason="UNKNOWN_KEY"}} {statuses.total()}.0' in metrics
    assert [record["client"] for record in lines] == [LOOPBACK]
