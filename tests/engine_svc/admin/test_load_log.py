"""The line about an engine's load: rates since the line before, and none while it is idle."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from engine_svc.admin.load_log import LoadLog
from engine_svc.loop.mailbox import LoopStats, StatsSnapshot
from engine_svc.scheduler.stats import SchedulerStats
from tests.engine_svc.scheduler.fakes import Stage
from triptych_kit.clock import FakeClock

FIELDS = (
    "running", "waiting", "kv_use_percent", "prompt_tokens_per_s", "output_tokens_per_s",
    "prefix_hit_percent",
)  # fmt: skip


class Rig:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._snapshot, self._clock, self._caplog = StatsSnapshot(), FakeClock(50.0), caplog
        self.log = LoadLog(self._snapshot, self._clock)

    def after_10_s(self, stats: LoopStats) -> list[tuple[object, ...]]:
        """The lines ten seconds later, with these statistics."""
        self._snapshot.post(stats)
        self._clock.advance(10.0)
        self._caplog.clear()
        with self._caplog.at_level(logging.INFO):
            self.log.write()
        return [tuple(vars(record).get(name) for name in FIELDS) for record in self._caplog.records]


def scheduler_stats(**fields: int) -> SchedulerStats:
    return replace(Stage(num_blocks=201).scheduler.stats(), **fields)


def test_a_line_has_requests_blocks_and_what_happened_since_the_line_before(caplog: pytest.LogCaptureFixture):
    rig = Rig(caplog)
    busy = scheduler_stats(
        num_running=3, num_waiting=1, num_blocked=1, num_used_blocks=50, prefix_queries=400, prefix_hits=100
    )
    first = LoopStats(num_prompt_tokens=400, num_generated_tokens=1000, scheduler=busy)
    assert rig.after_10_s(first) == [(3, 2, 25.0, 40.0, 100.0, 25.0)]
    later = replace(busy, num_waiting=0, num_blocked=0, prefix_queries=500, prefix_hits=190)
    second = LoopStats(num_prompt_tokens=500, num_generated_tokens=1255, scheduler=later)
    assert rig.after_10_s(second) == [(3, 0, 25.0, 10.0, 25.5, 90.0)]
    assert rig.after_10_s(second) == [(3, 0, 25.0, 0.0, 0.0, None)]


def test_an_idle_or_loading_engine_has_no_line_and_one_that_was_busy_has_one(
    caplog: pytest.LogCaptureFixture,
):
    rig = Rig(caplog)
    assert rig.after_10_s(LoopStats()) == []
    idle = LoopStats(scheduler=scheduler_stats())
    assert rig.after_10_s(idle) == []
    done = replace(idle, num_prompt_tokens=20, num_generated_tokens=30)
    assert rig.after_10_s(done) == [(0, 0, 0.0, 2.0, 3.0, None)]
    assert rig.after_10_s(done) == []
