"""The state of an engine belongs to the thread that runs it."""

from __future__ import annotations

import pytest

from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from tests.engine_svc.fakes import MAX_MODEL_LEN, make_scheduler
from tests.engine_svc.loop.test_engine import Rig
from tests.one_owner import ForeignAccess, OneOwner


def test_another_thread_may_not_touch_the_state_of_a_running_engine(one_owner: OneOwner):
    rig = Rig()
    rig.add(1)
    rig.start()
    rig.frontend.read_until_ended(1)
    for touch in (
        lambda: rig.engine.abort(["r1"], "test"),
        lambda: rig.scheduler.running_ids,
        lambda: setattr(rig.scheduler, "_step_number", 0),
        lambda: rig.scheduler._kv_cache.pool.allocate(1),
    ):
        with pytest.raises(ForeignAccess, match="MainThread, which does not run the engine"):
            touch()
    assert [refused.split(" in ")[0] for refused in one_owner.refused] == [
        "Engine.abort", "Scheduler.running_ids", "a write to Scheduler", "BlockPool.allocate",
    ]  # fmt: skip
    one_owner.refused.clear()
    rig.stop()


def test_other_threads_may_ask_for_a_refusal_and_read_statistics():
    rig = Rig()
    rig.add(1)
    rig.start()
    rig.frontend.read_until_ended(1)
    too_long = Request("long", [1] * MAX_MODEL_LEN, MAX_MODEL_LEN, SamplingParams(max_tokens=1))
    assert rig.scheduler.refusal(too_long) is not None
    fitting = Request("short", [1], 1, SamplingParams(max_tokens=1))
    assert rig.scheduler.refusal(fitting) is None
    assert rig.stats_snapshot.read().num_finished == 1
    rig.stop()


def test_the_state_of_an_engine_that_has_ended_is_free():
    rig = Rig()
    rig.add(1)
    rig.serve(1)
    assert rig.scheduler.running_ids == []
    assert type(rig.scheduler) is type(make_scheduler())
