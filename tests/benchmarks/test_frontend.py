"""The frontend's measurement: goals, kept rows, and a small run of real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from benchmarks.frontend import Goal, kept_rows
from benchmarks.frontend_processes import clients, frontend, synthetic_engine

WAIT_S = 60.0


def test_a_goal_is_missed_by_what_is_above_it_in_its_own_part() -> None:
    goal = Goal("cpu", "us", 60.0)
    rows = [{"part": "cpu", "us": 60.0}, {"part": "cpu", "us": 60.1}, {"part": "lag", "other": 99.0}]
    assert goal.misses(rows) == ["cpu: us is 60.10, the goal is at most 60"]


def test_rows_of_other_parts_stay_where_they_are_of_the_same_commit(tmp_path: Path) -> None:
    path = tmp_path / "frontend.json"
    assert kept_rows(path, "abc", ["cpu"]) == []
    path.write_text(json.dumps({"commit": "abc", "rows": [{"part": "cpu"}, {"part": "lag"}]}))
    assert kept_rows(path, "abc", ["cpu"]) == [{"part": "lag"}]
    assert kept_rows(path, "abd", ["cpu"]) == []


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
