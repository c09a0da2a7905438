"""Attacks on a real frontend's HTTP listener, beside 16 streams of the embedded model that do not change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from tests.frontend_svc.protocols.raw_http import connected, exchange, post
from tests.frontend_svc.protocols.test_http_bad_input import get
from tests.processes import running_async, source_environment
from tests.system.http_attacker import NAMES
from triptych_cli.services import embedded_model

pytestmark = pytest.mark.chaos

NUM_STREAMS = 16
NUM_TOKENS = 96
MIN_DISTINCT = 20
ATTACK_S = 1.5  # each
MAX_CONNECTIONS = 256
# Of the frontend above its size before: the bodies that are received at once, twice, and buffers.
MAX_GROWTH_BYTES = 600 * 2**20
MAX_HEALTH_S = 5.0  # on a busy machine
LIMIT_S = 60.0
# 503 is for connections beyond the limit.
FINE = {100, 200, 400, 403, 404, 405, 408, 413, 415, 421, 429, 431, 501, 503, 505}


def memory_of(process: ServiceProcess) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


class Streams:
    """The same 16 requests again and again; each answer must be the first one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_rounds = self.num_refused = 0
        self.gaps_s: list[float] = []
        self.is_over = False

    async def answer(self, index: int) -> list[int]:
        """Asked for again until it begins, as clients do where there are too many connections."""
        while (ids := await self._try_answer(index)) is None:
            self.num_refused += 1
            await asyncio.sleep(0.05)
        return ids

    async def _try_answer(self, index: int) -> list[int] | None:
        fields: dict[str, Any] = {
            "prompt": f"Once upon a time number {index}",
            "stream": True,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": 0.9,
            "seed": index,
        }
        ids: list[int] = []
        async with connected(self.address) as connection:
            await connection.send(post(json.dumps(fields).encode()))
            try:
                head = await connection.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            if b" 503 " in head.split(b"\r\n")[0]:
                return None
            assert b" 200 " in head.split(b"\r\n")[0], head
            last_at = 0.0
            while int(await connection.reader.readline(), 16):
                event = (await connection.reader.readuntil(b"\n\n")).strip().removeprefix(b"data: ")
                await connection.reader.readline()
                if event != b"[DONE]":
                    for choice in json.loads(event)["choices"]:
                        ids += choice.get("token_ids", ())
                now = time.monotonic()
                if last_at:
                    self.gaps_s.append(now - last_at)
                last_at = now
        return ids

    async def answers(self) -> list[list[int]]:
        async with asyncio.timeout(LIMIT_S):
            return list(await asyncio.gather(*map(self.answer, range(NUM_STREAMS))))

    async def repeat(self, expected: list[list[int]]) -> None:
        while not self.is_over:
            assert await self.answers() == expected
            self.num_rounds += 1

    def p99_s(self) -> float:
        gaps, self.gaps_s = sorted(self.gaps_s), []
        return gaps[len(gaps) * 99 // 100] if gaps else 0.0


@contextlib.asynccontextmanager
async def stack(folder: Path) -> AsyncGenerator[ServiceProcess, None]:
    async with Fleet(folder) as fleet:
        flags = (str(embedded_model()), "--num-threads=1", "--max-num-seqs=64")
        engine = fleet.add(ServicePlan("engine", 0, flags))
        flags = ("--http-port=0", f"--http-max-connections={MAX_CONNECTIONS}", "--slow-reader-s=1")
        frontend = fleet.add(ServicePlan("frontend", 0, (f"--engine={engine.address}", *flags)))
        await fleet.start()
        await fleet.until_routed()
        yield frontend


async def attack(address: str, name: str) -> set[int]:
    """Attack from a process of its own; the statuses of the answers."""
    command = [sys.executable, "-m", "tests.system.http_attacker", address, name, str(ATTACK_S)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.DEVNULL}
    async with running_async(*command, env=source_environment(), **pipes) as process:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
    assert process.returncode == 0
    return {status for status, _ in json.loads(output) if status is not None}


async def watch(frontend: ServiceProcess, peaks: list[int], health_s: list[float]) -> None:
    while True:
        peaks.append(memory_of(frontend))
        began_at = time.monotonic()
        # A connection whose request is late may be closed for another one: probes ask again.
        while (reply := await exchange(frontend.http, get("/health"))) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert reply.status == 200
        health_s.append(time.monotonic() - began_at)
        await asyncio.sleep(0.1)


async def test_attacks_change_no_stream_and_the_frontend_stays_small(tmp_path):
    async with stack(tmp_path) as frontend:
        streams = Streams(frontend.http)
        expected = await streams.answers()
        assert min(len(set(ids)) for ids in expected) >= MIN_DISTINCT
        assert len({tuple(ids) for ids in expected}) == NUM_STREAMS
        streams.p99_s()
        assert await streams.answers() == expected
        report: dict[str, Any] = {"undisturbed": round(streams.p99_s(), 3)}
        before, pid = memory_of(frontend), frontend.pid
        statuses: set[int] = set()
        peaks: list[int] = []
        health_s: list[float] = []
        watching = asyncio.ensure_future(watch(frontend, peaks, health_s))
        repeating = asyncio.ensure_future(streams.repeat(expected))
        for name in NAMES:
            statuses |= await attack(frontend.http, name)
            assert not watching.done(), watching
            assert not repeating.done(), repeating
            report[name] = (round(streams.p99_s(), 3), (max(peaks) - before) >> 20, round(max(health_s), 3))
            print(name, report[name], streams.num_rounds, streams.num_refused, flush=True)
            peaks.clear()
            health_s.clear()
            peaks.append(memory_of(frontend))
            health_s.append(0.0)
        streams.is_over = True
        await repeating
        watching.cancel()
        assert await streams.answers() == expected
        status = await frontend.status()
        print(report, sorted(statuses), streams.num_rounds, streams.num_refused)
        assert frontend.pid == pid
        assert frontend.is_running
        assert status["num_open_requests"] == 0
        assert max(growth for _, growth, _ in list(report.values())[1:]) << 20 <= MAX_GROWTH_BYTES
        assert max(slowest for _, _, slowest in list(report.values())[1:]) <= MAX_HEALTH_S
        assert statuses <= FINE
        assert not [one for one in frontend.log_records() if "incident" in str(one)]
