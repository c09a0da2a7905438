"""The frontend's measurement: its promises, and a small run of real processes."""

from __future__ import annotations

import asyncio

from benchmarks.rig.frontend import clients, frontend, synthetic_engine
from benchmarks.scenarios.frontend import shortfalls

WAIT_S = 60.0


def test_what_is_above_the_promise_of_its_own_part_is_named() -> None:
    rows = [
        {"part": "cpu", "frontend_us_per_token": 60.0},
        {"part": "cpu", "frontend_us_per_token": 60.1},
        {"part": "lag", "loop_lag_p99_ms": 2.0},
    ]
    assert shortfalls(rows) == ["cpu: frontend_us_per_token is 60.10, at most 60 is promised"]


async def test_streams_chats_and_long_prompts_run_through_a_real_frontend() -> None:
    async with (
        synthetic_engine(50.0) as engine,
        frontend(engine, "--text-workers=1") as served,
        clients(served.announcement.address, streams=6, chats=2, connections=2) as streams,
        clients(served.announcement.address, prompts=2, prompt_chars=2000) as texts,
    ):
        async with asyncio.timeout(WAIT_S):
            while (await texts.counters())["num_prompts_done"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while (seen := await streams.counters())["num_begun"] < 6 or seen["num_tokens"] < 60:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        status = await served.status()
        assert served.tree_cpu_s() >= served.cpu_s() > 0
    assert seen["num_messages"] <= seen["num_tokens"] + 6
    # The streams do not end, and the prompts have.
    assert status["num_open_requests"] == 6
    assert status["event_loop_lag_max_ms"] >= status["event_loop_lag_p99_ms"] >= 0
