"""A frontend that is killed takes its own streams with it, and nothing else."""

from __future__ import annotations

import asyncio
import statistics
import time

import grpc
import pytest
import pytest_asyncio

from benchmarks.rig import faults
from benchmarks.rig.processes import ServiceProcess
from benchmarks.rig.streams import Load, StreamRecord
from tests.chaos.scenarios import STANDARD
from tests.chaos.scene import NUM_STREAMS, NUM_TOKENS
from tests.chaos.stacks import Stack, Stacks, cases_with_marks

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="session")]

# What an engine keeps of a session whose frontend may come back, and then a little.
REPLAY_WINDOW_S = 5.0
FREE_WITHIN_S = 5.0
# Long before the deadlines of the calls.
TOLD_WITHIN_S = 5.0
_MOMENT_LIMIT_S = 60.0
_MEDIAN_TOKENS = 20


@pytest_asyncio.fixture(loop_scope="session")
async def stack(stacks: Stacks) -> Stack:
    """Two frontends over two engines."""
    return await stacks.get(STANDARD)


async def test_the_other_frontend_s_streams_are_clean_and_no_block_stays(
    stacks: Stacks, stack: Stack
) -> None:
    cases = cases_with_marks(NUM_STREAMS, NUM_TOKENS)
    oracle = await stacks.oracle(stack, cases)
    half = NUM_STREAMS // 2
    doomed, kept = Load(label=stacks.label()), Load(label=stacks.label())
    doomed.send(stack.channel(0), cases[:half])
    kept.send(stack.channel(1), cases[half:NUM_STREAMS])
    await _until_tokens([*doomed.records, *kept.records])
    struck_at = time.monotonic()
    await faults.kill(stack.frontends[0])
    await doomed.finish()
    # What had come in before the strike may be the end of a stream.
    cut = [record for record in doomed.records if record.code is not grpc.StatusCode.OK]
    assert len(cut) > half // 2
    assert {record.code for record in cut} == {grpc.StatusCode.UNAVAILABLE}
    whole = [record for record in doomed.records if record.code is grpc.StatusCode.OK]
    assert [str(violation) for violation in oracle.violations(whole)] == []
    ended_s = max(record.ended_at or 0.0 for record in cut) - struck_at
    await kept.finish()
    await _until_no_block_is_used(stack.engines)
    freed_s = time.monotonic() - struck_at
    print(
        f"\nF1 kill a frontend: its clients were told after {ended_s * 1000:.0f} ms, its blocks free after"
        f" {freed_s:.2f} s; limits times {stack.calibration.scale:.2f}"
    )
    assert [str(violation) for violation in oracle.violations(kept.records)] == []
    assert ended_s < TOLD_WITHIN_S * stack.calibration.scale
    assert freed_s < (REPLAY_WINDOW_S + FREE_WITHIN_S) * stack.calibration.scale
    assert await stacks.leaks() == []


async def _until_tokens(records: list[StreamRecord]) -> None:
    async with asyncio.timeout(_MOMENT_LIMIT_S):
        while statistics.median(record.num_tokens for record in records) < _MEDIAN_TOKENS:  # noqa: ASYNC110  Streams only record.
            await asyncio.sleep(0.002)


async def _until_no_block_is_used(engines: list[ServiceProcess]) -> None:
    async with asyncio.timeout(_MOMENT_LIMIT_S):
        for engine in engines:
            while (await engine.status())["used_blocks"]:  # noqa: ASYNC110  Nor do engines tell.
                await asyncio.sleep(0.02)
