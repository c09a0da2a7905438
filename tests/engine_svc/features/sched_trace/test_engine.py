"""An engine with a real model writes the trace that its flag asks for, under each policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_svc.config import EngineConfig
from engine_svc.features.sched_trace.replay import read_lines, replay
from engine_svc.scheduler.policies import POLICIES
from tests.engine_svc.build.test_engine import Built
from tests.engine_svc.features.sched_trace.tracing import build
from triptych_cli.services import embedded_model


@pytest.mark.parametrize("policy", POLICIES)
def test_the_trace_of_an_engine_replays_under_each_policy(policy: str, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    config = EngineConfig(
        str(embedded_model()),
        scheduling_policy=policy,
        num_kv_blocks=12,
        max_model_len=128,
        max_num_batched_tokens=32,
        num_threads=1,
        sched_trace_path=str(path),
        index=1,
    )
    prompts = [[*range(100, 120), *range(200, 205 + number)] for number in range(6)]
    Built(config).generate(prompts, 40)
    lines = (tmp_path / "trace-1.jsonl").read_bytes().splitlines()
    (run,) = replay(read_lines(lines), build)
    assert run.difference is None
    assert (run.setup.policy, run.setup.scheduler.max_steps_in_flight) == (policy, 2)
    assert run.num_requests == 6
    assert min(run.num_preemptions, run.num_hits) > 0
